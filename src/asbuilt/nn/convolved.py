"""Convolutional networks over pixels. Shapes: images N, rows H, columns W, channels C, vectors P, keys S, heads D wide.

Grids are kept with channels last, (N, H, W, C), so that norms and linear maps read whole vectors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asbuilt.kernels.rows import linear
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes, module, optional
from asbuilt.nn.step import Step
from asbuilt.nn.vision import PatchEmbedding
from asbuilt.spec import convolved as spec


@computes(spec.GridConvolution, spec.PixelConvolution)
class GridConvolution(PartModule):
    """norm(W * x + b), and tanh-GELU of it."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, part: spec.GridConvolution, path: str) -> None:
        super().__init__(part, path)
        self.part, self.norm = part, module(part.norm, f"{path}.norm")
        if not part.bias:
            self.register_parameter("bias", None)

    def forward(self, x_NHWC: Tensor) -> Tensor:
        """Returns the outputs (N, H, W, C)."""
        x_NHWC = self.norm(self.convolved(x_NHWC))
        return F.gelu(x_NHWC, approximate="tanh") if self.part.activated else x_NHWC

    def convolved(self, x_NHWC: Tensor) -> Tensor:
        """Returns W * x + b."""
        part = self.part
        if part.plain:
            return linear(x_NHWC, self.weight.flatten(1), self.bias)
        before, after = part.edges(x_NHWC.shape[1])
        if before != after:  # the library's own zeros are the same on both sides
            x_NHWC = F.pad(x_NHWC, (0, 0, before, after, before, after))
        padding, groups = (before if before == after else 0), (part.d_in if part.apart else 1)
        x_NCHW = x_NHWC.permute(0, 3, 1, 2)
        made_NCHW = F.conv2d(x_NCHW, self.weight, self.bias, part.stride, padding, groups=groups)
        return made_NCHW.permute(0, 2, 3, 1).contiguous()


@computes(spec.InvertedResidual)
class InvertedResidual(PartModule):
    """Convolutions one after the other, scaled and added to their input."""

    scale: Tensor | None

    def __init__(self, part: spec.InvertedResidual, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.steps = nn.ModuleList(module(step, f"{path}.steps.{i}") for i, step in enumerate(part.steps))
        if not part.scaled:
            self.register_parameter("scale", None)

    def forward(self, x_NHWC: Tensor) -> Tensor:
        """Returns (N, H, W, C)."""
        made_NHWC = x_NHWC
        for step in self.steps:
            made_NHWC = step(made_NHWC)
        if self.scale is not None:
            made_NHWC = made_NHWC * self.scale
        return x_NHWC + made_NHWC if self.part.added else made_NHWC


@computes(spec.GridAttention)
class GridAttention(PartModule):
    """x + scale * W_o attention(norm(x)), with one head of keys and values."""

    scale: Tensor
    q: Linear
    k: Linear
    v: Linear
    o: Linear

    def __init__(self, part: spec.GridAttention, path: str) -> None:
        super().__init__(part, path)
        self.part, self.norm = part, module(part.norm, f"{path}.norm")
        self.k_reduced = optional(part.k_reduced, f"{path}.k_reduced")
        self.v_reduced = optional(part.v_reduced, f"{path}.v_reduced")

    def forward(self, x_NHWC: Tensor) -> Tensor:
        """Returns (N, H, W, C)."""
        N, H, W, _ = x_NHWC.shape
        read_NHWC = self.norm(x_NHWC)
        left = (read_NHWC if one is None else one(read_NHWC) for one in (self.k_reduced, self.v_reduced))
        k_NSD, v_NSD = (to(one.flatten(1, 2)) for to, one in zip((self.k, self.v), left, strict=True))
        q_NPD = self.q(read_NHWC).view(N, H * W * self.part.n_heads, self.part.d_head)
        scores_NPS = (q_NPD @ k_NSD.transpose(1, 2)) * self.part.d_head**-0.5
        mixed_NPD = scores_NPS.softmax(-1) @ v_NSD
        return x_NHWC + self.o(mixed_NPD.view(N, H, W, -1)) * self.scale


@computes(spec.ConvolvedPatches)
class ConvolvedPatches(PatchEmbedding):
    """A network over images, and the fusion of two of its grids."""

    part: spec.ConvolvedPatches

    def __init__(self, part: spec.ConvolvedPatches, path: str) -> None:
        super().__init__(part, path)
        self.stem, self.fuse = module(part.stem, f"{path}.stem"), module(part.fuse, f"{path}.fuse")
        self.blocks = nn.ModuleList(module(block, f"{path}.blocks.{i}") for i, block in enumerate(part.blocks))
        self.norm = module(part.norm, f"{path}.norm")

    def forward(self, pixels_NCHW: Tensor, step: Step) -> Tensor:
        """Returns (N, P, M), patches row by row."""
        part = self.part
        x_NHWC = self.stem(pixels_NCHW.to(step.dtype).permute(0, 2, 3, 1).contiguous())
        early_NHWC = x_NHWC
        for i, block in enumerate(self.blocks):
            x_NHWC = block(x_NHWC)
            early_NHWC = x_NHWC if i == part.fused else early_NHWC
        joined_NHWC = self.fuse(beside(early_NHWC, x_NHWC))
        each = part.side // part.n_side
        squares = joined_NHWC.unflatten(2, (-1, each)).unflatten(1, (-1, each))
        return self.norm(squares.mean((2, 4)) if each > 1 else joined_NHWC).flatten(1, 2)


def beside(large_NHWC: Tensor, small_NHWC: Tensor) -> Tensor:
    """Returns both grids side by side, the vectors of the smaller one repeated."""
    n = large_NHWC.shape[1] // small_NHWC.shape[1]
    repeated = small_NHWC.repeat_interleave(n, 1).repeat_interleave(n, 2)
    return torch.cat((large_NHWC, repeated), -1)

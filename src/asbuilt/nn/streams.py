"""Hyper-connections: reading several residual streams as one, and writing to them.

Shapes: batch B, tokens T, rows R = B*T, streams N, model width M; all streams of a token are contiguous, N*M wide.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.nn.linear import PartModule
from asbuilt.nn.registry import computes
from asbuilt.spec import streams as spec


class _Streams(PartModule):
    """What both kinds share."""

    fn: Tensor
    base: Tensor
    scale: Tensor

    def __init__(self, part: spec.HyperConnection | spec.StreamMerge, path: str) -> None:
        super().__init__(part, path)
        self.part = part

    def logits(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns each kind of weights before its function, (R, width), in float32 or wider."""
        widths = self.part.widths
        wide = torch.promote_types(x.dtype, torch.float32)
        x_RW = x.flatten(0, -2).to(wide)
        rstd = torch.rsqrt(x_RW.square().mean(-1, keepdim=True) + self.part.norm_eps)
        scales = torch.cat([one.expand(n) for one, n in zip(self.scale.to(wide), widths, strict=True)])
        return (F.linear(x_RW, self.fn.to(wide)) * rstd * scales + self.base).split(widths, -1)

    def read(self, x: Tensor, weight_RN: Tensor) -> Tensor:
        """Returns the weighted sum of the streams, (B, T, M)."""
        streams_RNM = x.reshape(-1, self.part.n_streams, self.part.d_model)
        return torch.bmm(weight_RN.to(x.dtype)[:, None], streams_RNM).view(*x.shape[:-1], self.part.d_model)


@computes(spec.HyperConnection)
class HyperConnection(_Streams):
    """Weights to read streams, to write to them and to mix them."""

    part: spec.HyperConnection

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what the branch reads (B, T, M), post (R, N, 1) and C transposed (R, N, N)."""
        pre, post, mix = self.logits(x)
        n, dtype = self.part.n_streams, x.dtype
        read = self.read(x, pre.sigmoid() + self.part.eps)
        return read, (2 * post.sigmoid()).to(dtype)[:, :, None], self.balanced(mix.unflatten(-1, (n, n))).to(dtype).mT

    def balanced(self, mix_RNN: Tensor) -> Tensor:
        """Returns C (R, N, N), whose rows and columns sum to almost 1."""
        eps = self.part.eps
        mix = mix_RNN.softmax(-1) + eps
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
        for _ in range(self.part.iterations - 1):
            mix = mix / (mix.sum(-1, keepdim=True) + eps)
            mix = mix / (mix.sum(-2, keepdim=True) + eps)
        return mix

    def write(self, x: Tensor, y_BTM: Tensor, post_RN1: Tensor, mix_RNN: Tensor) -> Tensor:
        """Returns the streams with a branch's output added."""
        streams_RNM = x.reshape(-1, self.part.n_streams, self.part.d_model)
        return (post_RN1 * y_BTM.flatten(0, 1)[:, None] + torch.bmm(mix_RNN, streams_RNM)).view(x.shape)


@computes(spec.StreamMerge)
class StreamMerge(_Streams):
    """One stream as several, which are the same at first, and those as one."""

    def split(self, x_BTM: Tensor) -> Tensor:
        """Returns (B, T, N*M)."""
        return x_BTM.repeat(1, 1, self.part.n_streams)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, T, M)."""
        (weight_RN,) = self.logits(x)
        return self.read(x, weight_RN.sigmoid() + self.part.eps)

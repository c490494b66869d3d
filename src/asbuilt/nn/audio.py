"""Sound as mel spectrograms. Shapes: batch B, mel bands F, frames N, tokens T, channels C, model width M."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import audio as spec


@dataclass(frozen=True)
class Sounds:
    """The log-mel spectrograms (F, N) of several sounds, each with its own number of frames."""

    mels: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.mels)

    def to(self, device: torch.device) -> Sounds:
        """Returns the spectrograms on a device."""
        return Sounds(tuple(mel.to(device) for mel in self.mels))

    def alike(self) -> list[tuple[list[int], Tensor]]:
        """Returns the spectrograms (n, F, N) of each size, and which ones they are."""
        found: dict[torch.Size, list[int]] = {}
        for i, mel in enumerate(self.mels):
            found.setdefault(mel.shape, []).append(i)
        return [(which, torch.stack([self.mels[i] for i in which])) for which in found.values()]


@computes(spec.MelEmbedding)
class MelEmbedding(PartModule):
    """Two convolutions over frames, the second with a stride of 2."""

    first: Linear  # has the kernel and the bias
    second: Linear

    def __init__(self, part: spec.MelEmbedding, path: str) -> None:
        super().__init__(part, path)
        self.part = part

    def tokens(self, mels_BFN: Tensor) -> int:
        """Returns the tokens of each sound; raises InputError for spectrograms of another size."""
        size = (self.part.n_mels, self.part.n_frames)
        if mels_BFN.ndim != 3 or tuple(mels_BFN.shape[1:]) != size:
            allowed = f"log-mel spectrograms (B, {size[0]}, {size[1]})"
            raise InputError("wrong size", field="audio", value=tuple(mels_BFN.shape), allowed=allowed)
        return self.part.n_tokens

    def forward(self, mels_BFN: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        mels_BFN = mels_BFN.to(self.first.weight.dtype)
        x = F.gelu(F.conv1d(mels_BFN, self.first.weight, self.first.bias, padding=1))
        x = F.gelu(F.conv1d(x, self.second.weight, self.second.bias, stride=spec.STRIDE, padding=1))
        return x.transpose(1, 2).contiguous()  # else every sum with it is laid out by channel too


@computes(spec.MelSubsampling)
class MelSubsampling(PartModule):
    """Convolutions over frames and bands, each with a norm over channels, and a map of what they leave of a frame."""

    weight: Tensor

    def __init__(self, part: spec.MelSubsampling, path: str) -> None:
        super().__init__(part, path)
        self.part = part

    def tokens(self, mels_BFN: Tensor) -> int:
        """Returns the tokens of each sound; raises InputError for spectrograms of another size."""
        part, shape = self.part, tuple(mels_BFN.shape)
        if mels_BFN.ndim != 3 or shape[1] != part.n_mels or not 1 <= shape[2] <= part.n_frames:
            allowed = f"log-mel spectrograms (B, {part.n_mels}, 1 to {part.n_frames})"
            raise InputError("wrong size", field="audio", value=shape, allowed=allowed)
        return part.left(shape[2])[-1]

    def forward(self, mels_BFN: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        x_BNFC = mels_BFN.to(self.weight.dtype).transpose(1, 2)[..., None]
        for i in range(len(self.part.channels)):
            conv: Linear = self.get_submodule(f"conv_{i}")  # type: ignore[assignment]  # pyright: ignore
            norm: Linear = self.get_submodule(f"norm_{i}")  # type: ignore[assignment]  # pyright: ignore
            if self.part.ahead:  # zeros after the frames, and on both sides of the bands
                x_BNFC = F.pad(x_BNFC, (0, 0, 1, 1, 0, spec.TAPS - 1))
            padding = 0 if self.part.ahead else 1
            made_BCNF = F.conv2d(x_BNFC.permute(0, 3, 1, 2), conv.weight, stride=spec.STRIDE, padding=padding)
            x_BNFC = F.relu(self.normed(made_BCNF.permute(0, 2, 3, 1), norm.weight))
        return F.linear(x_BNFC.flatten(2), self.weight)

    def normed(self, x_BNFC: Tensor, gain_C: Tensor) -> Tensor:
        """Returns the frames normalised, each by itself or, `cumulative`, by all up to it, in float32 or wider."""
        if not self.part.cumulative:
            return F.layer_norm(x_BNFC, x_BNFC.shape[-1:], gain_C, None, self.part.eps)
        wide_BNFC = x_BNFC.contiguous().to(torch.promote_types(x_BNFC.dtype, torch.float32))
        each = x_BNFC.shape[2] * x_BNFC.shape[3]
        counts_N11 = each * torch.arange(1, x_BNFC.shape[1] + 1, device=x_BNFC.device)[:, None, None]
        centred_BNFC = wide_BNFC - wide_BNFC.sum((2, 3), keepdim=True).cumsum(1) / counts_N11
        variance_BN11 = centred_BNFC.square().sum((2, 3), keepdim=True).cumsum(1) / counts_N11
        normed_BNFC = centred_BNFC * (variance_BN11 + self.part.eps).rsqrt()
        return (normed_BNFC * gain_C).to(x_BNFC.dtype)

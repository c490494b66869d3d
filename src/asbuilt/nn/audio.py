"""Sound as mel spectrograms. Shapes: batch B, mel bands F, frames N, tokens T, model width M."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import audio as spec


@computes(spec.MelEmbedding)
class MelEmbedding(PartModule):
    """Two convolutions over frames, the second with a stride of 2."""

    first: Linear  # has the kernel and the bias
    second: Linear

    def __init__(self, part: spec.MelEmbedding, path: str) -> None:
        super().__init__(part, path)
        self.part = part

    def forward(self, mels_BFN: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M); raises InputError for spectrograms of another size."""
        size = (self.part.n_mels, self.part.n_frames)
        if mels_BFN.ndim != 3 or tuple(mels_BFN.shape[1:]) != size:
            allowed = f"log-mel spectrograms (B, {size[0]}, {size[1]})"
            raise InputError("wrong size", field="audio", value=tuple(mels_BFN.shape), allowed=allowed)
        mels_BFN = mels_BFN.to(self.first.weight.dtype)
        x = F.gelu(F.conv1d(mels_BFN, self.first.weight, self.first.bias, padding=1))
        x = F.gelu(F.conv1d(x, self.second.weight, self.second.bias, stride=spec.STRIDE, padding=1))
        return x.transpose(1, 2).contiguous()  # else every sum with it is laid out by channel too

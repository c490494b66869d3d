"""The difference of two attentions. Shapes: batch B, new tokens T, heads H, width V of a pair's values together."""

from __future__ import annotations

import torch
from torch import Tensor

from asbuilt.nn.linear import PartModule
from asbuilt.nn.registry import computes, module
from asbuilt.spec import differential as spec


@computes(spec.Differential)
class Differential(PartModule):
    """(1 - start) norm(y_1 - lambda y_2) of each pair of heads."""

    q1: Tensor
    k1: Tensor
    q2: Tensor
    k2: Tensor

    def __init__(self, part: spec.Differential, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.norm = module(part.norm, f"{path}.norm")

    def forward(self, y_BHTV: Tensor) -> Tensor:
        """Returns (B, H/2, T, V) of the heads' sums."""
        first, second = y_BHTV.chunk(2, 1)
        return self.norm(first - self.weight(y_BHTV.dtype) * second) * (1 - self.part.start)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Returns lambda, computed in float32 or wider."""
        wide = torch.promote_types(dtype, torch.float32)
        grown, shrunk = ((q * k).sum(dtype=wide).exp() for q, k in ((self.q1, self.k1), (self.q2, self.k2)))
        return (grown - shrunk + self.part.start).to(dtype)


def paired(v_BKSV: Tensor) -> Tensor:
    """Returns (B, K, S, 2V): beside each key head's values those of the other of its pair, the first half's first."""
    both = torch.cat(v_BKSV.chunk(2, 1), -1)
    return torch.cat((both, both), 1)

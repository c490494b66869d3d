"""Token ids of images or sounds. Shapes: batch B, text tokens T, model width M."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.nn.linear import PartModule
from asbuilt.nn.registry import computes, module
from asbuilt.spec import own_tokens as spec

Mapped = Callable[[Tensor], Tensor]


@computes(spec.OwnTokens)
class OwnTokens(PartModule):
    """Rows of an own table, normalised and mapped by a projector, in place of the text's."""

    weight: Tensor

    def __init__(self, part: spec.OwnTokens, path: str) -> None:
        super().__init__(part, path)
        self.part, self.norm = part, module(part.norm, f"{path}.norm")

    def forward(self, x_BTM: Tensor, tokens_BT: Tensor, mapped: Mapped) -> Tensor:
        """Returns the embedded text (B, T, M), with own rows for the tokens that have them."""
        part = self.part
        rows_BT = (tokens_BT - part.first).clamp(0, part.n_rows - 1)
        own_BT1 = ((tokens_BT >= part.first) & (tokens_BT < part.past))[..., None]
        return torch.where(own_BT1, mapped(self.norm(F.embedding(rows_BT, self.weight))), x_BTM)

    def last(self, mapped: Mapped) -> Tensor:
        """Returns (1, M): the vector of the last of the tokens."""
        return mapped(self.norm(self.weight[-1:]))

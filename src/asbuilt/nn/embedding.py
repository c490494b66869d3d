"""Token embeddings: rows of a table, and what they are multiplied by.

Shapes: batch B, new tokens T, model width M.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asbuilt.nn.linear import Linear, PartModule, Table
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import embedding as spec


@computes(spec.TokenEmbedding)
class TokenEmbedding(PartModule):
    """Looks up one vector per token, and multiplies it to the model's width where the table has another."""

    weight: Tensor
    project: Linear | None

    def __init__(self, part: spec.TokenEmbedding, path: str) -> None:
        super().__init__(part, path)
        self.scale, self.format = part.scale, part.format
        if part.d_table is None:
            self.project = None

    @property
    def table(self) -> Table:
        """The table, which a tied head multiplies."""
        return Table(self.weight, self.format)

    def forward(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        x = self.table.rows(tokens_BT, step.dtype)
        return scaled(x if self.project is None else self.project(x), self.scale)


@computes(spec.SharedEmbedding)
class SharedEmbedding(PartModule):
    """Looks up one vector per token in a table that is lent."""

    def __init__(self, part: spec.SharedEmbedding, path: str) -> None:
        super().__init__(part, path)
        self.scale = part.scale

    def forward(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        assert step.table is not None, "the whole model has a table to lend"
        return scaled(step.table.rows(tokens_BT, step.dtype), self.scale)


def scaled(x_BTM: Tensor, scale: float) -> Tensor:
    """Returns the vectors multiplied by a factor in their own dtype, as models that scale them were trained."""
    return x_BTM if scale == 1.0 else x_BTM * torch.tensor(scale, dtype=x_BTM.dtype, device=x_BTM.device)

"""Token embeddings: rows of a table, scaled.

Shapes: batch B, new tokens T, model width M.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asbuilt.nn.linear import Linear, Matrix, PartModule
from asbuilt.nn.ngrams import NGrams
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import embedding as spec


@computes(spec.TokenEmbedding)
class TokenEmbedding(PartModule):
    """Looks up one row per token, and maps it to the model's width if the table has another."""

    weight: Tensor
    project: Linear | None

    def __init__(self, part: spec.TokenEmbedding, path: str) -> None:
        super().__init__(part, path)
        self.scale, self.format = part.scale, part.format
        self.ngrams = None if part.ngrams is None else NGrams(part.ngrams, f"{path}.ngrams")
        if part.d_table is None:
            self.project = None

    @property
    def table(self) -> Matrix:
        """The table, which a tied head shares."""
        return Matrix(self.weight, self.format)

    def forward(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        x = self.rows(tokens_BT, step.dtype)
        x = scaled(x if self.project is None else self.project(x), self.scale)
        return x if self.ngrams is None else self.ngrams(x, tokens_BT, step)

    def rows(self, tokens_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the table's rows (B, T, width) of tokens."""
        return self.table.rows(tokens_BT, dtype)


@computes(spec.SharedEmbedding)
class SharedEmbedding(PartModule):
    """Looks up one row per token in the whole model's table."""

    def __init__(self, part: spec.SharedEmbedding, path: str) -> None:
        super().__init__(part, path)
        self.scale = part.scale

    def forward(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        assert step.table is not None, "the whole model must share its table"
        return scaled(step.table.rows(tokens_BT, step.dtype), self.scale)


def scaled(x_BTM: Tensor, scale: float) -> Tensor:
    """Returns the vectors scaled in their own dtype, as in training."""
    return x_BTM if scale == 1.0 else x_BTM * x_BTM.new_full((), scale)

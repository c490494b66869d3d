"""Positions of patches in two tables.

Shapes: patches T, model width M.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.nn.linear import PartModule
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import axial as spec


@computes(spec.AxialPositions)
class AxialPositions(PartModule):
    """Looks up one vector per column and one per row."""

    columns: Tensor
    rows: Tensor

    def __init__(self, part: spec.AxialPositions, path: str) -> None:
        super().__init__(part, path)
        self.n_entries = part.n_entries

    def forward(self, step: Step) -> Tensor:
        """Returns (1, T, M); raises InputError for an image of more rows or columns than the tables have entries."""
        assert step.grid is not None
        assert step.coordinates_3BT is not None, "these positions are those of an image"
        if max(step.grid) > self.n_entries:
            allowed = f"at most {self.n_entries} rows and columns of patches"
            raise InputError("too large for its positions", field="images", value=step.grid, allowed=allowed)
        _, rows_1T, columns_1T = step.coordinates_3BT
        return F.embedding(columns_1T, self.columns) + F.embedding(rows_1T, self.rows)

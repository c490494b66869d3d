"""Positions of patches in two tables.

Shapes: patches T, model width M.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

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
        self.n_side = part.n_side

    def forward(self, step: Step) -> Tensor:
        """Returns (1, T, M)."""
        places = step.positions_BT
        return F.embedding(places % self.n_side, self.columns) + F.embedding(places // self.n_side, self.rows)

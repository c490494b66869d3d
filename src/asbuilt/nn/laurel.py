"""Low-rank residuals beside a branch's body.

Shapes: batch B, new tokens T, model width M.
"""

from __future__ import annotations

from torch import Tensor

from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes, optional
from asbuilt.spec import laurel as spec


@computes(spec.Laurel)
class Laurel(PartModule):
    """x + norm(right(left(x)))."""

    left: Linear
    right: Linear

    def __init__(self, part: spec.Laurel, path: str) -> None:
        super().__init__(part, path)
        self.norm = optional(part.norm, f"{path}.norm")

    def forward(self, x_BTM: Tensor) -> Tensor:
        """Returns (B, T, M)."""
        y = self.right(self.left(x_BTM))
        return x_BTM + (y if self.norm is None else self.norm(y))

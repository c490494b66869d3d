"""Learned augmented residual layers: a low-rank residual beside a branch's body.

Menghani et al. 2024 (LAuReL, arXiv 2411.07501).
"""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import Pass, Product, require, require_sizes


@dataclass(frozen=True, kw_only=True)
class Laurel(Mapped):
    """x + norm(right(left(x))), `rank` numbers wide in between: the low-rank form, with a norm as in Gemma 3n."""

    d_model: int
    """Width of the residual stream."""
    rank: int
    """Width between the two maps."""
    norm: Norm | None = None
    """Norm of what is added."""
    left: Map | None = None
    """Replaces the plain map to `rank` numbers, if given."""
    right: Map | None = None
    """Replaces the plain map from there, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "rank")
        fits = self.norm is None or self.norm.d == self.d_model
        require(self, "norm", fits, f"a norm over d_model = {self.d_model}")
        self.require_maps()

    def plain_maps(self) -> dict[str, Linear]:
        """left (d_model to rank) and right (rank to d_model), which are replicated."""
        left = Linear(d_in=self.d_model, d_out=self.rank)
        return {"left": left, "right": Linear(d_in=self.rank, d_out=self.d_model, to_stream=True)}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Both maps."""
        return self.map_products(run, *self.maps)

"""Positions of patches in two tables, one for columns and one for rows."""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.spec.part import Part, Weight, require, require_sizes


@dataclass(frozen=True, kw_only=True)
class AxialPositions(Part):
    """columns[x] + rows[y] for the patch in column x and row y of a square image, added to its embedding."""

    kind = "embedding"
    n_entries: int
    """Entries of each table."""
    d_model: int
    """Width of the residual stream."""
    n_side: int
    """Patches per side of the image."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_entries", "d_model", "n_side")
        require(self, "n_side", self.n_side <= self.n_entries, f"at most n_entries = {self.n_entries}")

    @property
    def n_positions(self) -> int:
        """Patches of an image."""
        return self.n_side**2

    def holds(self) -> dict[str, Weight]:
        """Both tables (n_entries, d_model)."""
        return dict.fromkeys(("columns", "rows"), Weight(shape=(self.n_entries, self.d_model), role="table"))

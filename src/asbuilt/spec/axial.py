"""Positions of patches in two tables, one for columns and one for rows."""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.spec.part import Part, Weight, require_sizes


@dataclass(frozen=True, kw_only=True)
class AxialPositions(Part):
    """columns[x] + rows[y] for the patch in column x and row y of an image of any size, added to its embedding."""

    kind = "embedding"
    n_entries: int
    """Entries of each table, the most rows or columns of an image's patches."""
    d_model: int
    """Width of the residual stream."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_entries", "d_model")

    def holds(self) -> dict[str, Weight]:
        """Both tables (n_entries, d_model)."""
        return dict.fromkeys(("columns", "rows"), Weight(shape=(self.n_entries, self.d_model), role="table"))

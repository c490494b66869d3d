"""What positions in two tables save."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Saved, memory_of
from asbuilt.spec.axial import AxialPositions
from asbuilt.spec.part import Pass


@memory_of(AxialPositions)
class AxialPositionsMemory(Memory[AxialPositions]):
    """Memory of two lookups."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """Column and row of every patch, once for all images."""
        return tuple(Saved(name=name, size=run.tokens, width="int64", divided="none") for name in ("columns", "rows"))

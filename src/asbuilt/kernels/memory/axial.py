"""What positions in two tables save."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Saved, memory_of
from asbuilt.spec.axial import AxialPositions
from asbuilt.spec.part import Pass


@memory_of(AxialPositions)
class AxialPositionsMemory(Memory[AxialPositions]):
    """Memory of two lookups."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """Time, row and column of every patch, once for all images."""
        return (Saved(name="coordinates", size=3 * run.tokens, width="int64", divided="none"),)

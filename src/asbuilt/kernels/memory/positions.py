"""What positions keep and need: tables that all layers of a stack share."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Saved, memory_of
from asbuilt.spec.part import Pass
from asbuilt.spec.positions import LearnedPositions, QueryTemperature, Rotary


@memory_of(LearnedPositions)
class LearnedPositionsMemory(Memory[LearnedPositions]):
    """Memory of looking positions up."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The looked-up positions, one row for the whole batch when nothing is padded."""
        return (Saved(name="positions", size=run.tokens, width="int64", shared=True),)


@memory_of(Rotary)
class RotaryMemory(Memory[Rotary]):
    """Memory of the tables of cos and sin."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The tables of cos and sin, the same for all layers with equal rotary positions."""
        return (Saved(name=repr(self.part), size=2 * run.tokens * self.part.d_rotary, shared=True),)

    def peak_bytes(self, run: Pass) -> int:
        """The tables of cos and sin, which stay for the whole pass."""
        return 2 * run.tokens * self.part.d_rotary * run.width


@memory_of(QueryTemperature)
class QueryTemperatureMemory(Memory[QueryTemperature]):
    """Memory of the queries' factors."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The factors, the same for all layers."""
        return (Saved(name=repr(self.part), size=run.tokens, shared=True),)

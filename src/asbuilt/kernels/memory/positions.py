"""What positions save and need: tables that all layers of a stack share."""

from __future__ import annotations

from math import ceil, isqrt

from asbuilt.kernels.memory.registry import Memory, Saved, memory_of
from asbuilt.spec.part import Pass
from asbuilt.spec.positions import (
    DynamicNTK,
    GridPositions,
    LearnedPositions,
    LinearScaling,
    LongRope,
    QueryTemperature,
    Rotary,
)


def placed(run: Pass) -> int:
    """Returns the number of positions of a pass: of one sequence, or of all if each has its own."""
    return run.rows if run.documents else run.tokens


@memory_of(LearnedPositions)
class LearnedPositionsMemory(Memory[LearnedPositions]):
    """Memory of the lookup of positions."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The position ids, one row for the whole batch unless each has its own documents."""
        return (Saved(name="positions", size=placed(run), width="int64", shared=True),)


@memory_of(GridPositions)
class GridPositionsMemory(Memory[GridPositions]):
    """Memory of interpolating a table."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The places in the table and their weights per patch, the same for all images of one size."""
        size = self.part.n_taps(isqrt(run.tokens)) ** 2 * run.tokens
        places = Saved(name="grid positions", size=size, width="int64", shared=True)
        return (places, Saved(name="grid weights", size=size, shared=True))


@memory_of(Rotary)
class RotaryMemory(Memory[Rotary]):
    """Memory of RoPE tables."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The RoPE tables, shared by all layers with equal RoPE."""
        name = f"{self.part} of {run.tokens}"  # windows of an image have tables of their own
        return (Saved(name=name, size=2 * placed(run) * self.part.d_rotary, shared=True),)

    def peak_bytes(self, run: Pass) -> int:
        """The RoPE tables, which stay for the whole pass."""
        return 2 * placed(run) * self.part.d_rotary * run.width

    def resident(self, tokens: int, width: int) -> int:
        """Cosines and sines of every position, once for each pair of numbers.

        As in vLLM's rotary_embedding: a factor by which frequencies are divided, fixed or growing, makes the table that
        many times longer; two lists of factors have a table each, one of the original context.
        """
        scaling, rows = self.part.scaling, tokens
        if isinstance(scaling, LinearScaling | DynamicNTK):
            rows = ceil(tokens * scaling.factor)
        elif isinstance(scaling, LongRope):
            rows = tokens + scaling.original_context
        return rows * self.part.d_rotary * width


@memory_of(QueryTemperature)
class QueryTemperatureMemory(Memory[QueryTemperature]):
    """Memory of the queries' scales."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The scales, shared by all layers."""
        return (Saved(name=f"{self.part} of {run.tokens}", size=placed(run), shared=True),)

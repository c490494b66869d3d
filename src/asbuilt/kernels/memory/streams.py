"""What hyper-connections save and need."""

from __future__ import annotations

from typing import TypeVar

from asbuilt.kernels.memory.registry import Memory, Saved, memory_of
from asbuilt.spec.part import Pass
from asbuilt.spec.streams import HyperConnection, StreamMerge

S = TypeVar("S", HyperConnection, StreamMerge)


class _StreamsMemory(Memory[S]):
    """Memory of weights of streams."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The streams and, if narrow, float32 copies of streams and matrix; the weights, scaled and unscaled."""
        part = self.part
        count, wide = sum(part.widths), part.n_streams * part.d_model
        copied = {"wide streams": run.rows * wide} if run.width < 4 else {}
        kept = copied | {
            "rstd": run.rows,
            "products": run.rows * count,
            "normed": run.rows * count,
            "pre": run.rows * part.n_streams,
        }
        weights = {"wide fn": count * wide, "scales": count} if run.width < 4 else {"scales": count}
        return (
            Saved(name="input", size=run.rows * wide),
            *(Saved(name=name, size=size, width="wide") for name, size in kept.items()),
            *(Saved(name=name, size=size, width="wide", divided="none") for name, size in weights.items()),
            Saved(name="read weights", size=run.rows * part.n_streams),
        )

    def peak_bytes(self, run: Pass) -> int:
        """The streams, if narrow again in float32, and squared."""
        numbers = run.rows * self.part.n_streams * self.part.d_model
        return numbers * (max(4, run.width) + (4 if run.width < 4 else 0))


@memory_of(StreamMerge)
class StreamMergeMemory(_StreamsMemory[StreamMerge]):
    """Memory of reading all streams as one."""


@memory_of(HyperConnection)
class HyperConnectionMemory(_StreamsMemory[HyperConnection]):
    """Memory of reading streams, writing to them and mixing them."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """As for reading; also the branch's output, and what each division of C is of."""
        part = self.part
        n, divisions = part.n_streams, 2 * part.iterations - 1
        return (
            *super().saves(run),
            Saved(name="post", size=run.rows * n, width="wide"),
            Saved(name="softmax", size=run.rows * n * n, width="wide"),
            Saved(name="divided", size=run.rows * divisions * (n * n + n), width="wide"),
            Saved(name="write weights", size=run.rows * n),
            Saved(name="mix weights", size=run.rows * n * n),
            Saved(name="result", size=run.rows * part.d_model),
        )

"""What n-gram embeddings save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Memory, Saved, memory, memory_of
from asbuilt.spec.ngrams import HashedTable, NGrams
from asbuilt.spec.part import Pass


@memory_of(HashedTable)
class HashedTableMemory(MappedMemory[HashedTable]):
    """Memory of a hash, a lookup, and a map."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """Which rows are looked up, and the rows."""
        rows = Saved(name="rows", size=run.rows * self.part.d)
        return (Saved(name="places", size=run.rows, width="int64"), rows, *self.maps_keep(run))

    def peak_bytes(self, run: Pass) -> int:
        """The places (int64) beside sums of them, or beside rows and their product."""
        made = run.rows * (self.part.d + self.part.d_model) * run.width + self.peak_beside(run)
        return run.rows * 8 + max(2 * run.rows * 8, made)


@memory_of(NGrams)
class NGramsMemory(Memory[NGrams]):
    """Memory of tables one after the other, beside the tokens before each."""

    def peak_bytes(self, run: Pass) -> int:
        """The ids (int64) beside the sum so far and one table's work, or its result and the sum of both."""
        part = self.part
        ids = run.batch * (run.tokens + part.n - 1) * 8
        if part.boundary is not None:
            ids += (part.n - 1) * run.rows * 8
        table = max(memory(one).peak_bytes(run) for one in dict.fromkeys(part.tables))
        made = run.rows * part.d_model * run.width
        so_far = made if len(part.tables) > 1 else 0
        return ids + so_far + max(table, 2 * made)

"""What learned vectors of tiles save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Saved, memory_of
from asbuilt.spec.part import Pass
from asbuilt.spec.tile_embedding import TileEmbedding

TILINGS = "numbers of tilings"


@memory_of(TileEmbedding)
class TileEmbeddingMemory(Memory[TileEmbedding]):
    """Memory of a lookup and a product with one number."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The numbers of the tilings, the vectors, and the number that multiplies them."""
        part = self.part
        return (
            Saved(name=TILINGS, size=run.batch, width="int64", shared=True),
            Saved(name="vectors", size=run.batch * part.n_tiles * part.d_model),
            Saved(name="gate", size=1, divided="none"),
        )

    def peak_bytes(self, run: Pass) -> int:
        """The vectors, and those of all tokens."""
        part = self.part
        return (2 * run.batch * part.n_tiles + run.rows) * part.d_model * run.width

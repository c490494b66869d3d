"""What token embeddings save and need."""

from __future__ import annotations

from dataclasses import replace

from asbuilt.kernels.memory.linear import MappedMemory, expanding_bytes
from asbuilt.kernels.memory.registry import Memory, Saved, memory, memory_of
from asbuilt.spec.embedding import SharedEmbedding, TokenEmbedding
from asbuilt.spec.part import Pass


@memory_of(TokenEmbedding)
class TokenEmbeddingMemory(MappedMemory[TokenEmbedding]):
    """Memory of the lookup, and of the linear map after a narrow table."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The token ids, the scale if any, and the looked-up rows if they are multiplied."""
        part = self.part
        tokens = Saved(name="tokens", size=run.rows, width="int64", shared=True)
        scale = () if part.scale == 1.0 else (Saved(name="scale", size=1, divided="none"),)
        rows = () if part.d_table is None else (Saved(name="rows", size=run.rows * part.d_table),)
        return (tokens, *scale, *rows, *self.maps_keep(run))

    def peak_bytes(self, run: Pass) -> int:
        """The looked-up rows, and their product; or the result beside what n-grams need."""
        part = self.part
        if part.ngrams is not None:
            beside = run.rows * part.d_model * run.width + memory(part.ngrams).peak_bytes(run)
            return max(beside, TokenEmbeddingMemory(replace(part, ngrams=None)).peak_bytes(run))
        made = run.rows * (part.d_model + (part.d_table or 0)) * run.width + self.peak_beside(run)
        if part.format is None:
            return made
        looked_up = run.rows * part.holds()["weight"].stored_shape[-1]
        return max(made, looked_up + expanding_bytes(part.format, run.rows * part.width, run.width))


@memory_of(SharedEmbedding)
class SharedEmbeddingMemory(Memory[SharedEmbedding]):
    """Memory of the lookup in another part's table."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The token ids, and the scale if any."""
        tokens = Saved(name="tokens", size=run.rows, width="int64", shared=True)
        return (tokens,) if self.part.scale == 1.0 else (tokens, Saved(name="scale", size=1, divided="none"))

    def peak_bytes(self, run: Pass) -> int:
        """The looked-up rows."""
        return run.rows * self.part.d_model * run.width

"""What the projection of relative positions, and the table of their embeddings, save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Saved, memory_of
from asbuilt.spec.part import Pass
from asbuilt.spec.relative import DistanceTable, RelativeProjection


@memory_of(RelativeProjection)
class RelativeProjectionMemory(Memory[RelativeProjection]):
    """Memory of projected distances."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """Sinusoids, distances of pairs and the mask, for all layers; queries, W s(d), and their product."""
        part = self.part
        length, query = run.past + run.tokens, run.rows * part.n_heads * part.d_head
        pairs, length = run.tokens * length, part.n_distances(length)
        fewer = "" if length == run.past + run.tokens else f" of {length}"
        ends = " to the endpoint" if part.endpoint else ""
        at = f" {part.window, part.max_distance}" if part.most_distances is not None else ""
        return (
            Saved(name=f"sinusoids {part.d_model}{fewer}{ends}", size=length * part.d_model, shared=True),
            Saved(name=f"distances{at}", size=pairs, width="int64", shared=True),
            Saved(name=f"ahead{at}", size=pairs, width="bool", shared=True),
            Saved(name="queries", size=query, divided="width"),
            Saved(name="projected", size=length * part.n_heads * part.d_head, divided="width"),
            Saved(name="by distance", size=run.rows * part.n_heads * length, divided="width"),
        )


@memory_of(DistanceTable)
class DistanceTableMemory(Memory[DistanceTable]):
    """Memory of normalising the embeddings of distances."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The normalised vectors, which the layers' maps read, and the norm's statistics."""
        part = self.part
        if part.eps is None:
            return ()
        statistics = (Saved(name=name, size=part.n_rows, divided="none") for name in ("mean", "rstd"))
        return (Saved(name="normed", size=part.n_rows * part.d_model, divided="none"), *statistics)

    def peak_bytes(self, run: Pass) -> int:
        """The normalised vectors, which stay for the whole pass."""
        return 0 if self.part.eps is None else self.part.n_rows * self.part.d_model * run.width

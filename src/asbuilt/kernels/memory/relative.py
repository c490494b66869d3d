"""What the projection of relative positions saves."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Saved, memory_of
from asbuilt.spec.part import Pass
from asbuilt.spec.relative import RelativeProjection


@memory_of(RelativeProjection)
class RelativeProjectionMemory(Memory[RelativeProjection]):
    """Memory of projected distances."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """Sinusoids, distances of pairs and the mask, for all layers; queries, W s(d), and their product."""
        part = self.part
        length, query = run.past + run.tokens, run.rows * part.n_heads * part.d_head
        pairs = run.tokens * length
        return (
            Saved(name=f"sinusoids {part.d_model}", size=length * part.d_model, shared=True),
            Saved(name="distances", size=pairs, width="int64", shared=True),
            Saved(name="ahead", size=pairs, width="bool", shared=True),
            Saved(name="queries", size=query, divided="width"),
            Saved(name="projected", size=length * part.n_heads * part.d_head, divided="width"),
            Saved(name="by distance", size=run.rows * part.n_heads * length, divided="width"),
        )

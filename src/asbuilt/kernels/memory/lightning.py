"""What lightning attention saves and needs: inputs alone are saved, and one chunk is held at once."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.mamba2 import chunks_need
from asbuilt.kernels.memory.registry import Saved, memory_of
from asbuilt.spec.lightning import LightningAttention
from asbuilt.spec.part import Pass


@memory_of(LightningAttention)
class LightningAttentionMemory(MappedMemory[LightningAttention]):
    """Memory of `kernels.mamba2` with one head in each group."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input; q, k and v before their activation; both factors of o's input, and that."""
        part = self.part
        names = ("q", "k", "v", "openness", "normed", "gated")
        inside = (Saved(name=name, size=run.rows * part.d_query, divided="width") for name in names)
        return (Saved(name="input", size=run.rows * part.d_model), *inside, *self.maps_keep(run))

    def recomputes(self) -> tuple[str, ...]:
        """The normed heads, and o's input."""
        return ("normed", "gated")

    def of_heads(self) -> tuple[str, ...]:
        """The norm of what heads read."""
        return ("norm",)

    def peak_bytes(self, run: Pass) -> int:
        """q, k, v and gate, beside each head's own in float32 or wider and the chunks; or beside norm and gate."""
        part, wide = self.part, max(4, run.width)
        all_heads = run.rows * part.d_query
        held = 4 * all_heads * run.width
        need = chunks_need(run, part.n_heads, part.n_heads, part.d_head, part.d_head) - all_heads
        reading = held + (2 * all_heads + need) * wide
        cast = all_heads * 4 if run.width < 4 else 0
        after = held + 3 * all_heads * run.width + cast
        out = held + (all_heads + run.rows * part.d_model) * run.width
        return max(reading, after, out) + self.peak_beside(run)

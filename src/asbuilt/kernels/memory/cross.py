"""What cross-attention saves and needs."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory_of
from asbuilt.spec.cross import CrossAttention
from asbuilt.spec.part import Pass


@memory_of(CrossAttention)
class CrossAttentionMemory(MappedMemory[CrossAttention]):
    """Memory of `kernels.attention` without a mask, over the source's keys."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, the source, q, k and v, the attention output, and what the kernel saves of the scores."""
        part = self.part
        query, source = run.rows * part.d_query, run.batch * run.source_tokens
        common = (
            Saved(name="input", size=run.rows * part.d_model),
            Saved(name="source", size=source * part.d_source, shared=True),
            Saved(name="q", size=query, divided="width"),
            Saved(name="k", size=source * part.d_query, divided="width"),
            Saved(name="v", size=source * part.d_query, divided="width"),
            Saved(name="mixed", size=query, divided="width"),
            *self.maps_keep(run),
        )
        if run.kernel != "reference":
            return (*common, Saved(name="logsumexp", size=run.rows * part.n_heads, width="wide", divided="width"))
        size = run.rows * part.n_heads * run.source_tokens
        cast = (Saved(name="probabilities cast", size=size, divided="width"),) if run.width < 4 else ()
        return (*common, Saved(name="probabilities", size=size, width="wide", divided="width"), *cast)

    def peak_bytes(self, run: Pass) -> int:
        """q, k and v beside the scores, or beside the attention output and the result."""
        part = self.part
        query, source = run.rows * part.d_query * run.width, run.batch * run.source_tokens
        projected = query + 2 * source * part.d_query * run.width
        size = run.rows * part.n_heads * run.source_tokens
        scores = size * (2 * run.width + (8 if run.width < 4 else 0)) if run.kernel == "reference" else 0
        return projected + max(scores, query) + run.rows * part.d_model * run.width + self.peak_beside(run)

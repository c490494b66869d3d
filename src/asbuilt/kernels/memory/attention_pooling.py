"""What attention pooling saves and needs."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory, memory_of
from asbuilt.spec.attention_pooling import AttentionPooling
from asbuilt.spec.part import Pass


@memory_of(AttentionPooling)
class AttentionPoolingMemory(MappedMemory[AttentionPooling]):
    """Memory of attention without a mask, one query per head, and of a feed-forward beside its input."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, q, k and v, the attention output, and what the kernel saves of the scores."""
        part = self.part
        query, keys = run.batch * part.d_query, run.rows * part.d_query
        common = (
            Saved(name="input", size=run.rows * part.d_model),
            Saved(name="q", size=query, divided="width"),
            Saved(name="k", size=keys, divided="width"),
            Saved(name="v", size=keys, divided="width"),
            Saved(name="mixed", size=query, divided="width"),
            *self.maps_keep(run),
        )
        if run.kernel != "reference":
            return (*common, Saved(name="logsumexp", size=run.batch * part.n_heads, width="wide", divided="width"))
        size = run.rows * part.n_heads
        cast = (Saved(name="probabilities cast", size=size, divided="width"),) if run.width < 4 else ()
        return (*common, Saved(name="probabilities", size=size, width="wide", divided="width"), *cast)

    def peak_bytes(self, run: Pass) -> int:
        """q, k and v beside the scores or the attention output, and the result; or the result beside norm or ffn."""
        part, one = self.part, self.part.child_run("norm", run)
        query, made = run.batch * part.d_query * run.width, one.rows * part.d_model * run.width
        size = run.rows * part.n_heads
        scores = size * (2 * run.width + (8 if run.width < 4 else 0)) if run.kernel == "reference" else 0
        attending = query + 2 * run.rows * part.d_query * run.width + max(scores, query) + self.peak_beside(run)
        after = max(memory(part.norm).peak_bytes(one), made + memory(part.ffn).peak_bytes(one))
        return made + max(attending, after)

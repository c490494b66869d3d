"""What cross-attention saves and needs."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Room, Saved, memory_of
from asbuilt.spec.cross import CrossAttention
from asbuilt.spec.part import Pass


@memory_of(CrossAttention)
class CrossAttentionMemory(MappedMemory[CrossAttention]):
    """Memory of `kernels.attention` over the source's keys, those of an image with a mask."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, the source, q, k and v, the attention output, and what the kernel saves of the scores."""
        part = self.part
        query, source = run.rows * part.d_query, run.batch * run.source_tokens
        common = (
            Saved(name="input", size=run.rows * part.d_model),
            Saved(name="source", size=source * part.d_source, shared=True),
            Saved(name="q", size=query, divided="width"),
            Saved(name="k", size=source * part.d_kv, divided="width"),
            Saved(name="v", size=source * part.d_kv, divided="width"),
            Saved(name="mixed", size=query, divided="width"),
            *self.maps_keep(run),
        )
        pairs = self._masked(run)
        if run.kernel != "reference":  # the library converts a mask to the pass's dtype
            mask = (Saved(name="mask", size=pairs, divided="none"),) if pairs else ()
            statistics = Saved(name="logsumexp", size=run.rows * part.n_heads, width="wide", divided="width")
            return (*common, statistics, *mask)
        size = run.rows * part.n_heads * run.source_tokens
        common += (Saved(name="mask", size=pairs, width="bool", divided="none"),) if pairs else ()
        cast = (Saved(name="probabilities cast", size=size, divided="width"),) if run.width < 4 else ()
        return (*common, Saved(name="probabilities", size=size, width="wide", divided="width"), *cast)

    def _masked(self, run: Pass) -> int:
        """Returns the pairs of a mask: of images alone, of which texts see those of their own tiles."""
        return run.rows * run.source_tokens if run.images else 0

    def awaits(self, run: Pass) -> int:
        """Those of the source."""
        return run.batch * run.source_tokens * self.part.d_source * run.width

    def of_heads(self) -> tuple[str, ...]:
        """The norms of queries and keys."""
        return ("q_norm", "k_norm")

    def room(self, run: Pass) -> Room | None:
        """Gradients of the mix and of q, k and v, or of a matrix; of heads without norms, and without a mask."""
        part = self.part
        if not self.plain or part.q_norm or part.k_norm or self._masked(run) or run.kernel == "reference":
            return None
        query, source = run.rows * part.d_query, run.batch * run.source_tokens
        matrix = max(one.plain.d_in * one.plain.d_out for one in part.maps.values())
        return Room(0, (query + max(query + 2 * source * part.d_kv, matrix)) * run.width)

    def peak_bytes(self, run: Pass) -> int:
        """q, k and v beside the scores, or beside the attention output and the result."""
        part = self.part
        query, source = run.rows * part.d_query * run.width, run.batch * run.source_tokens
        key = source * part.d_kv * run.width
        projected = query * (2 if part.q_norm else 1) + key * (3 if part.k_norm else 2)
        size = run.rows * part.n_heads * run.source_tokens
        scores = size * (2 * run.width + (8 if run.width < 4 else 0)) if run.kernel == "reference" else 0
        scores += self._masked(run) * (2 if run.kernel == "reference" else run.width)
        return projected + max(scores, query) + run.rows * part.d_model * run.width + self.peak_beside(run)

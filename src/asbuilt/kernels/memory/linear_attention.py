"""What linear attention saves and needs, chunk by chunk."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory_of
from asbuilt.spec import linear_attention as spec
from asbuilt.spec.part import Pass


@memory_of(spec.LinearAttention)
class LinearAttentionMemory(MappedMemory[spec.LinearAttention]):
    """Memory of `kernels.linear_attention`."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, q and k and their features, values, masked scores, states, results, weights, and the output."""
        part = self.part
        query, wide = run.rows * part.d_query, run.rows * part.n_heads * (part.d_head + 1)
        scores = run.batch * part.n_heads * sum(n * size * size for size, n in part.chunks(run))
        n_states = sum(n for _, n in part.chunks(run)) - (0 if run.past else 1)
        states = run.batch * part.n_heads * part.d_head * (part.d_head + 1) * n_states
        sizes = {
            "q": query,
            "k": query,
            "q features": query,
            "k features": query,
            "values": wide,
            "scores": scores,
            "states": states,
            "results": wide,
            "weights": run.rows * part.n_heads,
            "mixed": query,
        }
        read = Saved(name="input", size=run.rows * part.d_model)
        inside = (Saved(name=name, size=size, divided="width") for name, size in sizes.items())
        return (read, *inside, *self.maps_keep(run))

    def recomputes(self) -> tuple[str, ...]:
        """Features, and scores from them."""
        return ("q features", "k features", "scores")

    def peak_bytes(self, run: Pass) -> int:
        """q, k and v with their features; or features beside chunks, or beside the results and what follows."""
        part = self.part
        query, wide, ones = run.rows * part.d_query, run.rows * (part.d_query + part.n_heads), run.rows * part.n_heads
        held = 2 * query + wide
        again = held if run.batch > 1 and run.tokens > 1 and part.n_heads > 1 else 0  # copied head by head
        making = 3 * query + max(3 * query, 2 * query + wide + max(ones, again))
        out = max(wide + ones + query, 2 * query + run.rows * part.d_model)
        return max(making, held + self._chunks_need(run, wide), out) * run.width + self.peak_beside(run)

    def _chunks_need(self, run: Pass, wide: int) -> int:
        """Returns the peak in numbers: in a chunk (the first, last full or partial one), or when joining results."""
        part = self.part
        chunk = spec.CHUNK
        full, rest = divmod(run.tokens, chunk)
        places = [(min(chunk, run.tokens), 0, 0)]  # tokens, those of the chunk before, and of all chunks before
        places += [(chunk, chunk, (full - 1) * chunk)] if full > 1 else []
        places += [(rest, chunk, full * chunk)] if full and rest else []
        busiest = max(self._chunk_needs(run, *place) for place in places)
        if len(places) == 1:
            return busiest
        heads, last = run.batch * part.n_heads, places[-1][0]
        kept = heads * (last * last + (last + 2 * part.d_head) * (part.d_head + 1))
        return max(busiest, 2 * wide + kept)

    def _chunk_needs(self, run: Pass, tokens: int, last: int, before: int) -> int:
        """Returns the numbers beside the features: earlier results, masked scores, new results, reads, and states."""
        part = self.part
        heads, wide = run.batch * part.n_heads, part.d_head + 1
        scores, y, state = heads * tokens * tokens, heads * tokens * wide, heads * part.d_head * wide
        read = before > 0 or run.past > 0
        made, states = heads * before * wide, 2 * state if before else 0
        masking = heads * last * last + 2 * scores
        reading = scores + (4 if read else 1) * y
        updating = scores + (2 * y + 3 * state if read else y + state)
        return made + max(states + max(masking, reading), updating)

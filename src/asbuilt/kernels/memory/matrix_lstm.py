"""What the mLSTM saves and needs: inputs alone are saved, and one chunk is held at once."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory_of
from asbuilt.spec import mamba2
from asbuilt.spec.matrix_lstm import MatrixLSTM
from asbuilt.spec.part import Pass


@memory_of(MatrixLSTM)
class MatrixLSTMMemory(MappedMemory[MatrixLSTM]):
    """Memory of `kernels.matrix_lstm`, the norm included."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input; q, k, v and both gates before their caps; both factors of o's input, and that."""
        part, rows = self.part, run.rows
        widths = {
            **dict.fromkeys(("q", "k"), part.d_keys),
            "v": part.d_output,
            **dict.fromkeys(("input gate", "forget gate"), part.n_heads),
            **dict.fromkeys(("openness", "normed", "gated"), part.d_output),
        }
        inside = (Saved(name=name, size=rows * width, divided="width") for name, width in widths.items())
        return (Saved(name="input", size=rows * part.d_model), *inside, *self.maps_keep(run))

    def recomputes(self) -> tuple[str, ...]:
        """The normed heads, and o's input."""
        return ("normed", "gated")

    def of_heads(self) -> tuple[str, ...]:
        """The norm of what heads read."""
        return ("norm",)

    def peak_bytes(self, run: Pass) -> int:
        """What the maps give, beside each head's own in float32 or wider and the chunks; or beside norm and gate."""
        part, wide = self.part, max(4, run.width)
        keys, output, ones = run.rows * part.d_keys, run.rows * part.d_output, run.rows * part.n_heads
        held = (2 * keys + 2 * output + 2 * ones) * run.width
        copied = run.tokens > 1 or run.width < wide  # of one token heads lie as the maps give them
        dividing = (1 + 2 * copied) * keys + (1 + copied) * output + ones
        reading = (1 + copied) * keys + output + ones + self._chunks_need(run)
        after = 3 * output * run.width
        out = (output + run.rows * part.d_model) * run.width
        return held + max(wide * max(dividing, reading), after, out) + self.peak_beside(run)

    def _chunks_need(self, run: Pass) -> int:
        """Returns the peak in numbers: in a chunk (the first, last full or partial one), or when joining results."""
        part, size = self.part, min(mamba2.CHUNK, run.tokens)
        full, rest = divmod(run.tokens, size)
        places = [(size, 0, 0)]  # tokens, those of the chunk before, and of all chunks before
        places += [(size, size, (full - 1) * size)] if full > 1 else []
        places += [(rest, size, full * size)] if rest else []
        busiest = max(self._chunk_needs(run, *place) for place in places)
        last, heads = places[-1][0], run.batch * part.n_heads
        kept = heads * (last * last + last * (part.d_value + 1)) + 2 * self._memories(run)
        return max(busiest, 2 * run.rows * part.d_output + kept) if len(places) > 1 else busiest

    def _chunk_needs(self, run: Pass, tokens: int, last: int, before: int) -> int:
        """Returns the numbers beside q, k and v: earlier results, scores, what is read, and memories.

        Scores and what was read are kept until the next chunk has its own.
        """
        part, memories = self.part, self._memories(run)
        heads, wide = run.batch * part.n_heads, part.d_value + 1
        scores, read = heads * tokens * tokens, heads * tokens * wide
        reads = before > 0 or run.past > 0
        held = memories * ((before > 0) + (before > last))
        scoring = held + heads * last * (last + wide) + 3 * scores
        reading = held + scores + (3 if reads else 2) * read
        more = before + tokens < run.tokens
        updating = scores + 2 * read + heads * tokens * part.d_key + held + memories * (1 + reads) if more else 0
        return heads * before * part.d_value + max(scoring, reading, updating)

    def _memories(self, run: Pass) -> int:
        return run.batch * self.part.n_heads * self.part.d_key * (self.part.d_value + 1)

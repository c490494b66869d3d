"""What the gated delta rule saves and needs: inputs alone are saved, and a span of chunks is held at once."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory_of
from asbuilt.spec.delta_net import SPAN, GatedDeltaNet, chunks
from asbuilt.spec.linear import Linear
from asbuilt.spec.part import Pass


@memory_of(GatedDeltaNet)
class GatedDeltaNetMemory(MappedMemory[GatedDeltaNet]):
    """Memory of `kernels.delta_rule`, the convolution and the norm included."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, q, k and v after their convolution, strengths, decays and gate, and both factors of o's input."""
        part, rows = self.part, run.rows
        sizes = {
            "mixed": rows * part.d_mixed,
            "beta": rows * part.n_value_heads,
            "decay": rows * part.n_decays,
            **({"gate": rows * part.d_output} if part.gating == "silu" or self._lies_beside else {}),
            "activated": rows * part.d_output,
            "normed": rows * part.d_output,
            "gated": rows * part.d_output,
        }
        ranks = {"decay_down": part.decay_rank, "gate_down": part.gate_rank}
        inside = (Saved(name=name, size=size, divided="width") for name, size in sizes.items())
        between = (Saved(name=name, size=rows * rank) for name, rank in ranks.items() if rank is not None)
        return (Saved(name="input", size=rows * part.d_model), *inside, *between, *self.maps_keep(run))

    @property
    def _lies_beside(self) -> bool:
        """Whether one product gives the gate beside q, k and v, so that it is kept with them."""
        first = [one for name, one in self.part.maps.items() if name != "o" and f"{name}_down" not in self.part.maps]
        plain = all(isinstance(one, Linear) and one.format is None and not one.clipped for one in first)
        return self.part.gate_rank is None and plain and len({one.plain.bias for one in first}) == 1

    def recomputes(self) -> tuple[str, ...]:
        """The factors of o's input, and that input."""
        return ("activated", "normed", "gated") if self.part.gating == "silu" else ("normed", "gated")

    def of_heads(self) -> tuple[str, ...]:
        """The norm of what heads read."""
        return ("norm",)

    def peak_bytes(self, run: Pass) -> int:
        """The rule's tokens beside its inputs, a span of chunks and its results; or gate, norm and result."""
        part, rows = self.part, run.rows
        inputs = rows * (part.d_mixed + part.d_output + part.n_value_heads + part.n_decays)
        mixed, output = rows * part.d_mixed, rows * part.d_output
        convolving = (inputs + mixed) * run.width + (8 - run.width) * mixed * (run.width < 4)
        wide = max(4, run.width)
        tokens = mixed - output + rows * (part.n_value_heads + part.n_decays)  # values stay where they were
        held = inputs * run.width + (mixed * run.width if run.width == wide else mixed * (run.width + wide))
        size, n = chunks(run)
        rule = held + wide * (tokens + self._spans(run) + run.batch * n * size * part.d_output)
        after = (inputs + 3 * output) * run.width + rows * part.d_model * run.width
        return max(convolving, rule, after) + self.peak_beside(run)

    def _spans(self, run: Pass) -> int:
        """Returns the most numbers of a span of chunks: of a whole one, or of the last one, which is padded.

        One token is read against the cached state, which is updated in place.
        """
        part = self.part
        if run.tokens == 1:
            keys = run.batch * part.n_key_heads * part.d_key
            return (9 if part.decays == "channel" else 4) * keys + 9 * run.batch * part.d_output
        size, n = chunks(run)
        several, padded = run.batch > 1, run.tokens % size > 0
        last = self._span(run, (n - 1) % SPAN + 1, n, copied=several or padded)
        return max(last, self._span(run, SPAN, n, copied=several)) if n > SPAN else last

    def _span(self, run: Pass, n: int, of: int, *, copied: bool) -> int:
        """Returns the numbers of `n` chunks, of all `of`: while they are prepared, or while they are scanned.

        What the library copies to divide it into chunks are queries, keys, and decays of channels; values in any case.
        """
        part, (size, _), later = self.part, chunks(run), of > 1 or run.past > 0
        heads, states = run.batch * part.n_value_heads, run.batch * part.n_value_heads * part.d_key * part.d_value
        keys, values = run.batch * part.n_key_heads * n * size * part.d_key, heads * n * size * part.d_value
        pairs = heads * n * size * size
        if part.decays == "channel":
            prepared = max(6 * keys + 5 * pairs, 7 * keys + 2 * pairs) + 3 * keys * copied
            scanned, chunk = 3 * keys, 6 if later else 2
        else:
            prepared = 2 * keys + 7 * pairs + 2 * keys * copied
            scanned, chunk = (2 + copied) * keys, 8 if later else 4
        prepared += values + (states if of > SPAN else 0)
        scanned += values + 3 * pairs + chunk * heads * size * part.d_value + (1 + later) * states
        return max(prepared, scanned)

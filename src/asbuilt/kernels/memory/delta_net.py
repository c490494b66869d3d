"""What the gated delta rule saves and needs: inputs alone are saved, and a span of chunks is held at once."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory_of
from asbuilt.spec.delta_net import SPAN, GatedDeltaNet, chunks
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
            **({"gate": rows * part.d_output} if part.gating == "silu" else {}),
            "activated": rows * part.d_output,
            "normed": rows * part.d_output,
            "gated": rows * part.d_output,
        }
        ranks = {"decay_down": part.decay_rank, "gate_down": part.gate_rank}
        inside = (Saved(name=name, size=size, divided="width") for name, size in sizes.items())
        between = (Saved(name=name, size=rows * rank) for name, rank in ranks.items() if rank is not None)
        return (Saved(name="input", size=rows * part.d_model), *inside, *between, *self.maps_keep(run))

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
        tokens = mixed + rows * (part.n_value_heads + 2 * part.n_decays)
        held = inputs * run.width + (mixed * run.width if run.width == wide else mixed * (run.width + wide))
        rule = held + wide * (tokens + self._span(run) + output)
        after = (inputs + 3 * output) * run.width + rows * part.d_model * run.width
        return max(convolving, rule, after) + self.peak_beside(run)

    def _span(self, run: Pass) -> int:
        """Returns the numbers of a span of chunks, of the scan, and of the state before and after a chunk.

        One token is read against the cached state, which is updated in place.
        """
        part = self.part
        size, n = chunks(run)
        heads, state = run.batch * part.n_value_heads, run.batch * part.n_value_heads * part.d_key * part.d_value
        if run.tokens == 1:
            return 4 * run.batch * part.n_key_heads * part.d_key + 9 * run.batch * part.d_output
        n = min(n, SPAN)
        keys = run.batch * part.n_key_heads * n * size * part.d_key
        pairs = heads * n * size * size
        return 5 * keys + heads * n * size * part.d_value + 7 * pairs + 2 * state

"""What RWKV-7's time mixing saves and needs: inputs alone are saved, and a span of chunks is held at once."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory_of
from asbuilt.spec.delta_net import SPAN, chunks
from asbuilt.spec.delta_time_mixing import DeltaTimeMixing
from asbuilt.spec.part import Pass


@memory_of(DeltaTimeMixing)
class DeltaTimeMixingMemory(MappedMemory[DeltaTimeMixing]):
    """Memory of `kernels.generalised_delta_rule`, the norm included."""

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """The token shift reads the stream."""
        return (("shift", ""),)

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """What the maps read; what the rule reads; the sum before the gate, the gate, and o's input."""
        part, rows = self.part, run.rows
        mixed = (Saved(name=f"{name} mixed", size=rows * part.d_model) for name in part.shift.targets)
        ranks = (
            ("decay", part.decay_rank),
            ("rate", part.rate_rank),
            ("move", part.move_rank),
            ("gate", part.gate_rank),
        )
        between = (Saved(name=f"{name} between", size=rows * rank) for name, rank in ranks if rank is not None)
        keys = dict.fromkeys(("r", "k", "decay", "rate"), rows * part.d_keys)
        moved = () if part.value_from is None else ("move",)
        values = dict.fromkeys(("v", *moved, "gate", "sum", "gated"), rows * part.d_output)
        inside = (Saved(name=name, size=size, divided="width") for name, size in (keys | values).items())
        return (*mixed, *between, *inside, *self.maps_keep(run))

    def recomputes(self) -> tuple[str, ...]:
        """What the maps read, and o's input."""
        return (*(f"{name} mixed" for name in self.part.shift.targets), "gated")

    def of_heads(self) -> tuple[str, ...]:
        """The norm of what heads read."""
        return ("norm",)

    def peak_bytes(self, run: Pass) -> int:
        """What the maps read and give, the rule's tokens beside that, a span of chunks and its results.

        What is read, and values unless they move, are the maps' own where these are wide enough.
        """
        part, rows, wide = self.part, run.rows, max(4, run.width)
        keys, values, moves = rows * part.d_keys, rows * part.d_output, part.value_from is not None
        given = len(part.shift.targets) * rows * part.d_model + 4 * keys + (1 + moves) * values
        narrow = run.width < wide
        tokens = (4 + narrow) * keys + (moves or narrow) * values
        rule = given * run.width + wide * (tokens + self._span(run) + values)
        return rule + self.peak_beside(run)

    def _span(self, run: Pass) -> int:
        """Returns the numbers while a span of chunks is prepared, or beside the state before and after a chunk.

        One token is read against the cached state, which is updated in place.
        """
        part, heads = self.part, run.batch * self.part.n_heads
        size, n = chunks(run)
        if run.tokens == 1:
            return heads * (2 * part.d_key + 2 * part.d_value)
        n = min(n, SPAN)
        keys, values, pairs = (heads * n * size * width for width in (part.d_key, part.d_value, size))
        states = 2 * heads * part.d_key * part.d_value
        return max(10 * keys + values + 7 * pairs, 4 * keys + 2 * values + 3 * pairs + states)

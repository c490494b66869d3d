"""What recurrent networks save and need: of the recurrence its inputs alone are saved."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory_of
from asbuilt.spec.part import Pass
from asbuilt.spec.recurrent import Recurrent


@memory_of(Recurrent)
class RecurrentMemory(MappedMemory[Recurrent]):
    """Memory of `kernels.recurrent`."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, what it gives to the gates, and h, which o reads."""
        part = self.part
        return (
            Saved(name="input", size=run.rows * part.d_model),
            Saved(name="gates", size=run.rows * part.d_gates),
            Saved(name="h", size=run.rows * part.d_hidden),
            *self.maps_keep(run),
        )

    def peak_bytes(self, run: Pass) -> int:
        """The gates of all tokens, beside h of each, and the gates and states of one; h of all twice; or the result."""
        part, wide = self.part, max(4, run.width)
        gates, hidden = run.rows * part.d_gates * run.width, run.rows * part.d_hidden * run.width
        first = run.tokens == 1 and not run.past  # without a product
        one = run.batch * ((1 if first else 2) * part.d_gates + 2 * part.d_hidden) * wide
        return (
            gates + max(hidden + one, 2 * hidden, hidden + run.rows * part.d_model * run.width) + self.peak_beside(run)
        )

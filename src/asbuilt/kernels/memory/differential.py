"""What the difference of two attentions saves and needs."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Saved, memory_of
from asbuilt.spec.differential import Differential
from asbuilt.spec.part import Pass


@memory_of(Differential)
class DifferentialMemory(Memory[Differential]):
    """Memory of a scaled difference, the norm apart."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """All heads' sums; lambda, and the two exponentials in it."""
        return (
            Saved(name="input", size=run.rows * self.part.n_heads * self.part.norm.d),
            Saved(name="lambda", size=1, divided="none"),
            Saved(name="exponentials", size=2, width="wide", divided="none"),
        )

    def of_heads(self) -> tuple[str, ...]:
        """The norm of differences."""
        return ("norm",)

    def peak_bytes(self, run: Pass) -> int:
        """The second half scaled, the difference, and its norm."""
        pairs = run.rows * self.part.n_heads // 2 * self.part.norm.d
        return pairs * (3 * run.width + (4 if run.width < 4 else 0))

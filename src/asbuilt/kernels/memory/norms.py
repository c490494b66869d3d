"""What norms save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Room, Saved, memory_of
from asbuilt.spec.norms import HeadNorm, LayerNorm, RMSNorm, SoftplusScale
from asbuilt.spec.part import Pass


@memory_of(RMSNorm)
class RMSNormMemory(Memory[RMSNorm]):
    """Memory of `kernels.norm`."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input and one reciprocal per row."""
        return (
            Saved(name="input", size=run.rows * self.part.d),
            Saved(name="rstd", size=run.rows, width="wide"),
        )

    def peak_bytes(self, run: Pass) -> int:
        """The result, and a float32 copy of the input if the pass's dtype is narrow."""
        numbers = run.rows * self.part.d
        return numbers * (run.width + (4 if run.width < 4 else 0))

    def room(self, run: Pass) -> Room | None:
        """Backward the product of the gradient and the input, and the result; of a narrow dtype all four in float32."""
        numbers = run.rows * self.part.d
        return Room(0, numbers * (2 * run.width if run.width >= 4 else 4 * 4 + run.width))


@memory_of(LayerNorm)
class LayerNormMemory(Memory[LayerNorm]):
    """Memory of the library's kernel."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, one mean and one reciprocal per row, in the pass's dtype, as the library saves them."""
        return (
            Saved(name="input", size=run.rows * self.part.d),
            Saved(name="mean", size=run.rows),
            Saved(name="rstd", size=run.rows),
        )

    def peak_bytes(self, run: Pass) -> int:
        """The result."""
        return run.rows * self.part.d * run.width

    def room(self, run: Pass) -> Room | None:
        """Backward the result."""
        return Room(0, self.peak_bytes(run))


@memory_of(HeadNorm)
class HeadNormMemory(Memory[HeadNorm]):
    """Memory of the library's kernel without gains, and of their product."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """As LayerNorm, and what the gains multiply."""
        return (
            Saved(name="input", size=run.rows * self.part.d),
            Saved(name="mean", size=run.rows),
            Saved(name="rstd", size=run.rows),
            Saved(name="unscaled", size=run.rows * self.part.d),
        )

    def peak_bytes(self, run: Pass) -> int:
        """The result without gains, and with them; then that, and with biases."""
        return 2 * run.rows * self.part.d * run.width


@memory_of(SoftplusScale)
class SoftplusScaleMemory(Memory[SoftplusScale]):
    """Memory of a product with the factors."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, and the factors."""
        return (
            Saved(name="input", size=run.rows * self.part.d),
            Saved(name="factors", size=self.part.d, divided="none"),
        )

    def peak_bytes(self, run: Pass) -> int:
        """The result."""
        return run.rows * self.part.d * run.width

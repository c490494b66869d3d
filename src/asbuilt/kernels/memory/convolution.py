"""What the short convolution saves and needs."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Saved, memory_of
from asbuilt.spec.convolution import ShortConvolution
from asbuilt.spec.part import Pass


@memory_of(ShortConvolution)
class ShortConvolutionMemory(Memory[ShortConvolution]):
    """Memory of `kernels.convolution`."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input; the sums are recomputed."""
        return (Saved(name="input", size=run.rows * self.part.channels, divided="width"),)

    def peak_bytes(self, run: Pass) -> int:
        """The result; of a narrow dtype the input and the sums in float32."""
        return run.rows * self.part.channels * (run.width if run.width >= 4 else 8)

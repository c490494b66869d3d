"""What convolutions over tokens save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Memory, Saved, memory_of
from asbuilt.spec.convolution import CausalConvolution, CentredConvolution, ShortConvolution
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


@memory_of(CausalConvolution)
class CausalConvolutionMemory(MappedMemory[CausalConvolution]):
    """Memory of the library's convolution."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input; the zeros before it are put there again."""
        return (Saved(name="input", size=run.rows * self.part.d_model),)

    def peak_bytes(self, run: Pass) -> int:
        """Inputs, sums and matrices, the former two twice: the library puts all of them in another order."""
        part = self.part
        padded = run.batch * (run.tokens + part.reach) * part.d_model
        return (2 * (padded + run.rows * part.d_model) + part.d_model**2 * part.kernel) * run.width


@memory_of(CentredConvolution)
class CentredConvolutionMemory(MappedMemory[CentredConvolution]):
    """Memory of a product with each token's inputs side by side, and of an activation."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """Those inputs and the sums, of which the activation is computed again."""
        part, size = self.part, run.rows * self.part.d_model
        return (Saved(name="taps' inputs", size=size * part.kernel), Saved(name="sums", size=size))

    def peak_bytes(self, run: Pass) -> int:
        """Each token's inputs beside the input with its edges, or beside the sums; or those and what is activated."""
        part = self.part
        padded = run.batch * (run.tokens + part.kernel - 1)
        rows = max(run.rows * part.kernel + max(padded, run.rows), 2 * run.rows)
        return rows * part.d_model * run.width

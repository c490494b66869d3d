"""What the convolution module of conformers saves and needs."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory, memory_of
from asbuilt.spec.convolution_module import ConvolutionModule
from asbuilt.spec.part import Pass


@memory_of(ConvolutionModule)
class ConvolutionModuleMemory(MappedMemory[ConvolutionModule]):
    """Memory of `nn.convolution_module`."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, a and b, what the activation reads (or, of relu, gives), and o's input.

        The convolution and the norm keep their own inputs.
        """
        part = self.part
        wide = run.rows * part.conv.channels
        before = () if part.activation == "relu" else (Saved(name="normed", size=wide, divided="width"),)
        return (
            Saved(name="input", size=run.rows * part.d_model),
            Saved(name="halves", size=2 * wide, divided="width"),
            *before,
            Saved(name="hidden", size=wide, divided="width"),
            *self.maps_keep(run),
        )

    def peak_bytes(self, run: Pass) -> int:
        """Beside a and b: the convolution's input and result, or later ones; or the output."""
        part = self.part
        wide, out = run.rows * part.conv.channels * run.width, run.rows * part.d_model * run.width
        norm = 0 if part.norm is None else memory(part.norm).peak_bytes(run)
        inside = max(wide + memory(part.conv).peak_bytes(run), wide + norm, 2 * wide, wide + out)
        return 2 * wide + inside + self.peak_beside(run)

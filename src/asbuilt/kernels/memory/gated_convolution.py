"""What the gated short convolution saves and needs."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory, memory_of
from asbuilt.spec.gated_convolution import GatedConvolution
from asbuilt.spec.part import Pass


@memory_of(GatedConvolution)
class GatedConvolutionMemory(MappedMemory[GatedConvolution]):
    """Memory of `nn.gated_convolution`."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, both gates with what they multiply (the convolution keeps its own input), and o's input."""
        part = self.part
        wide = run.rows * part.conv.channels
        inside = (Saved(name=name, size=wide, divided="width") for name in ("b", "c", "x", "convolved", "mixed"))
        return (Saved(name="input", size=run.rows * part.d_model), *inside, *self.maps_keep(run))

    def recomputes(self) -> tuple[str, ...]:
        """What the convolution gives, and both products."""
        return ("convolved", "mixed", "conv:input")

    def peak_bytes(self, run: Pass) -> int:
        """Beside the joined b, c and x: the convolution and its input, its result and the product; or the output."""
        part = self.part
        wide, out = run.rows * part.conv.channels * run.width, run.rows * part.d_model * run.width
        inside = max(memory(part.conv).peak_bytes(run), wide, out)
        return 4 * wide + inside + self.peak_beside(run)

"""What low-rank residuals save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory, memory_of
from asbuilt.spec.laurel import Laurel
from asbuilt.spec.part import Pass


@memory_of(Laurel)
class LaurelMemory(MappedMemory[Laurel]):
    """Memory of two linear maps and a norm."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, and what is between the maps."""
        part = self.part
        between = Saved(name="low-rank", size=run.rows * part.rank)
        return (Saved(name="input", size=run.rows * part.d_model), between, *self.maps_keep(run))

    def peak_bytes(self, run: Pass) -> int:
        """The maps' results, the norm of the second, and the sum."""
        part = self.part
        stream = run.rows * part.d_model * run.width
        norm = 0 if part.norm is None else memory(part.norm).peak_bytes(run)
        return max(run.rows * part.rank * run.width + stream, stream + max(norm, 2 * stream)) + self.peak_beside(run)

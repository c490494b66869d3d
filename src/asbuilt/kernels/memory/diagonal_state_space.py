"""What diagonal state spaces save and need: of the convolution its input alone is saved."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory_of
from asbuilt.spec.diagonal_state_space import DiagonalStateSpace
from asbuilt.spec.part import Pass


@memory_of(DiagonalStateSpace)
class DiagonalStateSpaceMemory(MappedMemory[DiagonalStateSpace]):
    """Memory of `kernels.diagonal_state_space`."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input; what the activation reads and gives; both factors of the output."""
        names = ("input", "read", "activated", "result", "openness")
        own = (Saved(name=name, size=run.rows * self.part.d_model) for name in names)
        return (*own, *self.maps_keep(run))

    def recomputes(self) -> tuple[str, ...]:
        """What the activation gives."""
        return ("activated",)

    def peak_bytes(self, run: Pass) -> int:
        """Spectra of the input and of the kernel, and the convolved input; or one token's states; or the maps."""
        part, wide = self.part, max(4, run.width)
        size, n = part.pieces(run.tokens)
        x = run.rows * part.d_model
        numbers = part.d_model * part.d_state
        after = 5 * x * run.width
        if run.past or run.tokens == 1:
            states = (2 * run.batch * 4 + 10) * numbers + 2 * x
            return max(states * wide, after) + self.peak_beside(run)
        powers = part.d_model * (4 * part.d_state * (size + n) + size * n)
        spectra = 3 * 2 * x + 3 * 2 * run.tokens * part.d_model
        return max((4 * numbers + max(powers, spectra)) * wide + x * wide, after) + self.peak_beside(run)

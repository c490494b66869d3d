"""What per-layer embeddings save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Saved, memory, memory_of
from asbuilt.spec.part import Pass
from asbuilt.spec.per_layer import PerLayerEmbedding, PerLayerInput


@memory_of(PerLayerEmbedding)
class PerLayerEmbeddingMemory(MappedMemory[PerLayerEmbedding]):
    """Memory of the lookup and the map."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The rows that are looked up, the stream that is projected, the scale, and the result, which blocks read."""
        part = self.part
        scale = () if part.scale == 1.0 else (Saved(name="scale", size=1, divided="none"),)
        return (
            Saved(name="input", size=run.rows * part.d_model),
            Saved(name="known tokens", size=run.rows, width="int64"),
            *scale,
            Saved(name="vectors", size=run.rows * part.width),
            *self.maps_keep(run),
        )

    def kept(self, run: Pass) -> int:
        """Returns the bytes of the result, which stays until the last block."""
        return run.rows * self.part.width * run.width

    def peak_bytes(self, run: Pass) -> int:
        """Rows, the scaled projection and its norm; or the norm, the sum and the result beside the rows."""
        normed = memory(self.part.norm).peak_bytes(self.part.child_run("norm", run))
        return max(2 * self.kept(run) + normed, 4 * self.kept(run)) + self.peak_beside(run)


@memory_of(PerLayerInput)
class PerLayerInputMemory(MappedMemory[PerLayerInput]):
    """Memory of two linear maps, an activation and a product."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, the activation's input (or relu's output) and output, and down's input."""
        part = self.part
        narrow = ("activated", "hidden") if part.activation == "relu" else ("gate", "activated", "hidden")
        return (
            Saved(name="input", size=run.rows * part.d_model),
            *(Saved(name=name, size=run.rows * part.d) for name in narrow),
            *self.maps_keep(run),
        )

    def recomputes(self) -> tuple[str, ...]:
        """Down's input, and the activated gate unless relu saves nothing else."""
        return ("hidden",) if self.part.activation == "relu" else ("activated", "hidden")

    def peak_bytes(self, run: Pass) -> int:
        """The activation's input and output, their product, and the result."""
        part = self.part
        return run.rows * run.width * max(3 * part.d, part.d + part.d_model) + self.peak_beside(run)

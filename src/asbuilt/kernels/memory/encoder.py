"""What the parts of encoders other than blocks save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.linear import MappedMemory
from asbuilt.kernels.memory.registry import Memory, Saved, memory_of
from asbuilt.spec.encoder import EmbeddingProjection, HeadTransform, Pooler, TypeEmbedding
from asbuilt.spec.part import Pass


@memory_of(TypeEmbedding)
class TypeEmbeddingMemory(Memory[TypeEmbedding]):
    """Memory of the lookup of token types."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The type of each token."""
        return (Saved(name="types", size=run.rows, width="int64"),)

    def peak_bytes(self, run: Pass) -> int:
        """The looked-up rows."""
        return run.rows * self.part.d_model * run.width


@memory_of(EmbeddingProjection)
class EmbeddingProjectionMemory(MappedMemory[EmbeddingProjection]):
    """Memory of a linear map."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input."""
        return (Saved(name="input", size=run.rows * self.part.d_embedding), *self.maps_keep(run))

    def peak_bytes(self, run: Pass) -> int:
        """The sum of the embeddings beside what is added to it, or its norm beside the result."""
        part = self.part
        widest = max(3 * part.d_embedding, part.d_embedding + part.d_model)
        return run.rows * widest * run.width + self.peak_beside(run)


@memory_of(HeadTransform)
class HeadTransformMemory(MappedMemory[HeadTransform]):
    """Memory of a linear map, an activation and a norm."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, the activation's input (or relu's output), the norm's input, and its statistics."""
        part = self.part
        size, made = run.rows * part.d_model, run.rows * part.width
        before = () if part.activation == "relu" else (Saved(name="dense", size=made),)
        statistics = (Saved(name="mean", size=run.rows), Saved(name="rstd", size=run.rows))
        return (
            Saved(name="input", size=size),
            *before,
            Saved(name="activated", size=made),
            *statistics,
            *self.maps_keep(run),
        )

    def peak_bytes(self, run: Pass) -> int:
        """The activation's input and output, or its output and the result."""
        return 2 * run.rows * self.part.width * run.width + self.peak_beside(run)


@memory_of(Pooler)
class PoolerMemory(MappedMemory[Pooler]):
    """Memory of a linear map and an activation."""

    @property
    def saves_output(self) -> bool:
        """Whether the activation saves its output, rather than its input."""
        return self.part.activation in ("tanh", "relu")

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The map's input, and the activation's output or input."""
        size, name = run.rows * self.part.d_model, "pooled" if self.saves_output else "dense"
        return (Saved(name="input", size=size), Saved(name=name, size=size), *self.maps_keep(run))

    def peak_bytes(self, run: Pass) -> int:
        """The input and output of the activation."""
        return 2 * run.rows * self.part.d_model * run.width + self.peak_beside(run)

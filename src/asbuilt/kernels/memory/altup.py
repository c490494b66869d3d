"""What alternating updates of several streams save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Saved, memory, memory_of
from asbuilt.spec.altup import AlternatingUpdates, ProjectedStreams
from asbuilt.spec.part import Pass


@memory_of(AlternatingUpdates)
class AlternatingUpdatesMemory(Memory[AlternatingUpdates]):
    """Memory of predicting and correcting streams; that of the block between is its own."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The streams; what the router reads and the weights, twice; and the factors of correction and vector."""
        part = self.part
        rows, n, d = run.rows, part.n_streams, part.d_model
        narrow = (Saved(name="weights cast", size=2 * rows * n),) if run.width < 4 else ()
        vector = () if part.vector is None else (Saved(name="unscaled", size=rows * d),)
        return (
            Saved(name="input", size=rows * n * d),
            Saved(name="normed", size=2 * rows * d),
            Saved(name="weights", size=2 * rows * n, width="wide"),
            *narrow,
            Saved(name="mix weights", size=rows * n * n),
            Saved(name="write weights", size=rows * n),
            Saved(name="result", size=rows * d),
            *vector,
        )

    def predicting(self, run: Pass) -> int:
        """Returns the peak bytes up to the predicted streams: those mixed beside them; or the norm of the first."""
        part = self.part
        stream = run.rows * part.d_model * run.width
        return max(2 * part.n_streams * stream + stream, stream + memory(part.norm).peak_bytes(run))

    def read(self, run: Pass) -> int:
        """Returns the bytes that stay allocated while the block runs: the predicted streams, and the first again."""
        return (self.part.n_streams + 1) * run.rows * self.part.d_model * run.width

    def peak_bytes(self, run: Pass) -> int:
        """Beside those the block's result, its difference, the corrected streams, and what is added to them."""
        part = self.part
        stream = run.rows * part.d_model * run.width
        beside = 0
        if part.vector is not None:
            norm = 0 if part.vector_norm is None else stream + memory(part.vector_norm).peak_bytes(run)
            beside = 2 * stream + max(memory(part.vector).peak_bytes(run), norm)
        correcting = (part.n_streams + 2) * stream + max(beside, memory(part.norm).peak_bytes(run))
        return max(self.predicting(run), self.read(run) + correcting)


@memory_of(ProjectedStreams)
class ProjectedStreamsMemory(Memory[ProjectedStreams]):
    """Memory of one stream as several, and of several as one."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """What is projected, before the first block and after the last, what that gives, and the sizes of all."""
        part = self.part
        rows, n, d = run.rows, part.n_streams, part.d_model
        more = 2 * rows * (n - 1)
        kept = {"streams": rows * n * d, "projected": more * d, "mean": more, "sizes": more + 2 * rows, "scales": more}
        return (
            Saved(name="input", size=rows * d),
            *(Saved(name=name, size=size) for name, size in kept.items()),
        )

    def peak_bytes(self, run: Pass) -> int:
        """Projected streams, their squares or what is scaled, and the result."""
        return (2 * self.part.n_streams - 1) * run.rows * self.part.d_model * run.width

"""What windows of attention, and images of any size in a text, save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, memory, memory_of
from asbuilt.kernels.memory.vision import VisionMemory
from asbuilt.spec.image_grid import GridVision, Windowed
from asbuilt.spec.part import Pass


@memory_of(Windowed)
class WindowedMemory(Memory[Windowed]):
    """Memory of attention in windows; a window's input is its attention's, which saves it."""

    def peak_bytes(self, run: Pass) -> int:
        """The patches by window, beside attention, or its result by window and together again."""
        stream = run.rows * self.part.d_model * run.width
        attending = memory(self.part.attention).peak_bytes(self.part.child_run("attention", run))
        return stream + max(attending, 2 * stream)


@memory_of(GridVision)
class GridVisionMemory(VisionMemory):
    """Memory of a tower and its projectors."""

    part: GridVision

    def peak_bytes(self, run: Pass) -> int:
        """The tower and its projector, beside what is added after the text's first blocks."""
        added = (self.part.n_vectors - 1) * run.batch * self.part.n_tokens * self.part.projector.d_out * run.width
        return super().peak_bytes(run) + added

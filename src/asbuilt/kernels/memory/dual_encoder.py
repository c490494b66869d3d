"""What a dual encoder needs while it runs."""

from __future__ import annotations

from asbuilt.kernels.memory.model import ModelMemory, peak
from asbuilt.kernels.memory.registry import memory_of
from asbuilt.spec.dual_encoder import DualEncoder
from asbuilt.spec.part import Pass


@memory_of(DualEncoder)
class DualEncoderMemory(ModelMemory[DualEncoder]):
    """Memory of a tower and a text encoder."""

    def peak_bytes(self, run: Pass) -> int:
        """The larger peak of the two."""
        return max(peak(self.part.vision, self.part.child_run("vision", run)), super().peak_bytes(run))

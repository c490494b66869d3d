"""What a language model that reads images needs while it runs."""

from __future__ import annotations

from asbuilt.kernels.memory.model import ModelMemory, peak
from asbuilt.kernels.memory.registry import memory_of
from asbuilt.spec.part import Pass
from asbuilt.spec.vision_language_model import VisionLanguageModel


@memory_of(VisionLanguageModel)
class VisionLanguageModelMemory(ModelMemory[VisionLanguageModel]):
    """Memory of a tower, followed by a text."""

    def peak_bytes(self, run: Pass) -> int:
        """The tower and its projector; or the text beside their output, which stays."""

        vision, seen = self.part.vision, self.part.child_run("vision", run)
        each = vision.n_made * vision.projector.d_out * run.width
        made = 0 if seen is None else seen.batch * each
        return max(peak(vision, seen), made + super().peak_bytes(run))

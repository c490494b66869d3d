"""What a language model that reads images needs while it runs."""

from __future__ import annotations

from asbuilt.kernels.memory.model import ModelMemory, peak
from asbuilt.kernels.memory.registry import memory, memory_of
from asbuilt.spec.part import Pass
from asbuilt.spec.vision_language_model import VisionLanguageModel


@memory_of(VisionLanguageModel)
class VisionLanguageModelMemory(ModelMemory[VisionLanguageModel]):
    """Memory of a tower of sounds, if there is one, one of images, and a text."""

    def peak_bytes(self, run: Pass) -> int:
        """A tower and its projector, the second one beside the first one's output; or the text beside those of both."""
        part, hears = self.part, self.part.hearing
        heard, seen = part.child_run("hearing", run), part.child_run("vision", run)
        each = part.vision.n_made * part.vision.projector.d_out * run.width
        made = 0 if seen is None else seen.batch * each
        sounds = 0 if heard is None or hears is None else heard.batch * hears.n_tokens * part.d_model * run.width
        looked_up = max((memory(one).peak_bytes(run) for one in part.own_tokens), default=0)
        text = max(super().peak_bytes(run), looked_up)
        return max(peak(hears, heard), sounds + peak(part.vision, seen), sounds + made + text)

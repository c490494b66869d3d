"""What a language model that hears needs while it runs."""

from __future__ import annotations

from asbuilt.kernels.memory.model import ModelMemory, peak
from asbuilt.kernels.memory.registry import memory_of
from asbuilt.spec.audio_language_model import AudioLanguageModel
from asbuilt.spec.part import Pass


@memory_of(AudioLanguageModel)
class AudioLanguageModelMemory(ModelMemory[AudioLanguageModel]):
    """Memory of an audio encoder, followed by a text."""

    def peak_bytes(self, run: Pass) -> int:
        """The encoder and its projector; or the text beside their output, which stays."""
        hearing, heard = self.part.hearing, self.part.child_run("hearing", run)
        made = 0 if heard is None else heard.batch * hearing.n_tokens * self.part.d_model * run.width
        return max(peak(hearing, heard), made + super().peak_bytes(run))

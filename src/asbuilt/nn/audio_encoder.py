"""Audio encoders: a mel spectrogram to the stream. Shapes: batch B, mel bands F, frames N, tokens T, model width M."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asbuilt.nn.audio import MelEmbedding, MelSubsampling
from asbuilt.nn.model import Model
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import audio_encoder as spec
from asbuilt.spec.part import Kernel


@computes(spec.AudioEncoder)
class AudioEncoder(Model):
    """Log-mel spectrograms to the normalised stream."""

    embedding: MelEmbedding | MelSubsampling  # pyright: ignore[reportIncompatibleVariableOverride]  # set once, when it is built

    def forward(self, audio: Tensor, *, kernel: Kernel = "fused", **unread: Any) -> Tensor:  # noqa: ANN401
        """Returns the stream (B, T, M) for spectrograms (B, F, N); raises InputError for another size."""
        self.refuse(unread)
        return self.logits(audio, self.opened(audio, kernel), last=False)

    def opened(self, audio: Tensor, kernel: Kernel) -> Step:
        """Returns the step over the tokens of the sounds; raises InputError for spectrograms of another size."""
        return self.begin((len(audio), self.embedding.tokens(audio)), audio.device, None, None, kernel)

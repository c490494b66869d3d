"""Audio encoders: a mel spectrogram to the stream, which a decoder attends to: Whisper."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asbuilt.spec.audio import MelEmbedding
from asbuilt.spec.model import Input, Model
from asbuilt.spec.part import Pass, require


@dataclass(frozen=True, kw_only=True, repr=False)
class AudioEncoder(Model):
    """Frames of sound to the stream after the final norm; `max_positions` is the tokens of a sound, all of one length.

    Radford et al. 2022 (arXiv 2212.04356).
    """

    embedding: MelEmbedding
    """The convolutions over frames."""
    head: None = None
    """None: the output is the stream."""

    def __post_init__(self) -> None:
        require(self, "embedding", isinstance(self.embedding, MelEmbedding), "a MelEmbedding")
        super().__post_init__()
        require(self, "head", self.head is None, "none: the output is the stream")
        n = self.embedding.n_tokens
        require(self, "max_positions", self.max_positions == n, f"the {n} tokens of a sound")

    @property
    def reads(self) -> tuple[Input, ...]:
        """Log-mel spectrograms."""
        return ("audio",)

    def _own(self, run: Pass) -> Pass:
        """Returns a pass over whole sounds, without past tokens."""
        return replace(run, tokens=self.embedding.n_tokens, past=0, logits="all")

"""Audio encoders: a mel spectrogram to the stream, which a decoder attends to, or which is put in a text."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asbuilt.spec.audio import MelEmbedding, MelSubsampling
from asbuilt.spec.model import Input, Model
from asbuilt.spec.part import Pass, require


@dataclass(frozen=True, kw_only=True, repr=False)
class AudioEncoder(Model):
    """Frames of sound to the stream after the final norm; `max_positions` is the most tokens of a sound.

    Sounds are of one length, or of any up to it, as the embedding says. Radford et al. 2022 (arXiv 2212.04356).
    """

    embedding: MelEmbedding | MelSubsampling
    """The convolutions over frames."""
    head: None = None
    """None: the output is the stream."""

    def __post_init__(self) -> None:
        require(self, "embedding", isinstance(self.embedding, MelEmbedding | MelSubsampling), "one of spectrograms")
        super().__post_init__()
        require(self, "head", self.head is None, "none: the output is the stream")
        n = self.embedding.n_tokens
        require(self, "max_positions", self.max_positions == n, f"the {n} tokens of a sound")

    @property
    def reads(self) -> tuple[Input, ...]:
        """Log-mel spectrograms."""
        return ("audio",)

    def _own(self, run: Pass) -> Pass:
        """Returns a pass over whole sounds, as long as they may be, without past tokens."""
        return replace(run, tokens=self.embedding.n_tokens, past=0, logits="all")

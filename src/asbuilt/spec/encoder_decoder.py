"""Encoder-decoders: one stack reads a source, another generates text with cross-attention to it: BART, T5, Whisper."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asbuilt.spec.audio_encoder import AudioEncoder
from asbuilt.spec.cross import CrossAttention
from asbuilt.spec.embedding import SharedEmbedding, TokenEmbedding
from asbuilt.spec.model import AnyHead, Input, Model
from asbuilt.spec.part import Pass, require
from asbuilt.spec.text_encoder import TextEncoder


@dataclass(frozen=True, kw_only=True, repr=False)
class EncoderDecoder(Model):
    """Tokens to logits, or another head's output, with cross-attention to a source that the `encoder` reads.

    Vaswani et al. 2017 (arXiv 1706.03762).
    """

    encoder: TextEncoder | AudioEncoder
    """The stack that reads the source, a text or a sound."""
    embedding: TokenEmbedding
    """The decoder's token embedding."""
    head: AnyHead | None = None
    """The head; None outputs the stream."""

    def __post_init__(self) -> None:
        inner = self.encoder
        text = isinstance(inner, TextEncoder) and inner.head is None and inner.pooler is None
        plain = text or (isinstance(inner, AudioEncoder) and not inner.embedding.any_length)
        allowed = "a TextEncoder without head and pooler, or an AudioEncoder of sounds of one length"
        require(self, "encoder", plain, allowed)
        super().__post_init__()
        n = inner.max_positions if isinstance(inner, AudioEncoder) else None
        crosses = [part for part in self.mixers if isinstance(part, CrossAttention)]
        require(self, "blocks", all(part.n_source == n for part in crosses), f"cross-attention with n_source = {n}")
        require(self, "embedding", isinstance(self.embedding, TokenEmbedding), "a TokenEmbedding")
        shared, own = inner.embedding, self.embedding
        fits = not isinstance(shared, SharedEmbedding) or (
            (shared.n_vocab, shared.d_model, None) == (own.n_vocab, own.d_model, own.d_table)
        )
        require(self, "encoder", fits, "a shared embedding of the model's own n_vocab and d_model")

    @property
    def reads(self) -> tuple[Input, ...]:
        """The decoder's tokens, and the source."""
        return ("tokens", "source" if isinstance(self.encoder, TextEncoder) else "audio")

    @property
    def prompted(self) -> Model:
        """The encoder if it reads text; a prompt beside a sound is the beginning of the decoder's text."""
        return self.encoder if isinstance(self.encoder, TextEncoder) else self

    @property
    def source_width(self) -> int:
        """Width of the encoder's stream."""
        return self.encoder.d_model

    def _own(self, run: Pass) -> Pass:
        """Returns the pass with the tokens of a sound, whatever it says."""
        return replace(run, source=self.encoder.max_positions) if isinstance(self.encoder, AudioEncoder) else run

    def child_run(self, name: str, run: Pass) -> Pass | None:
        """The encoder processes the source, only before a sequence's first token."""
        if name != "encoder":
            return super().child_run(name, run)
        run = self._own(run)
        return None if run.past else replace(run, tokens=run.source_tokens, source=0, images=0, logits="all")

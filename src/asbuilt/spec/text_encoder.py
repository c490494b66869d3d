"""Encoders of texts: tokens to the stream, or to what a head makes of it: BERT, RoBERTa, ModernBERT."""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.spec.embedding import SharedEmbedding, TokenEmbedding
from asbuilt.spec.encoder import Pooler, TypeEmbedding
from asbuilt.spec.model import AnyHead, Input, Model
from asbuilt.spec.part import Part, Pass, require


@dataclass(frozen=True, kw_only=True, repr=False)
class TextEncoder(Model):
    """Tokens, and their types, to the stream after the final norm, or to what any head makes of it.

    A masked language model's head gives logits, some heads read one token, and the `pooler` gives one vector of each
    sequence, if asked. Without either it is the encoder of an `EncoderDecoder`, or the trunk of a model. Its mixers may
    be causal.
    """

    embedding: TokenEmbedding | SharedEmbedding
    """What tokens become; the encoder of an `EncoderDecoder` may use that one's table."""
    head: AnyHead | None = None
    """What the stream becomes in the end; None leaves the stream."""
    types: TypeEmbedding | None = None
    """Added to the embedding."""
    pooler: Pooler | None = None
    """What makes one vector of a sequence, if asked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "embedding", isinstance(self.embedding, TokenEmbedding | SharedEmbedding), "a table of tokens")
        own = isinstance(self.embedding, TokenEmbedding) or self.head is None
        require(self, "embedding", own, "a table of its own in the model that has the head")

    @property
    def reads(self) -> tuple[Input, ...]:
        """Tokens, and their types where it has them."""
        return ("tokens",) if self.types is None else ("tokens", "types")

    def end(self, run: Pass) -> Part | None:
        """Returns the head, or the pooler where that is asked for."""
        return self.pooler if run.logits == "pooled" else self.head

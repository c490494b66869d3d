"""Text encoders: tokens to the stream, or to a head's output: BERT, RoBERTa, ModernBERT."""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.spec.embedding import SharedEmbedding, TokenEmbedding
from asbuilt.spec.encoder import EmbeddingProjection, Pooler, TypeEmbedding
from asbuilt.spec.model import AnyHead, Input, Model
from asbuilt.spec.part import Part, Pass, require


@dataclass(frozen=True, kw_only=True, repr=False)
class TextEncoder(Model):
    """Tokens, and their types, to the stream after the final norm, or to the output of a head.

    A masked language model's head outputs logits, some heads read one token, and the `pooler` outputs one vector per
    sequence, on request. Without either it is the encoder of an `EncoderDecoder`, or the trunk of a model. Its mixers
    may be causal.
    """

    embedding: TokenEmbedding | SharedEmbedding
    """The token embedding; the encoder of an `EncoderDecoder` may share its table."""
    head: AnyHead | None = None
    """The head; None outputs the stream."""
    types: TypeEmbedding | None = None
    """Token types, added to the embedding."""
    embedding_projection: EmbeddingProjection | None = None
    """The map from the embeddings' width to the stream's; None if they have one width."""
    pooler: Pooler | None = None
    """The pooler, which outputs one vector per sequence on request."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self,
            "embedding",
            isinstance(self.embedding, TokenEmbedding | SharedEmbedding),
            "a TokenEmbedding or SharedEmbedding",
        )
        read = self.embedding.d_model if self.embedding_projection is None else self.embedding_projection.d_embedding
        fits, allowed = read == self.embedding.d_model, f"a map from the embedding's d_model = {self.embedding.d_model}"
        require(self, "embedding_projection", fits, allowed)
        own = isinstance(self.embedding, TokenEmbedding) or self.head is None
        require(self, "embedding", own, "a TokenEmbedding in a model with a head")

    @property
    def d_model(self) -> int:
        """Width of the residual stream, which embeddings that are projected to it need not have."""
        found = self.embedding_projection
        return self.embedding.d_model if found is None else found.d_model

    @property
    def reads(self) -> tuple[Input, ...]:
        """Tokens, and their types if it has any."""
        return ("tokens",) if self.types is None else ("tokens", "types")

    def end(self, run: Pass) -> Part | None:
        """Returns the head, or the pooler if requested."""
        return self.pooler if run.logits == "pooled" else self.head

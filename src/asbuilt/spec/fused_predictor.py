"""Draft layers that read the streams of another model after several of its blocks: EAGLE-3."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asbuilt.spec.attention import Attention
from asbuilt.spec.embedding import TokenEmbedding
from asbuilt.spec.feedforward import GatedMLP
from asbuilt.spec.head import Head
from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import Pass, Product, Weight, require, require_flags, require_sizes

# How many streams are fused.
STREAMS = 3


@dataclass(frozen=True, kw_only=True)
class FusedPredictor(Mapped):
    """A layer that reads the next token and another model's streams after three of its blocks, and predicts on.

    With h = fuse [three streams]: x = h + attention [token_norm(embedding(next token)), stream_norm(h)], then
    y = x + ffn(ffn_norm(x)), and logits head(norm(y)) of `head.n_vocab` tokens of the vocabulary, which are those at
    i + `offsets`[i]. To go on, it reads y in place of h. EAGLE-3 (arXiv 2503.01840); the streams are those after 2,
    half and all but 3 of the blocks.
    """

    embedding: TokenEmbedding
    """Embedding of the next token, over the other model's vocabulary."""
    d_target: int
    """Width of the other model's stream."""
    token_norm: Norm
    """Norm of the embedded token."""
    stream_norm: Norm
    """Norm of the fused stream."""
    attention: Attention
    """Attention that reads both, joined."""
    ffn_norm: Norm
    """Norm of the feed-forward's input."""
    ffn: GatedMLP
    """The feed-forward."""
    norm: Norm
    """Norm before the head."""
    head: Head
    """Logits of the tokens that it drafts."""
    normed: bool = False
    """Whether attention's result is added to stream_norm(h) instead of h."""
    fuse: Map | None = None
    """Replaces the plain map that fuses the streams, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_target")
        require_flags(self, "normed")
        self.require_maps()
        alone = self.embedding.ngrams is None
        require(self, "embedding", alone, "one without n-grams: a predictor sees no text before its tokens")
        d = self.d_model
        widths = {name: getattr(self, name).d for name in ("token_norm", "stream_norm", "ffn_norm", "norm")}
        widths |= {name: getattr(self, name).d_model for name in ("attention", "ffn", "head")}
        for name, width in widths.items():
            require(self, name, width == d, f"d_model = {d} as in the embedding")
        require(self, "attention", self.attention.input_width == 2 * d, f"attention whose d_input is {2 * d}")
        own, whole = self.head.n_vocab, self.embedding.n_vocab
        require(self, "head", own <= whole, f"a head over at most the embedding's n_vocab = {whole}")

    @property
    def d_model(self) -> int:
        """Width of its own stream."""
        return self.embedding.d_model

    def plain_maps(self) -> dict[str, Linear]:
        """The map that fuses the streams, 3 d_target to d_model."""
        return {"fuse": Linear(d_in=STREAMS * self.d_target, d_out=self.d_model)}

    def buffers(self) -> dict[str, Weight]:
        """The offsets of the tokens that the head scores: whole numbers."""
        return {"offsets": Weight(shape=(self.head.n_vocab,), role="bias", whole=True)}

    def child_run(self, name: str, run: Pass) -> Pass:
        """The norm before the head, and the head, process only the requested positions."""
        return replace(run, tokens=1) if name in ("norm", "head") and run.logits != "all" else run

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The map, where the streams are those of the other model, in addition to the products of its parts."""
        return self.map_products(run, "fuse")

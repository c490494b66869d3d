"""Language models: tokens to logits over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.adaptive import AdaptiveEmbedding, AdaptiveHead
from asbuilt.spec.block import Block
from asbuilt.spec.embedding import SharedEmbedding, TokenEmbedding
from asbuilt.spec.head import Head, SharedHead, TiedHead
from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.model import Model
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import Part, Pass, Product, require, require_flags, require_sizes


@dataclass(frozen=True, kw_only=True)
class Predictor(Mapped):
    """An extra layer that reads the stream at a token and the next token, and predicts the one after that.

    head(norm(block(join [token_norm(embedding(next token)), stream_norm(stream)]))). Embedding and head are its own,
    where files store them so, or those of the model. DeepSeek-V3 (arXiv 2412.19437), section 2.2: multi-token
    prediction. The first predictor reads the model's stream after the final norm, as vLLM and SGLang do; each further
    one that of the predictor before it, after its norm (SGLang; vLLM omits it), at the same position, with the token
    one further on. Some are made to read both before those norms (Step-3.5: not `normed`).
    """

    embedding: TokenEmbedding | SharedEmbedding
    """Embedding of the next token."""
    token_norm: Norm
    """Norm of the embedded token."""
    stream_norm: Norm
    """Norm of the stream."""
    block: Block
    """The block that reads both, joined."""
    norm: Norm
    """Norm before the head."""
    head: Head | SharedHead
    """Logits of the token after next."""
    join: Map | None = None
    """Replaces the plain map that joins both, if given."""
    normed: bool = True
    """Whether the first reads the stream after the final norm, and the next one this one's after its `norm`."""

    def __post_init__(self) -> None:
        self.require_maps()
        require_flags(self, "normed")
        d_model = self.embedding.d_model
        widths = {name: getattr(self, name).d for name in ("token_norm", "stream_norm", "norm")}
        widths |= {"head": self.head.d_model, "block": self.block.branches[0].body.d_model}
        for name, width in widths.items():
            require(self, name, width == d_model, f"d_model = {d_model} as in the embedding")
        alone = getattr(self.embedding, "ngrams", None) is None
        require(self, "embedding", alone, "one without n-grams: a predictor sees no text before its tokens")
        vocab = self.embedding.n_vocab
        require(self, "head", self.head.n_vocab == vocab, f"a head over the embedding's n_vocab = {vocab}")

    @property
    def d_model(self) -> int:
        """Width of the stream."""
        return self.embedding.d_model

    def plain_maps(self) -> dict[str, Linear]:
        """The map that joins both halves, 2 d_model to d_model."""
        return {"join": Linear(d_in=2 * self.d_model, d_out=self.d_model)}

    def child_run(self, name: str, run: Pass) -> Pass:
        """The head processes only the requested positions; the norm too, unless the next predictor reads all."""
        above = ("head",) if self.normed else ("head", "norm")
        return replace(run, tokens=1) if name in above and run.logits != "all" else run

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The map, in addition to the products of the block and the head."""
        return self.map_products(run, "join")


@dataclass(frozen=True, kw_only=True, repr=False)
class LanguageModel(Model):
    """Tokens to logits over the vocabulary: GPT, Llama and similar models.

    `predictors` are stored, loaded and saved with the model. They run, and cost, only where a decoder drafts with them
    (`Pass.predictors`). Blocks with cross-attention to vectors of width `d_source`, of images, are passed over where
    there are none: in texts alone.
    """

    embedding: TokenEmbedding | AdaptiveEmbedding
    """The token embedding."""
    head: Head | TiedHead | AdaptiveHead
    """The language head."""
    d_source: int | None = None
    """Width of the vectors of images that cross-attention reads; None without cross-attention."""
    predictors: tuple[Predictor, ...] = ()
    """Layers for multi-token prediction, which run only to draft tokens."""

    def __post_init__(self) -> None:
        if self.d_source is not None:
            require_sizes(self, "d_source")
        super().__post_init__()
        reads = any(part.source_width is not None for part in self.mixers)
        require(self, "d_source", self.d_source is None or reads, "none without cross-attention")
        require(self, "embedding", isinstance(self.embedding, TokenEmbedding | AdaptiveEmbedding), "one of tokens")
        require(self, "head", isinstance(self.head, Head | TiedHead | AdaptiveHead), "a language head")
        self._require_number_of("predictors", 0)
        for predictor in self.predictors:
            vocab = self.n_vocab
            same = predictor.embedding.n_vocab == vocab and predictor.d_model == self.d_model
            require(self, "predictors", same, f"n_vocab = {vocab} and d_model = {self.d_model} as in the embedding")
            self._require_shared(predictor)

    def _require_shared(self, predictor: Predictor) -> None:
        """Requires a table and a head that a predictor can use too, if it has none of its own."""
        if isinstance(predictor.embedding, SharedEmbedding):
            plain = isinstance(self.embedding, TokenEmbedding) and self.embedding.d_table is None
            require(self, "predictors", plain, "with an embedding of their own, unless the model has a plain table")
        if isinstance(predictor.head, SharedHead):
            head, tied = self.head, isinstance(self.head, TiedHead)
            plain = isinstance(head, Head | TiedHead) and head.transform is None and head.d_table is None
            require(self, "predictors", plain, "with a head of their own, unless the model's is one matrix")
            require(self, "predictors", predictor.head.tied == tied, f"with a SharedHead whose tied = {tied}")

    @property
    def source_width(self) -> int | None:
        """d_source."""
        return self.d_source

    @property
    def crosses(self) -> bool:
        """Whether it has cross-attention to images."""
        return self.d_source is not None

    def _own(self, run: Pass) -> Pass:
        """Returns the pass without a source, of which a text alone has none."""
        return run if self.d_source is None else replace(run, source=0)

    def passes_over(self, block: Block, run: Pass) -> bool:
        """Returns whether a block reads an image, in a pass without one."""
        return run.source == 0 and block.crosses

    @property
    def without_extras(self) -> Self:
        """Returns this model without its predictors."""
        return replace(self, predictors=())

    def extras(self) -> Iterator[tuple[str, Part]]:
        """Yields the predictors."""
        return ((f"predictors.{i}", predictor) for i, predictor in enumerate(self.predictors))

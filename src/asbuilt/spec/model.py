"""The whole model: an explicit list of blocks, and what comes before and after them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from asbuilt.errors import InputError
from asbuilt.spec.block import Block
from asbuilt.spec.embedding import SharedEmbedding, TokenEmbedding
from asbuilt.spec.encoder import Pooler, TypeEmbedding
from asbuilt.spec.head import Head, TiedHead
from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import (
    MOST_BLOCKS,
    Part,
    Pass,
    Product,
    require,
    require_sizes,
    walk,
)
from asbuilt.spec.positions import BiasTable, LearnedPositions, Sinusoids
from asbuilt.spec.show import show
from asbuilt.spec.vision import Classifier, Contrast, PatchEmbedding, Projection, Vision

Embedding = TokenEmbedding | SharedEmbedding | PatchEmbedding


# What carries numbers from token to token.


@dataclass(frozen=True, kw_only=True)
class Predictor(Mapped):
    """One layer more, that reads the stream at a token and the token after it, and predicts the one after that.

    head(norm(block(join [token_norm(embedding(next token)), stream_norm(stream)]))), with an embedding and a head of
    its own as they are stored. DeepSeek-V3 (arXiv 2412.19437), section 2.2: multi-token prediction.
    """

    embedding: TokenEmbedding
    """Of the next token."""
    token_norm: Norm
    """Norm of the embedded token."""
    stream_norm: Norm
    """Norm of the stream."""
    block: Block
    """What reads both, joined."""
    norm: Norm
    """Norm before the head."""
    head: Head
    """Logits of the token after next."""
    join: Map | None = None
    """What stands in place of the plain map that joins both."""

    def __post_init__(self) -> None:
        self.require_maps()
        d_model = self.embedding.d_model
        widths = {name: getattr(self, name).d for name in ("token_norm", "stream_norm", "norm")}
        widths |= {"head": self.head.d_model, "block": self.block.branches[0].body.d_model}
        for name, width in widths.items():
            require(self, name, width == d_model, f"d_model = {d_model} as in the embedding")
        vocab = self.embedding.n_vocab
        require(self, "head", self.head.n_vocab == vocab, f"a head over the embedding's n_vocab = {vocab}")

    @property
    def d_model(self) -> int:
        """Width of the stream."""
        return self.embedding.d_model

    def plain_maps(self) -> dict[str, Linear]:
        """The map that joins both halves, 2 d_model to d_model."""
        return {"join": Linear(d_in=2 * self.d_model, d_out=self.d_model)}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The map, beside the products of the block and the head."""
        return self.map_products(run, "join")


@dataclass(frozen=True, kw_only=True)
class Model(Part):
    """A stack from tokens, or an image's patches, to logits: embedding (positions, types), blocks, final norm, head.

    Without a head it gives the stream after the final norm; some heads read one token of it, and a `pooler` gives one
    vector of each sequence, if asked. An `encoder` is such a stack; it reads a text of its own, which the blocks'
    cross-attention looks at. `vision` is what becomes of images. `relative` are the numbers of all layers with relative
    buckets. `max_positions` is the context the model was made for. `name` takes no part in equality of the built model,
    but it is printed. `predictors` are stored, loaded and saved with the model; they are in none of its passes and
    costs.
    """

    name: str = "model"
    """What is printed; it takes no part in what is computed."""
    encoder: Model | None = None
    """A stack that reads a text of its own, for cross-attention."""
    vision: Vision | Contrast | None = None
    """What becomes of images."""
    embedding: Embedding
    """What tokens, or patches, become."""
    positions: LearnedPositions | Sinusoids | None = None
    """Added to the embedding."""
    types: TypeEmbedding | None = None
    """Added to the embedding."""
    embedding_norm: Norm | None = None
    """Norm of their sum."""
    relative: BiasTable | None = None
    """The numbers that all layers with relative buckets share."""
    blocks: tuple[Block, ...]
    """The stack."""
    norm: Norm | None = None
    """Norm after the last block."""
    head: Head | TiedHead | Classifier | Projection | None = None
    """What the stream becomes in the end; None leaves the stream."""
    pooler: Pooler | None = None
    """What makes one vector of a sequence, if asked."""
    max_positions: int
    """Tokens that the model was made for."""
    predictors: tuple[Predictor, ...] = ()
    """Layers that predict tokens further on; stored, and in none of the passes."""

    def __repr__(self) -> str:
        return show(self)

    def __post_init__(self) -> None:
        require_sizes(self, "max_positions")
        require(self, "name", isinstance(self.name, str), "a name")
        for field in ("blocks", "predictors"):
            found = getattr(self, field)
            few = isinstance(found, tuple) and (field != "blocks" or len(found) > 0) and len(found) <= MOST_BLOCKS
            if not few:
                n = len(found) if isinstance(found, tuple) else found
                least = "1" if field == "blocks" else "none"
                raise InputError(field=f"Model.{field}", value=n, allowed=f"{least} to {MOST_BLOCKS}")
        self._require_one_width()
        self._require_head()
        for predictor in self.predictors:
            vocab = self.n_vocab
            same = predictor.embedding.n_vocab == vocab and predictor.d_model == self.d_model
            require(self, "predictors", same, f"n_vocab = {vocab} and d_model = {self.d_model} as in the embedding")
        if self.positions is not None:
            enough = self.positions.n_positions >= self.max_positions
            require(self, "max_positions", enough, f"at most the {self.positions.n_positions} positions of the table")
        own = not isinstance(self.embedding, SharedEmbedding) or self.head is None
        require(self, "embedding", own, "a table of its own in the model that has the head")
        self._require_source()
        self._require_buckets()
        self._require_vision()

    def _require_head(self) -> None:
        """A language model's head is over the embedding's vocabulary; a text's end is a token of it."""
        vocab = None if isinstance(self.embedding, PatchEmbedding) else self.embedding.n_vocab
        if isinstance(self.head, Head | TiedHead):
            require(self, "head", self.head.n_vocab == vocab, f"a head over the embedding's n_vocab = {vocab}")
        if isinstance(self.head, TiedHead):
            wide = getattr(self.embedding, "d_table", None)
            require(self, "head", self.head.d_table == wide, f"a head of the embedding's d_table = {wide}")
            held = getattr(self.embedding, "format", None)
            require(self, "head", self.head.format == held, f"a head of the embedding's format = {held}")
        numbers = isinstance(self.head, Projection) and self.head.reads != "first"
        require(self, "head", not numbers or vocab is not None, "one that reads the first token, of patches")

    def _require_vision(self) -> None:
        """Patches are as many as the positions, and all that there is; images meet a text as wide as what is made."""
        if isinstance(self.embedding, PatchEmbedding):
            n = self.embedding.n_tokens
            require(self, "max_positions", self.max_positions == n, f"the {n} tokens of an image")
            alone = self.encoder is None and self.vision is None
            require(self, "embedding", alone, "one of tokens, beside an encoder or images")
        if isinstance(self.vision, Contrast):
            width, wanted = self.vision.d_shared, getattr(self.head, "d_out", None)
            require(self, "vision", width == wanted, f"vectors as wide as the text's, {wanted}")
        if isinstance(self.vision, Vision):
            made = self.vision.projector.d_out
            require(self, "vision", made == self.d_model, f"a projector to d_model = {self.d_model}")
            parts = [part for block in self._unlike_blocks() for _, part in walk(block)]
            masked = all(part.sees_images for part in parts if isinstance(part, Mixer))
            allowed = "images that see both ways in causal attention alone, without chunks and distances"
            require(self, "vision", masked or not self.vision.both_ways, allowed)

    def _unlike_blocks(self) -> Iterable[Part]:
        """Returns the blocks without those that are one and the same object as another: most stacks repeat a few."""
        return {id(block): block for block in self.blocks}.values()

    def _require_source(self) -> None:
        """Cross-attention needs an encoder, of the width that it reads; an encoder has neither a head nor another."""
        if self.encoder is not None:
            inner = self.encoder
            plain = inner.encoder is None and inner.head is None and inner.pooler is None and not inner.predictors
            require(self, "encoder", plain, "a stack without head, pooler, predictors and an encoder of its own")
            shared = self.encoder.embedding
            same = not isinstance(shared, SharedEmbedding) or (
                isinstance(self.embedding, TokenEmbedding)
                and (shared.n_vocab, shared.d_model) == (self.embedding.n_vocab, self.embedding.d_model)
                and self.embedding.d_table is None
            )
            require(self, "encoder", same, "a shared embedding of the model's own n_vocab and d_model")
        made = None if self.encoder is None else self.encoder.d_model
        for block in self._unlike_blocks():
            for _, part in walk(block):
                if isinstance(part, Mixer) and part.source_width is not None:
                    require(
                        self, "blocks", part.source_width == made, f"cross-attention to the encoder's width, {made}"
                    )

    def _require_buckets(self) -> None:
        """Layers with relative buckets have as many of them, and as many heads, as the stack's one table."""
        table = None if self.relative is None else (self.relative.n_buckets, self.relative.n_heads)
        asked = {
            part.buckets
            for block in self._unlike_blocks()
            for _, part in walk(block)
            if isinstance(part, Mixer) and part.buckets is not None
        }
        require(self, "relative", asked == ({table} if table else set()), f"a table for {sorted(asked) or 'nothing'}")

    def _require_one_width(self) -> None:
        d_model = self.embedding.d_model
        for path, part in walk_widths(self):
            if part != d_model:
                field = path.split(".")[0]
                require(self, field, False, f"d_model = {d_model} as in the embedding; {path} has {part}")

    def child_run(self, name: str, run: Pass) -> Pass | None:
        """The final norm, head and pooler see only the positions that are wanted of them, the encoder the source.

        It runs before a sequence's first token alone; the head does not where the pooler does instead. A tower sees all
        images; an image is always read as a whole.
        """
        run = self._own(run)
        if name == "encoder":
            return None if run.past else replace(run, tokens=run.source_tokens, source=0, images=0, logits="all")
        if name == "vision":
            return (
                None if not run.images else replace(run, batch=run.batch * run.images, past=0, mutual=0, logits="all")
            )
        if run.depth is not None:
            return self._of_depth(name, run)
        if name == "head" and run.logits == "pooled":
            return None
        if name == "pooler":
            return replace(run, tokens=1)
        return self._above(run) if name in ("norm", "head") else run

    def _of_depth(self, name: str, run: Pass) -> Pass | None:
        """The run of what is not above the last block that is wanted."""
        assert run.depth is not None
        kind, _, number = name.partition(".")
        above = kind in ("norm", "head", "pooler") or (kind == "blocks" and int(number) >= run.depth)
        return None if above else replace(run, depth=None)

    def _own(self, run: Pass) -> Pass:
        """The run, as a model of patches has it, all of an image and nothing before; or as one of texts with images."""
        if isinstance(self.vision, Vision) and self.vision.both_ways and run.images:
            return replace(run, mutual=self.vision.n_tokens)
        if not isinstance(self.embedding, PatchEmbedding):
            return run
        logits = "pooled" if run.logits == "pooled" else "all"
        return replace(run, tokens=self.embedding.n_tokens, past=0, logits=logits)

    def _above(self, run: Pass) -> Pass:
        """The run, as what comes after the blocks has it."""
        one = run.logits != "all" or isinstance(self.head, Classifier | Projection)
        return replace(run, tokens=1) if one else run

    def children(self) -> Iterator[tuple[str, Part]]:
        """All but the predictors."""
        return ((name, child) for name, child in super().children() if not name.startswith("predictors."))

    def extras(self) -> Iterator[tuple[str, Part]]:
        """The predictors."""
        return ((f"predictors.{i}", predictor) for i, predictor in enumerate(self.predictors))

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.embedding.d_model

    @property
    def decodes(self) -> bool:
        """Whether a text can be continued token by token: not where tokens see those after them."""
        parts = (part for block in self._unlike_blocks() for _, part in walk(block))
        return all(part.decodes for part in parts if isinstance(part, Mixer))

    @property
    def language_head(self) -> Head | TiedHead | None:
        """The head over the vocabulary, None where there is none or another."""
        return self.head if isinstance(self.head, Head | TiedHead) else None

    @property
    def n_vocab(self) -> int:
        """Numbers of different tokens; none where patches are read."""
        return 0 if isinstance(self.embedding, PatchEmbedding) else self.embedding.n_vocab

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)


def walk_widths(model: Model) -> Iterator[tuple[str, int]]:
    """Yields (path, width) for everything that reads or writes the residual stream."""
    if model.head is not None:
        yield "head", model.head.d_model
    for name in ("positions", "types", "pooler"):
        part = getattr(model, name)
        if part is not None:
            yield name, part.d_model
    for name in ("embedding_norm", "norm"):
        norm = getattr(model, name)
        if norm is not None:
            yield name, norm.d
    for i, block in enumerate(model.blocks):
        yield from ((f"blocks.{i}.{branch.name}", branch.body.d_model) for branch in block.branches)

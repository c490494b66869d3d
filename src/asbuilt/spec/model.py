"""The base of whole models: a stack of blocks, and the parts before and after them.

Each kind of whole model (`LanguageModel`, `TextEncoder`, `EncoderDecoder`, `ImageEncoder`, `VisionLanguageModel`,
`DualEncoder`) is such a stack, with its own inputs, fields and checks in a separate file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

from asbuilt.errors import InputError
from asbuilt.spec.adaptive import AdaptiveEmbedding, AdaptiveHead
from asbuilt.spec.altup import ProjectedStreams
from asbuilt.spec.attention import Attention
from asbuilt.spec.attention_pooling import AttentionPooling
from asbuilt.spec.audio import MelEmbedding, MelSubsampling
from asbuilt.spec.axial import AxialPositions
from asbuilt.spec.block import Block
from asbuilt.spec.classifier import Classifier
from asbuilt.spec.delta_time_mixing import DeltaTimeMixing
from asbuilt.spec.embedding import SharedEmbedding, TokenEmbedding
from asbuilt.spec.experts import Router
from asbuilt.spec.head import Head, TiedHead
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import MOST_BLOCKS, Gives, Part, Pass, require, require_sizes, walk
from asbuilt.spec.per_layer import PerLayerEmbedding, PerLayerInput
from asbuilt.spec.positions import BiasTable, GridPositions, LearnedPositions, Sinusoids
from asbuilt.spec.relative import DistanceTable
from asbuilt.spec.show import show
from asbuilt.spec.streams import StreamMerge
from asbuilt.spec.tile_embedding import TileEmbedding
from asbuilt.spec.vision import PatchEmbedding, Projection

if TYPE_CHECKING:
    from asbuilt.spec.hearing import Hearing

Embedding = TokenEmbedding | AdaptiveEmbedding | SharedEmbedding | PatchEmbedding | MelEmbedding | MelSubsampling
AnyHead = Head | TiedHead | AdaptiveHead | Classifier | Projection | AttentionPooling
# The inputs of whole models: token ids (B, T) and their types, token ids of a source (B, S), images (N, C, H, W),
# log-mel spectrograms (B, F, N).
Input = Literal["tokens", "types", "source", "images", "prefix", "audio"]

# The parts that are summed up to what enters the first block, the norm of the sum, which may be narrower than the
# stream; the parts after the blocks; and all parts, in the order in which they run.
EMBEDDINGS = ("positions", "types", "embedding_norm")
ABOVE = ("norm", "head", "pooler")
ORDER = (
    "encoder",
    "vision",
    "hearing",
    "embedding",
    "own_tokens",
    "positions",
    "types",
    "embedding_norm",
    "embedding_projection",
    "per_layer",
    "relative",
    "blocks",
    "streams",
    *ABOVE,
    "predictors",
)


class _Chosen(type):
    """Makes `Model(...)` return the kind of model that its fields describe; subclasses are constructed as usual."""

    if not TYPE_CHECKING:  # type checkers would lose the type of the result

        def __call__(cls, **given: object) -> Model:
            """Returns the model; raises InputError if the fields match no kind."""
            if cls is not Model:
                return super().__call__(**given)
            from asbuilt.spec.whole import whole

            kind, own = whole(given)
            return kind(**own)


@dataclass(frozen=True, kw_only=True)
class Model(Part, metaclass=_Chosen):
    """Base of whole models: embedding (+ positions), blocks, final norm, head.

    Without a head the output is the stream. `relative` is the bias table of all layers with relative buckets, or
    the table of distances.
    `max_positions` is the context length that the model was made for. `name` is only printed, and does not affect the
    built model. `Model(...)` returns the kind of model that the fields describe.
    """

    name: str = "model"
    """Name for display only."""
    embedding: Embedding
    """Embedding of tokens or patches."""
    positions: LearnedPositions | Sinusoids | GridPositions | AxialPositions | None = None
    """Positions added to the embedding."""
    embedding_norm: Norm | None = None
    """Norm of the sum of embeddings."""
    per_layer: PerLayerEmbedding | None = None
    """Embedding of which each block reads its own part."""
    relative: BiasTable | DistanceTable | None = None
    """Bias table shared by all layers with relative buckets, or table of distances of those that embed them."""
    blocks: tuple[Block, ...]
    """The blocks."""
    streams: StreamMerge | ProjectedStreams | None = None
    """How the last block's residual streams become one, and the embedding several; None if there is one."""
    norm: Norm | None = None
    """Norm after the last block."""
    head: AnyHead | None
    """The head; None outputs the stream."""
    max_positions: int
    """Context length that the model was made for."""

    def __repr__(self) -> str:
        return show(self)

    def __post_init__(self) -> None:
        require_sizes(self, "max_positions")
        require(self, "name", isinstance(self.name, str), "a name")
        self._require_number_of("blocks", 0 if getattr(self.embedding, "whole", False) else 1)
        self._require_one_width()
        self._require_head()
        self._require_tiles()
        if isinstance(self.positions, LearnedPositions | Sinusoids):
            enough = self.positions.n_positions >= self.max_positions
            require(self, "max_positions", enough, f"at most the {self.positions.n_positions} positions of the table")
        self._require_grid()
        self._require_source()
        self._require_buckets()
        self._require_lenders()
        self._require_weights()
        self._require_choices()
        self._require_tables()
        alone = getattr(self.embedding, "ngrams", None) is None or self.reads == ("tokens",)
        require(self, "embedding", alone, "one without n-grams in a model that reads more than tokens")
        self._require_streams()
        self._require_per_layer()

    def _require_number_of(self, field: str, least: int) -> None:
        found = getattr(self, field)
        if not isinstance(found, tuple) or not least <= len(found) <= MOST_BLOCKS:
            n, allowed = len(found) if isinstance(found, tuple) else found, f"{least or 'none'} to {MOST_BLOCKS}"
            raise InputError(field=f"{type(self).__name__}.{field}", value=n, allowed=allowed)

    def _require_tiles(self) -> None:
        """Requires an image across which cross-attention reads, or tiles, for branches that know of them."""
        branches = [branch for block in {id(b): b for b in self.blocks}.values() for branch in block.branches]
        late = any(branch.after_source for branch in branches)
        require(self, "blocks", not late or self.crosses, "branches without after_source: no image is read across")
        tiles = {branch.body for branch in branches if isinstance(branch.body, TileEmbedding)}
        own = getattr(self.embedding, "tiles", None)
        require(self, "blocks", tiles <= {own}, "embeddings of tiles as that of the patches")

    def _require_head(self) -> None:
        """Requires a language head to match the embedding's vocabulary."""
        if isinstance(self.head, Head | TiedHead | AdaptiveHead):
            vocab = self.n_vocab
            require(self, "head", self.head.n_vocab == vocab, f"a head over the embedding's n_vocab = {vocab}")
        if isinstance(self.head, AdaptiveHead):
            allowed = "one whose tied clusters have the embedding's sizes, and tied maps where its own are plain"
            require(self, "head", self.head.shares_with(self.embedding), allowed)
        if isinstance(self.head, TiedHead):
            one = not isinstance(self.embedding, AdaptiveEmbedding)
            require(self, "head", one, "an AdaptiveHead or one of its own: the embedding has several tables")
            wide = getattr(self.embedding, "width", self.embedding.d_model)
            require(self, "head", self.head.width == wide, f"a head whose d_table is the embedding's width, {wide}")
            held = getattr(self.embedding, "format", None)
            require(self, "head", self.head.format == held, f"a head of the embedding's format = {held}")
            require(self, "head", not getattr(self.embedding, "extra", 0), "its own table, beside extra rows")

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers; of blocks that are the same object, once."""
        unlike = {id(block): block for block in self.blocks}.values()  # most stacks repeat a few blocks
        return tuple(part for block in unlike for _, part in walk(block) if isinstance(part, Mixer))

    def _require_grid(self) -> None:
        """Requires patches of images of any size for what needs their grid."""
        side = self.embedding.n_side if isinstance(self.embedding, PatchEmbedding) and self.embedding.any_size else 0
        of_grids = isinstance(self.positions, GridPositions | AxialPositions)
        allowed = "other ones: these are for patches of images of any size"
        require(self, "positions", bool(side) or not of_grids, allowed)
        if isinstance(self.positions, AxialPositions):
            fits = self.positions.n_entries >= side
            require(self, "positions", fits, f"tables of at least {side} entries, the patches per side of an image")
        windows = {part.window_side for part in self.mixers} - {None}
        divide = side > 0 and all(side % n == 0 for n in windows if n)
        require(self, "blocks", not windows or divide, f"windows that divide the {side} patches per side of an image")

    def _require_source(self) -> None:
        """Requires cross-attention to match the width of an encoder's output."""
        for part in self.mixers:
            read, made = part.source_width, self.source_width
            allowed = f"cross-attention to the encoder's width, {made}"
            require(self, "blocks", read is None or read == made, allowed)

    def _require_buckets(self) -> None:
        """Requires layers with relative buckets, or embeddings of distances, to match the stack's table of them."""
        found = self.relative
        buckets = {(found.n_buckets, found.n_heads)} if isinstance(found, BiasTable) else set()
        distances = {(found.n_rows, found.d_model)} if isinstance(found, DistanceTable) else set()
        for name, made in (("buckets", buckets), ("distances", distances)):
            asked = {getattr(part, name) for part in self.mixers} - {None}
            require(self, "relative", asked == made, f"a table for {sorted(asked) or 'nothing'}")

    def _require_lenders(self) -> None:
        """Requires layers that read what an earlier one made, by name, to follow one that lends what they need."""
        heads = "the same heads, positions and window"
        self._require_lent(Attention, "kv_name", "kv_from", "keys and values", heads)
        self._require_lent(DeltaTimeMixing, "value_name", "value_from", "values", "as many heads and as wide values")

    def _require_lent(
        self, kind: type[Attention | DeltaTimeMixing], own: str, source: str, what: str, alike: str
    ) -> None:
        lenders: dict[str, Any] = {}
        read: set[str] = set()
        for part in (part for part in self.mixers if isinstance(part, kind)):
            name, wanted = getattr(part, own), getattr(part, source)
            if wanted is not None:
                lender = lenders.get(wanted)
                allowed = f"an earlier layer with the {own} {wanted}, of {alike}"
                require(self, "blocks", lender is not None and lender.serves(part), allowed)
                read.add(wanted)
            elif name is not None:
                lenders[name] = part
        unread = sorted(lenders.keys() - read)
        require(self, "blocks", not unread, f"later layers that read the {what} named {unread}")

    def _require_weights(self) -> None:
        """Requires parts that borrow their weights to follow an equal one that lends them, and no other so named."""
        distinct = {id(b): b for b in self.blocks}
        sharing = {key: [x for _, x in walk(b) if x.lends or x.borrows] for key, b in distinct.items()}
        lenders: dict[str, Part] = {}
        read: set[str] = set()
        for part in (part for block in self.blocks for part in sharing[id(block)]):
            own: Any = {"weights_name": None, "weights_from": None}
            if part.borrows is not None:
                same = lenders.get(part.borrows) == replace(part, **own)
                require(self, "blocks", same, f"an earlier part that is equal, with the weights_name {part.borrows}")
                read.add(part.borrows)
            elif part.lends is not None:
                new = part.lends not in lenders
                require(self, "blocks", new, f"weights of one name, {part.lends}, in one part alone")
                lenders[part.lends] = replace(part, **own)
        unread = sorted(lenders.keys() - read)
        require(self, "blocks", not unread, f"later parts that use the weights named {unread}")

    def _require_per_layer(self) -> None:
        """Requires branches that read per-layer vectors to match the stack's embedding of them."""
        found, blocks = self.per_layer, {id(block): block for block in self.blocks}.values()
        bodies = [branch.body for block in blocks for branch in block.branches]
        bodies += [block.updates.vector for block in blocks if block.updates is not None and block.updates.vector]
        read = {body.d for body in bodies if isinstance(body, PerLayerInput)}
        made = set() if found is None else {found.d}
        allowed = f"an embedding of the width that blocks read: {sorted(read) or 'none'}"
        require(self, "per_layer", read == made, allowed)
        if found is not None:
            tokens = isinstance(self.embedding, TokenEmbedding | AdaptiveEmbedding)
            enough = found.n_layers >= self.n_layers and tokens
            require(self, "per_layer", enough, f"one of tokens, for at least n_layers = {self.n_layers} blocks")

    def _require_choices(self) -> None:
        """Requires layers that reuse a choice of keys to come after one that chooses as many."""
        choices: dict[int, list[tuple[bool, int, bool]]] = {}
        last = None
        for block in self.blocks:
            if id(block) not in choices:
                mixers = (part for _, part in walk(block) if isinstance(part, Mixer))
                found = ((mixer.choice, mixer.lends_choice) for mixer in mixers)
                choices[id(block)] = [(*choice, lends) for choice, lends in found if choice is not None]
            for chooses, top_k, lends in choices[id(block)]:
                allowed = f"a layer that chooses {top_k} keys before those that reuse its choice"
                require(self, "blocks", chooses or top_k == last, allowed)
                last = top_k if lends else None

    def _require_streams(self) -> None:
        """Requires all branches, or the blocks around them, to have as many residual streams."""
        unlike = {id(block): block for block in self.blocks}.values()
        plain = [block for block in unlike if block.updates is None]
        found = {None if one.streams is None else one.streams.n_streams for block in plain for one in block.branches}
        found |= {block.updates.n_streams for block in unlike if block.updates is not None}
        wanted = None if self.streams is None else self.streams.n_streams
        allowed = f"a merge of the blocks' streams, {sorted(found, key=str)}"
        require(self, "streams", (found or {None}) == {wanted}, allowed)
        fits = self.streams is None or self.streams.d_model == self.d_model
        require(self, "streams", fits, f"streams of d_model = {self.d_model}")

    def _require_tables(self) -> None:
        """Requires tables of experts to have a row for each token id."""
        unlike = {id(block): block for block in self.blocks}.values()
        routers = (part for block in unlike for _, part in walk(block) if isinstance(part, Router))
        rows = {router.table for router in routers if router.table is not None}
        require(self, "blocks", rows <= {self.n_vocab}, f"tables of experts for n_vocab = {self.n_vocab} token ids")

    def _require_one_width(self) -> None:
        for path, width in self._widths():
            field = path.split(".")[0]
            d_model = self.embedding.d_model if field in EMBEDDINGS else self.d_model
            if width != d_model:
                require(self, field, False, f"d_model = {d_model} as in the embedding; {path} has {width}")

    def _widths(self) -> Iterator[tuple[str, int]]:
        """Yields (path, width) for everything that reads or writes the residual stream."""
        for name in ("head", "positions", "types", "pooler", "per_layer"):
            part = getattr(self, name, None)
            if part is not None:
                yield name, part.d_model
        for name in ("embedding_norm", "norm"):
            norm = getattr(self, name)
            if norm is not None:
                yield name, norm.d
        for i, block in enumerate(self.blocks):
            yield from ((f"blocks.{i}.{branch.name}", branch.body.d_model) for branch in block.branches)

    def child_run(self, name: str, run: Pass) -> Pass | None:
        """The final norm, head and pooler process only the requested positions.

        Either the head runs or the pooler; blocks beyond the requested depth do not run.
        """
        run = self._own(run)
        kind, _, number = name.partition(".")
        if run.depth is not None:
            above = kind in ("streams", "predictors", *ABOVE) or (kind == "blocks" and int(number) >= run.depth)
            if above:
                return None
            run = replace(run, depth=None)
        if kind == "blocks" and self.passes_over(self.blocks[int(number)], run):
            return None
        if kind == "blocks":
            return run
        if name in ("head", "pooler") and (name == "pooler") != (run.logits == "pooled"):
            return None
        return self._above(run, name) if name in ABOVE else run

    def _own(self, run: Pass) -> Pass:
        """Returns the pass as this model sees it."""
        return run

    def _above(self, run: Pass, name: str) -> Pass:
        """Returns the pass as a part after the blocks sees it: one token of each sequence, if no others are used."""
        head = None if run.logits == "pooled" else self.head
        if isinstance(head, Classifier) and head.after_norm and name == "norm":
            return run
        one = run.logits != "all" or (head is not None and not head.per_token)
        return replace(run, tokens=1) if one else run

    def children(self) -> Iterator[tuple[str, Part]]:
        """Yields all parts except predictors, in the order in which they run."""
        return iter(self._in_order)

    @cached_property
    def _in_order(self) -> tuple[tuple[str, Part], ...]:
        own = [found for found in super().children() if not found[0].startswith("predictors.")]
        return tuple(sorted(own, key=lambda found: ORDER.index(found[0].partition(".")[0])))

    def changed(self, **changes: Any) -> Model:  # noqa: ANN401  # fields' values
        """Returns this model with fields changed, as the kind of model that they then describe.

        `spec.changed(head=None)` of a language model is a text encoder, `spec.changed(vision=...)` a vision-language
        model. `dataclasses.replace` keeps the kind of model. Raises InputError as `Model` does.
        """
        return Model(**({field.name: getattr(self, field.name) for field in fields(self)} | changes))

    @property
    def reads(self) -> tuple[Input, ...]:
        """The inputs of the model, as `forward` of the built one takes them."""
        return ("tokens",)

    @property
    def gives(self) -> Gives:
        """The kind of output: the head's, or the stream."""
        return "stream" if self.head is None else self.head.gives

    def end(self, run: Pass) -> Part | None:
        """Returns the part after the final norm in a pass; None if there is none."""
        return None if run.logits == "pooled" else self.head

    @property
    def prompted(self) -> Model:
        """The stack that reads the prompt: the encoder, if there is one."""
        return self

    @property
    def patches(self) -> PatchEmbedding | None:
        """The patch embedding; None if the model reads no images."""
        return None

    @property
    def image_tokens(self) -> int:
        """Tokens per image in a text."""
        return 0

    @property
    def heard(self) -> Hearing | None:
        """What hears sounds in a text; None if nothing does."""
        return None

    @property
    def without_extras(self) -> Self:
        """Returns this model without parts that no pass uses."""
        return self

    def runs_block(self, block: Block, run: Pass) -> bool:
        """Returns whether one of the model's blocks runs in a pass of the model."""
        return not self.passes_over(block, self._own(run))

    def passes_over(self, block: Block, run: Pass) -> bool:
        """Returns whether a block leaves the stream as it is in a pass, since it would read an image, and has none."""
        return False

    @property
    def crosses(self) -> bool:
        """Whether images are read by cross-attention."""
        return False

    @property
    def n_rows(self) -> int:
        """Rows of the embedding's table: the tokens that can be read."""
        return getattr(self.embedding, "n_rows", self.n_vocab)

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.embedding.d_model

    @property
    def stream_width(self) -> int:
        """Width of all residual streams together, between blocks."""
        return self.d_model * (1 if self.streams is None else self.streams.n_streams)

    @property
    def source_width(self) -> int | None:
        """Width of the encoder's output; None without an encoder."""
        return None

    @property
    def decodes(self) -> bool:
        """Whether it supports decoding token by token, which requires causal attention."""
        return all(part.decodes for part in self.mixers)

    @property
    def generates(self) -> bool:
        """Whether it generates text: it predicts the next token, and its attention is causal."""
        return self.decodes and self.gives == "logits"

    @property
    def language_head(self) -> Head | TiedHead | AdaptiveHead | None:
        """The language head; None if there is none or another one."""
        return self.head if isinstance(self.head, Head | TiedHead | AdaptiveHead) else None

    @property
    def n_vocab(self) -> int:
        """Size of the vocabulary; 0 for image encoders."""
        return getattr(self.embedding, "n_vocab", 0)

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

"""What every whole model is: a stack of blocks, and what comes before and after them.

Each whole (`LanguageModel`, `TextEncoder`, `EncoderDecoder`, `ImageEncoder`, `VisionLanguageModel`, `DualEncoder`) is
such a stack, and has in a file of its own what it reads beside, and the fields and checks that are its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

from asbuilt.errors import InputError
from asbuilt.spec.block import Block
from asbuilt.spec.embedding import SharedEmbedding, TokenEmbedding
from asbuilt.spec.head import Head, TiedHead
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import MOST_BLOCKS, Gives, Part, Pass, require, require_sizes, walk
from asbuilt.spec.positions import BiasTable, LearnedPositions, Sinusoids
from asbuilt.spec.show import show
from asbuilt.spec.vision import Classifier, PatchEmbedding, Projection

Embedding = TokenEmbedding | SharedEmbedding | PatchEmbedding
AnyHead = Head | TiedHead | Classifier | Projection
# What a whole is given: token ids (B, T) and their types, the token ids of a source (B, S), images (N, C, H, W).
Input = Literal["tokens", "types", "source", "images"]

# What stands behind the blocks; and all parts, in the order in which they run.
ABOVE = ("norm", "head", "pooler")
ORDER = (
    "encoder",
    "vision",
    "embedding",
    "positions",
    "types",
    "embedding_norm",
    "relative",
    "blocks",
    *ABOVE,
    "predictors",
)


class _Chosen(type):
    """`Model(...)` is the whole that its fields describe; a whole that is named is made as any class is."""

    if not TYPE_CHECKING:  # it would say that nothing is known of what comes of it

        def __call__(cls, **given: object) -> Model:
            """Returns the whole; raises InputError where the fields fit none."""
            if cls is not Model:
                return super().__call__(**given)
            from asbuilt.spec.whole import whole

            kind, own = whole(given)
            return kind(**own)


@dataclass(frozen=True, kw_only=True)
class Model(Part, metaclass=_Chosen):
    """Base of whole models: a stack from what is embedded to what the head gives, or to the stream without a head.

    embedding (+ positions), blocks, final norm, head. `relative` are the numbers of all layers with relative buckets.
    `max_positions` is the context the model was made for. `name` takes no part in equality of the built model, but it
    is printed. `Model(...)` is the whole that the fields describe.
    """

    name: str = "model"
    """What is printed; it takes no part in what is computed."""
    embedding: Embedding
    """What tokens, or patches, become."""
    positions: LearnedPositions | Sinusoids | None = None
    """Added to the embedding."""
    embedding_norm: Norm | None = None
    """Norm of their sum."""
    relative: BiasTable | None = None
    """The numbers that all layers with relative buckets share."""
    blocks: tuple[Block, ...]
    """The stack."""
    norm: Norm | None = None
    """Norm after the last block."""
    head: AnyHead | None
    """What the stream becomes in the end; None leaves the stream."""
    max_positions: int
    """Tokens that the model was made for."""

    def __repr__(self) -> str:
        return show(self)

    def __post_init__(self) -> None:
        require_sizes(self, "max_positions")
        require(self, "name", isinstance(self.name, str), "a name")
        self._require_number_of("blocks", 1)
        self._require_one_width()
        self._require_head()
        if self.positions is not None:
            enough = self.positions.n_positions >= self.max_positions
            require(self, "max_positions", enough, f"at most the {self.positions.n_positions} positions of the table")
        self._require_source()
        self._require_buckets()

    def _require_number_of(self, field: str, least: int) -> None:
        found = getattr(self, field)
        if not isinstance(found, tuple) or not least <= len(found) <= MOST_BLOCKS:
            n, allowed = len(found) if isinstance(found, tuple) else found, f"{least or 'none'} to {MOST_BLOCKS}"
            raise InputError(field=f"{type(self).__name__}.{field}", value=n, allowed=allowed)

    def _require_head(self) -> None:
        """A language model's head is over the embedding's vocabulary."""
        if isinstance(self.head, Head | TiedHead):
            vocab = self.n_vocab
            require(self, "head", self.head.n_vocab == vocab, f"a head over the embedding's n_vocab = {vocab}")
        if isinstance(self.head, TiedHead):
            wide = getattr(self.embedding, "d_table", None)
            require(self, "head", self.head.d_table == wide, f"a head of the embedding's d_table = {wide}")
            held = getattr(self.embedding, "format", None)
            require(self, "head", self.head.format == held, f"a head of the embedding's format = {held}")

    @property
    def mixers(self) -> Iterator[Mixer]:
        """What carries numbers from token to token, of blocks that are one and the same object once."""
        unlike = {id(block): block for block in self.blocks}.values()  # most stacks repeat a few
        return (part for block in unlike for _, part in walk(block) if isinstance(part, Mixer))

    def _require_source(self) -> None:
        """Cross-attention reads an encoder's stream, of its width."""
        for part in self.mixers:
            read, made = part.source_width, self.source_width
            allowed = f"cross-attention to the encoder's width, {made}"
            require(self, "blocks", read is None or read == made, allowed)

    def _require_buckets(self) -> None:
        """Layers with relative buckets have as many of them, and as many heads, as the stack's one table."""
        table = None if self.relative is None else (self.relative.n_buckets, self.relative.n_heads)
        asked = {part.buckets for part in self.mixers if part.buckets is not None}
        require(self, "relative", asked == ({table} if table else set()), f"a table for {sorted(asked) or 'nothing'}")

    def _require_one_width(self) -> None:
        d_model = self.embedding.d_model
        for path, width in self._widths():
            if width != d_model:
                field = path.split(".")[0]
                require(self, field, False, f"d_model = {d_model} as in the embedding; {path} has {width}")

    def _widths(self) -> Iterator[tuple[str, int]]:
        """Yields (path, width) for everything that reads or writes the residual stream."""
        for name in ("head", "positions", "types", "pooler"):
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
        """The final norm, head and pooler see only the positions that are wanted of them.

        The head does not run where the pooler does instead; no block does above the last that is wanted.
        """
        run = self._own(run)
        kind, _, number = name.partition(".")
        if run.depth is not None:
            above = kind in ABOVE or (kind == "blocks" and int(number) >= run.depth)
            return None if above else replace(run, depth=None)
        if name == "head" and run.logits == "pooled":
            return None
        if name == "pooler":
            return replace(run, tokens=1)
        return self._above(run) if name in ABOVE else run

    def _own(self, run: Pass) -> Pass:
        """The run, as this model has it."""
        return run

    def _above(self, run: Pass) -> Pass:
        """The run, as what comes after the blocks has it."""
        one = run.logits != "all" or (self.head is not None and not self.head.per_token)
        return replace(run, tokens=1) if one else run

    def children(self) -> Iterator[tuple[str, Part]]:
        """All but the predictors, in the order in which they run."""
        return iter(self._in_order)

    @cached_property
    def _in_order(self) -> tuple[tuple[str, Part], ...]:
        own = [found for found in super().children() if not found[0].startswith("predictors.")]
        return tuple(sorted(own, key=lambda found: ORDER.index(found[0].partition(".")[0])))

    def changed(self, **changes: Any) -> Model:  # noqa: ANN401  # fields' values
        """Returns this model with fields changed, as the whole that all of them together then describe.

        `spec.changed(head=None)` of a language model is an encoder of its text, `spec.changed(vision=...)` a model that
        reads images too. `edit` and `dataclasses.replace` leave a whole what it is. Raises InputError as `Model` does.
        """
        return Model(**({field.name: getattr(self, field.name) for field in fields(self)} | changes))

    @property
    def reads(self) -> tuple[Input, ...]:
        """What is given to the model: what `forward` of the built one takes."""
        return ("tokens",)

    @property
    def gives(self) -> Gives:
        """What comes of it: what the head gives, or the stream."""
        return "stream" if self.head is None else self.head.gives

    def end(self, run: Pass) -> Part | None:
        """Returns what stands behind the final norm in a run; None where nothing does."""
        return None if run.logits == "pooled" else self.head

    @property
    def prompted(self) -> Model:
        """The stack that reads what a text is written after: an encoder, where there is one."""
        return self

    @property
    def patches(self) -> PatchEmbedding | None:
        """What cuts images into patches; None where none are read."""
        return None

    @property
    def image_tokens(self) -> int:
        """Tokens of a text that one image takes."""
        return 0

    @property
    def without_extras(self) -> Self:
        """This model without what no pass of it reaches."""
        return self

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.embedding.d_model

    @property
    def source_width(self) -> int | None:
        """Width of the stream that cross-attention reads; None where there is no encoder."""
        return None

    @property
    def decodes(self) -> bool:
        """Whether a text can be continued token by token: not where tokens see those after them."""
        return all(part.decodes for part in self.mixers)

    @property
    def generates(self) -> bool:
        """Whether it continues texts: it gives logits of the next token, and sees none that come after."""
        return self.decodes and self.gives == "logits"

    @property
    def language_head(self) -> Head | TiedHead | None:
        """The head over the vocabulary, None where there is none or another."""
        return self.head if isinstance(self.head, Head | TiedHead) else None

    @property
    def n_vocab(self) -> int:
        """Numbers of different tokens; none where patches are read."""
        return getattr(self.embedding, "n_vocab", 0)

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

"""Blocks and models: a model is an explicit list of blocks, a block a list of residual branches, all of them data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Self

from asbuilt.errors import InputError
from asbuilt.spec.attention import Attention
from asbuilt.spec.cross import CrossAttention
from asbuilt.spec.encoder import HeadTransform, Pooler, TypeEmbedding
from asbuilt.spec.experts import FeedForward
from asbuilt.spec.feedforward import linear
from asbuilt.spec.latent import LatentAttention
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import (
    MOST_BLOCKS,
    Part,
    Pass,
    Product,
    Saved,
    Weight,
    divided_vocabulary,
    require,
    require_flags,
    require_number,
    require_sizes,
    walk,
)
from asbuilt.spec.positions import Alibi, BiasTable, LearnedPositions, RelativeBuckets, Rotary, Sinusoids
from asbuilt.spec.relative import RelativeProjection
from asbuilt.spec.show import show
from asbuilt.spec.vision import Classifier, Contrast, PatchEmbedding, Projection, Vision


@dataclass(frozen=True, kw_only=True)
class TokenEmbedding(Part):
    """A table of one learned vector per token of the vocabulary; what is looked up is multiplied by `scale`.

    A table `d_table` wide is followed by a matrix to d_model (OPT-350M; ALBERT, arXiv 1909.11942, section 3.1).
    """

    kind = "embedding"
    n_vocab: int
    d_model: int
    scale: float = 1.0
    d_table: int | None = None

    def __post_init__(self) -> None:
        require_sizes(self, "n_vocab", "d_model", *(() if self.d_table is None else ("d_table",)))
        require_number(self, "scale")

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_vocab / tensor of the rows, padded where that leaves a rest."""
        return replace(self, n_vocab=divided_vocabulary(self.n_vocab, tensor))

    def holds(self) -> dict[str, Weight]:
        """The table (n_vocab, d_model), or (n_vocab, d_table) and the matrix (d_model, d_table)."""
        width = self.d_model if self.d_table is None else self.d_table
        table = {"weight": Weight(shape=(self.n_vocab, width), role="table")}
        return table if self.d_table is None else table | linear(self.d_model, self.d_table, False, "project")

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product where the table has a width of its own."""
        if self.d_table is None:
            return ()
        return (Product(name="project", a=run.rows, b=self.d_table, c=self.d_model, weight="project.weight"),)

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The token numbers, the factor where there is one, and what is looked up where it is multiplied."""
        tokens = Saved(name="tokens", size=run.rows, width="int64", shared=True)
        scale = () if self.scale == 1.0 else (Saved(name="scale", size=1),)
        rows = () if self.d_table is None else (Saved(name="rows", size=run.rows * self.d_table),)
        return (tokens, *scale, *rows)

    def peak_bytes(self, run: Pass) -> int:
        """The looked-up vectors, and what they are multiplied to."""
        return run.rows * (self.d_model + (self.d_table or 0)) * run.width


@dataclass(frozen=True, kw_only=True)
class SharedEmbedding(Part):
    """Looks vectors up in the table of the whole model's own embedding, and multiplies them by `scale`."""

    kind = "embedding"
    n_vocab: int
    d_model: int
    scale: float = 1.0

    def __post_init__(self) -> None:
        require_sizes(self, "n_vocab", "d_model")
        require_number(self, "scale")

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device finds n_vocab / tensor of the rows, padded where that leaves a rest."""
        return replace(self, n_vocab=divided_vocabulary(self.n_vocab, tensor))

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The token numbers, and the factor where there is one."""
        tokens = Saved(name="tokens", size=run.rows, width="int64", shared=True)
        return (tokens,) if self.scale == 1.0 else (tokens, Saved(name="scale", size=1))

    def peak_bytes(self, run: Pass) -> int:
        """The looked-up vectors."""
        return run.rows * self.d_model * run.width


Embedding = TokenEmbedding | SharedEmbedding | PatchEmbedding


@dataclass(frozen=True, kw_only=True)
class _Logits(Part):
    """What both heads share: scale * x W^T + b, W being one's own or the embedding's table."""

    kind = "head"
    d_model: int
    n_vocab: int
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    transform: HeadTransform | None = None
    shift: bool = False
    d_table: int | None = None

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_vocab", *(() if self.d_table is None else ("d_table",)))
        require_flags(self, "bias", "shift")
        require_number(self, "scale")
        if self.softcap is not None:
            require_number(self, "softcap")
        fits = self.transform is None or self.transform.d_model == self.d_model
        require(self, "transform", fits, f"a transform of d_model = {self.d_model}")
        require(self, "d_table", self.d_table is None or self.transform is None, "none beside a transform")

    @property
    def width(self) -> int:
        """Numbers of a row of W."""
        return self.d_model if self.d_table is None else self.d_table

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_vocab / tensor of the logits, padded where that leaves a rest."""
        return replace(self, n_vocab=divided_vocabulary(self.n_vocab, tensor))

    def holds(self) -> dict[str, Weight]:
        """The matrix (d_table, d_model) to the table's width, and a bias, if asked."""
        narrow = {} if self.d_table is None else linear(self.d_table, self.d_model, False, "project")
        return narrow | ({"bias": Weight(shape=(self.n_vocab,), role="bias")} if self.bias else {})

    def buffers(self) -> dict[str, Weight]:
        """The shift, if asked."""
        return {"shift": Weight(shape=(self.n_vocab,), role="bias")} if self.shift else {}

    def _products(self, run: Pass, weight: str) -> tuple[Product, ...]:
        """The product with `weight`, after that to the table's width."""
        logits = Product(name="logits", a=run.rows, b=self.width, c=self.n_vocab, weight=weight)
        if self.d_table is None:
            return (logits,)
        return (Product(name="project", a=run.rows, b=self.d_model, c=self.d_table, weight="project.weight"), logits)

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, at both widths, and the capped logits where they are capped."""
        read = (Saved(name="input", size=run.rows * self.d_model),)
        if self.d_table is not None:
            read += (Saved(name="narrow", size=run.rows * self.d_table),)
        return read if self.softcap is None else (*read, Saved(name="capped", size=run.rows * self.n_vocab))

    def peak_bytes(self, run: Pass) -> int:
        """The logits, twice if scaled or shifted, three times if capped, beside what they are of; or the transform."""
        times = 3 if self.softcap is not None else 2 if self.scale != 1.0 or self.shift else 1
        logits = run.rows * self.n_vocab * run.width * times
        if self.transform is None:
            return run.rows * (self.d_table or 0) * run.width + logits
        return max(self.transform.peak_bytes(run), run.rows * self.d_model * run.width + logits)


@dataclass(frozen=True, kw_only=True)
class Head(_Logits):
    """Logits scale * x W^T + b with a matrix of its own; `softcap` c turns each logit l into c*tanh(l/c).

    A `transform` is what x goes through first, or a matrix to W's own width, `d_table`. `shift` adds a buffer to the
    logits, a number for each token that no training moves.
    """

    def holds(self) -> dict[str, Weight]:
        """W (n_vocab, d_model or d_table), the matrix to its width, and a bias, if asked."""
        return {"weight": Weight(shape=(self.n_vocab, self.width), role="matrix")} | super().holds()

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product, or two."""
        return self._products(run, "weight")


@dataclass(frozen=True, kw_only=True)
class TiedHead(_Logits):
    """Logits scale * x E^T + b with the token embedding's table E: no matrix of its own, the same product.

    Other fields as those of `Head`; `d_table` is that of the embedding.
    """

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product, or two."""
        return self._products(run, "/embedding.weight")


# What carries numbers from token to token.
Mixer = Attention | LatentAttention


@dataclass(frozen=True, kw_only=True)
class Parallel(Part):
    """attention(x) + ffn(x): both read the same normed input (PaLM, arXiv 2204.02311, section 2)."""

    attention: Mixer
    ffn: FeedForward

    def __post_init__(self) -> None:
        same = self.attention.d_model == self.ffn.d_model
        require(self, "ffn", same, f"d_model = {self.attention.d_model} as in the attention")

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.attention.d_model

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """Both read the normed stream."""
        return (("ffn", "attention"),)

    def peak_bytes(self, run: Pass) -> int:
        """The busier of the two, the attention's result being there while the other runs; or both and their sum."""
        stream = run.rows * self.d_model * run.width
        return max(self.attention.peak_bytes(run), stream + self.ffn.peak_bytes(run), 3 * stream)


Body = Mixer | CrossAttention | FeedForward | Parallel


@dataclass(frozen=True, kw_only=True)
class Branch(Part):
    """One residual branch: sum_norm(x + scale * post_norm(body(norm(x)))), where each norm may be absent.

    A `parallel` branch reads what the branch before it read, and is added to that one's sum.
    """

    name: str
    norm: Norm | None = None
    body: Body
    post_norm: Norm | None = None
    sum_norm: Norm | None = None
    scale: float = 1.0
    parallel: bool = False

    def __post_init__(self) -> None:
        simple = isinstance(self.name, str) and self.name.isidentifier()
        require(self, "name", simple, "a name of letters, digits and underscores: it is part of every path")
        require_number(self, "scale")
        require_flags(self, "parallel")
        for field in ("norm", "post_norm", "sum_norm"):
            norm = getattr(self, field)
            fits = norm is None or norm.d == self.body.d_model
            require(self, field, fits, f"a norm over d_model = {self.body.d_model}")

    @property
    def reader(self) -> str:
        """The path, from the block, of the part that reads the stream."""
        first = "norm" if self.norm is not None else "body.attention" if isinstance(self.body, Parallel) else "body"
        return f"{self.name}.{first}"

    def recomputes(self) -> tuple[str, ...]:
        """The normed input, from the stream that the norm keeps."""
        reader = "body.attention" if isinstance(self.body, Parallel) else "body"
        return () if self.norm is None else (f"{reader}:input",)

    def peak_bytes(self, run: Pass) -> int:
        """The busiest of norm, body with the normed input, post-norm, and the sum."""
        stream = run.rows * self.body.d_model * run.width
        normed = stream if self.norm is not None else 0
        norms = [norm.peak_bytes(run) for norm in (self.norm,) if norm is not None]
        after = [stream + norm.peak_bytes(run) for norm in (self.post_norm, self.sum_norm) if norm is not None]
        return max(normed + self.body.peak_bytes(run), 2 * stream, *norms, *after)


@dataclass(frozen=True, kw_only=True)
class Block(Part):
    """Residual branches, one after the other."""

    branches: tuple[Branch, ...]

    def __post_init__(self) -> None:
        names = [branch.name for branch in self.branches]
        require(self, "branches", len(names) > 0, "at least one branch")
        require(self, "branches", len(set(names)) == len(names), "branches of different names")
        require(self, "branches", not names or not self.branches[0].parallel, "a first branch that is not parallel")

    def peak_bytes(self, run: Pass) -> int:
        """The busiest branch; from the second on its input is alive beside the block's."""
        stream = run.rows * self.branches[0].body.d_model * run.width
        return max(branch.peak_bytes(run) + (stream if i else 0) for i, branch in enumerate(self.branches))

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """What a parallel branch reads first is what the branch before it read first."""
        pairs = zip(self.branches, self.branches[1:], strict=False)
        return tuple((second.reader, first.reader) for first, second in pairs if second.parallel)

    def children(self) -> Iterator[tuple[str, Part]]:
        """A branch is found under its own name."""
        return ((branch.name, branch) for branch in self.branches)


@dataclass(frozen=True, kw_only=True)
class Predictor(Part):
    """One layer more, that reads the stream at a token and the token after it, and predicts the one after that.

    head(norm(block(join [token_norm(embedding(next token)), stream_norm(stream)]))), with an embedding and a head of
    its own as they are stored. DeepSeek-V3 (arXiv 2412.19437), section 2.2: multi-token prediction.
    """

    embedding: TokenEmbedding
    token_norm: Norm
    stream_norm: Norm
    block: Block
    norm: Norm
    head: Head

    def __post_init__(self) -> None:
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

    def holds(self) -> dict[str, Weight]:
        """The map that joins both halves, (d_model, 2 d_model)."""
        return linear(self.d_model, 2 * self.d_model, False, "join")

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product, beside those of the block and the head."""
        return (Product(name="join", a=run.rows, b=2 * self.d_model, c=self.d_model, weight="join.weight"),)


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
    encoder: Model | None = None
    vision: Vision | Contrast | None = None
    embedding: Embedding
    positions: LearnedPositions | Sinusoids | None = None
    types: TypeEmbedding | None = None
    embedding_norm: Norm | None = None
    relative: BiasTable | None = None
    blocks: tuple[Block, ...]
    norm: Norm | None = None
    head: Head | TiedHead | Classifier | Projection | None = None
    pooler: Pooler | None = None
    max_positions: int
    predictors: tuple[Predictor, ...] = ()

    def __repr__(self) -> str:
        return show(self)

    def peak_bytes(self, run: Pass) -> int:
        """The stream with the busiest block or with the head; positions (int64) and rotary tables stay throughout.

        An encoder or a tower runs before, and what it made stays.
        """
        run = self._own(run)
        stream = run.rows * self.d_model * run.width
        blocks = self.blocks[: run.depth]
        parts = [part for block in blocks for _, part in walk(block)]
        rotary = {part for part in parts if isinstance(part, Rotary)}
        masks = {m[0]: m[1:] for part in parts if isinstance(part, Attention) for m in (part.mask_peak(run),)}
        tables = run.tokens * 8 + sum(part.peak_bytes(run) for part in rotary) + sum(kept for kept, _ in masks.values())
        above = self._above(run)
        normed = above.rows * self.d_model * run.width if self.norm is not None else 0
        norm = self.norm.peak_bytes(above) if self.norm is not None else 0
        after = self.pooler if run.logits == "pooled" else self.head
        head = max(norm, normed + (0 if after is None else after.peak_bytes(above)))
        making = max((stream + made for _, made in masks.values() if made), default=0)
        busiest = max(head, making, self.embedding.peak_bytes(run), *(block.peak_bytes(run) for block in blocks))
        own = tables + stream + busiest
        return max(own, self._peak_before(run, own))

    def _peak_before(self, run: Pass, own: int) -> int:
        """The busiest of an encoder or tower, and of what comes after it beside what it made."""
        source, seen = self.child_run("encoder", run), self.child_run("vision", run)
        if self.encoder is not None and source is not None:
            return max(self.encoder.peak_bytes(source), source.rows * self.encoder.d_model * run.width + own)
        if self.vision is None or seen is None:
            return 0
        made = self.vision.n_tokens * self.d_model if isinstance(self.vision, Vision) else 0
        return max(self.vision.peak_bytes(seen), seen.batch * made * run.width + own)

    def __post_init__(self) -> None:
        require_sizes(self, "max_positions")
        require(self, "name", isinstance(self.name, str), "a name")
        for field in ("blocks", "predictors"):
            found = getattr(self, field)
            few = isinstance(found, tuple) and (field != "blocks" or len(found) > 0) and len(found) <= MOST_BLOCKS
            if not few:
                n = len(found) if isinstance(found, tuple) else found
                least = "1" if field == "blocks" else "none"
                raise InputError("not allowed", field=f"Model.{field}", value=n, allowed=f"{least} to {MOST_BLOCKS}")
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
            masked = all(
                isinstance(p, Attention)
                and p.causal
                and p.chunk is None
                and not isinstance(p.positions, Alibi | RelativeBuckets | RelativeProjection)
                for p in parts
                if isinstance(p, Mixer)
            )
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
                if isinstance(part, CrossAttention):
                    require(self, "blocks", part.d_source == made, f"cross-attention to the encoder's width, {made}")

    def _require_buckets(self) -> None:
        """Layers with relative buckets have as many of them, and as many heads, as the stack's one table."""
        table = None if self.relative is None else (self.relative.n_buckets, self.relative.n_heads)
        asked = {
            (part.positions.n_buckets, part.n_heads)
            for block in self._unlike_blocks()
            for _, part in walk(block)
            if isinstance(part, Attention) and isinstance(part.positions, RelativeBuckets)
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
        return all(part.causal and part.cached for part in parts if isinstance(part, Attention))

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

"""The declarations of a part, from which every cost, module and cache is derived.

A part holds weights, multiplies matrices, and remembers keys and values. Each is declared once, by the part; cost/
folds them, nn/ builds them, generate/ allocates them. What the kernels save for the backward pass and need while they
run is declared in kernels/memory.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from asbuilt.dtypes import BLOCKS
from asbuilt.errors import InputError, near, one_of
from asbuilt.spec import edit

Kind = Literal["embedding", "attention", "ffn", "ssm", "norm", "router", "projector", "head", "other"]
KINDS: tuple[Kind, ...] = ("embedding", "attention", "ffn", "ssm", "norm", "router", "projector", "head", "other")

# The role of a weight; a `table` is looked up row by row, so a step reads only the rows it uses.
Role = Literal["matrix", "bias", "gain", "table"]
# The initialisation of a weight: normal, narrowed with depth (`depth_scaled`) for weights that write to the residual
# stream; or ones or zeros.
Init = Literal["normal", "depth_scaled", "ones", "zeros"]
USUAL_INIT: dict[Role, Init] = {"matrix": "normal", "table": "normal", "gain": "ones", "bias": "zeros"}
# The dimension of a weight that tensor parallelism divides: its outputs, or its inputs, so that devices must sum their
# results.
Split = Literal["out", "in"]

# `fused` is asbuilt's: a fused kernel, except with sinks, soft caps or learned distances. `engine` is a fused kernel
# for these too, and for windows and biases, as in serving engines; nothing here runs it.
Kernel = Literal["reference", "fused", "engine"]
# What a head, or a whole model, gives: logits over the vocabulary, one number for each label, one vector of each
# sequence or image, how near each image is to each text, or the residual stream.
Gives = Literal["logits", "labels", "vector", "similarities", "stream"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter tensor: its shape in PyTorch's order (out, in), role, initialisation and division over devices.

    A weight that is not `learned` is computed when the model is built, not trained, and need not be stored. A `frozen`
    one is stored but not trained. With a `format` it is packed in blocks along its rows, whatever the dtype of the
    others, and frozen. A buffer starts as `fill`, and may hold `whole` numbers, 64 bits each.
    """

    shape: tuple[int, ...]
    role: Role
    init: Init | None = None
    split: Split | None = None
    learned: bool = True
    frozen: bool = False
    format: str | None = None
    fill: float = 0.0
    whole: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape, in bytes if packed."""
        if self.format is None:
            return self.shape
        block, nbytes = BLOCKS[self.format]
        return (*self.shape[:-1], self.shape[-1] // block * nbytes)

    @property
    def start(self) -> Init:
        """Its initialisation: as the part declares, else the default for its role."""
        return self.init or USUAL_INIT[self.role]

    @property
    def size(self) -> int:
        """Number of parameters."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of a model: `batch` sequences of `tokens` new tokens, each after `past` tokens already cached.

    `source` is the number of tokens that an encoder reads; None means the sequence's length after the pass. `images` is
    the number of images per sequence, each with `mutual` tokens of bidirectional attention, with `mutual_in_windows` in
    layers with a window alone, with `mutual_whole` whatever the window; `sounds` that of sounds beside images, where a
    model reads both (one that hears alone counts its sounds as images); with `padded` tokens of padding do not attend
    to each other, with `documents` those of a sequence's documents do not: each sequence has positions and a mask of
    its own. Without `gradients` nothing is saved for the backward pass, whatever is done with the rest of the
    model. `depth` is the number of blocks that run, None for all and the parts after them. `logits` tells for which
    positions the head is computed, or the pooler instead; `kernel` which attention runs; `width` is the bytes of one
    activation. With `predictors` the model's own predictors run too, each over the pass's tokens.
    """

    tokens: int
    batch: int = 1
    past: int = 0
    source: int | None = None
    images: int = 0
    sounds: int = 0
    mutual: int = 0
    mutual_in_windows: bool = False
    mutual_whole: bool = False
    padded: bool = False
    documents: bool = False
    gradients: bool = True
    depth: int | None = None
    logits: Literal["all", "last", "pooled"] = "all"
    kernel: Kernel = "fused"
    width: int = 2
    predictors: bool = False

    @property
    def rows(self) -> int:
        """B*T: the rows of every activation matrix."""
        return self.batch * self.tokens

    @property
    def source_tokens(self) -> int:
        """Tokens that the encoder reads."""
        return self.past + self.tokens if self.source is None else self.source

    def causal_pairs(self, window: int | None = None) -> int:
        """Returns the pairs of a sequence's new tokens with themselves and those before them, within a window if any.

        Tokens whose window is not yet full are paired with everything before them, the others with `window` tokens.
        """
        n = self.tokens if window is None else min(self.tokens, max(0, window - self.past))
        return n * self.past + n * (n + 1) // 2 + (self.tokens - n) * (window or 0)


@dataclass(frozen=True, kw_only=True)
class Product:
    """`n` matrix products (a,b)x(b,c), 2abc FLOPs each.

    `weight` is the name of the part's own weight, or a slash and the absolute path of another part's; None for products
    of two activations (scores). `needed` is the FLOPs with masked pairs skipped. `one_gradient` marks a product of
    which only one factor needs a gradient: with input data, or with a frozen weight; `no_gradient` one that is computed
    without; `caching` one that is needed only with a cache, and so not in training; `recomputed` one that the backward
    pass computes again, since its kernel saves inputs alone.
    """

    name: str
    a: int
    b: int
    c: int
    n: int = 1
    weight: str | None = None
    needed: int | None = None
    one_gradient: bool = False
    no_gradient: bool = False
    caching: bool = False
    recomputed: bool = False

    @property
    def flops(self) -> int:
        """2abc for each of the n products, including masked pairs."""
        return 2 * self.a * self.b * self.c * self.n

    @property
    def causal_flops(self) -> int:
        """FLOPs with masked pairs skipped."""
        return self.flops if self.needed is None else self.needed


@dataclass(frozen=True, kw_only=True)
class CacheFormat:
    """How a cache holds numbers: `each` bytes for one, and `scales` bytes beside a vector, of one token and head.

    A vector takes whole bytes. A state, which is `per` sequence, has no scales: its numbers have `state` bytes.
    """

    each: int | Fraction
    scales: int
    state: int | Fraction

    def vector_bytes(self, width: int) -> int:
        """Returns the bytes of one vector: ceil(width * each) + scales."""
        return math.ceil(width * self.each) + self.scales


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """One cached tensor: `shape` numbers per token, kept for `window` tokens (None: for every token); or per sequence.

    `of` tells whose tokens: the sequence's own, or those of an encoder's source. A tensor `per` sequence is a state, of
    constant size, as are those of a source that always has `n_source` tokens. With `every` n there is one entry for n
    tokens. `stands_for` is the number of key and value numbers
    that are expanded from it, if larger. One new token reads those of `reads` tokens at most (None: of all that are
    kept). Its numbers have the cache's dtype; with `dtype` float32, that or a wider one: errors of a state add up over
    a whole text.
    """

    name: str
    shape: tuple[int, ...]
    window: int | None = None
    of: Literal["sequence", "source"] = "sequence"
    per: Literal["token", "sequence"] = "token"
    stands_for: int | None = None
    reads: int | None = None
    every: int = 1
    n_source: int | None = None
    dtype: Literal["float32"] | None = None

    @property
    def per_token(self) -> Fraction:
        """Numbers per token."""
        return Fraction(self.size, self.every)

    def number_bytes(self, cached: int | Fraction | CacheFormat) -> int | Fraction:
        """Returns the bytes of one of its numbers, with its share of scales, in a cache of `cached`.

        That is a format, or the bytes of a number in one without scales, where states have them too.
        """
        if isinstance(cached, CacheFormat):
            own = cached.state if self.per == "sequence" else Fraction(cached.vector_bytes(self.width), self.width)
        else:
            own = cached
        return own if self.dtype is None else max(4, own)

    @property
    def width(self) -> int:
        """Numbers of one vector: of one head."""
        return self.shape[-1]

    @property
    def expanded(self) -> int | Fraction:
        """Numbers per token if each head's keys and values were cached."""
        return self.per_token if self.stands_for is None else self.stands_for

    @property
    def size(self) -> int:
        """Numbers per token, or of the whole state."""
        return math.prod(self.shape)

    @property
    def grows(self) -> bool:
        """Whether it grows with the sequence's own tokens, until a window is full."""
        return self.of == "sequence" and self.per == "token"

    def tokens_kept(self, tokens: int) -> int:
        """Returns how many of `tokens` are stored; a state is stored once."""
        if self.per == "sequence":
            return 1
        if self.n_source is not None:
            return self.n_source
        tokens //= self.every
        return tokens if self.window is None else min(tokens, self.window)

    def tokens_read(self, run: Pass) -> int:
        """Returns of how many tokens a pass reads or writes it."""
        kept = self.tokens_kept(run.past + run.tokens if self.of == "sequence" else run.source_tokens)
        return kept if self.reads is None or run.tokens > 1 else min(kept, self.reads)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A frozen, keyword-only dataclass that declares what one piece of the model is.

    Subclasses override what applies to them; by default a part holds, multiplies and remembers nothing.
    """

    kind: ClassVar[Kind] = "other"

    def holds(self) -> dict[str, Weight]:
        """Returns this part's own weights by name, children excluded."""
        return {}

    def local_weights(self) -> dict[str, Weight]:
        """Returns the weights that this part's products use: its own, and those of its linear maps."""
        return self.holds()

    def buffers(self) -> dict[str, Weight]:
        """Returns the tensors that are stored, loaded and saved with this part's weights, but are not parameters."""
        return {}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Returns the matrix products of one pass, children excluded."""
        return ()

    def remembers(self) -> tuple[Remembered, ...]:
        """Returns the cached tensors."""
        return ()

    def attends(self) -> tuple[Remembered, ...]:
        """Returns the cached tensors that a pass reads: its own, unless they are another part's."""
        return self.remembers()

    @property
    def billed(self) -> Part:
        """What stands for this part where costs alone matter: the same for parts that differ in other numbers."""
        return self

    def share(self, name: str, run: Pass, replicas: int = 1) -> Fraction:
        """Returns the expected share of this part's weight `name` that one pass reads: all by default.

        Of a weight that is held in `replicas`, each row needs one of them, any as likely; the share is that of each.
        """
        return Fraction(1)

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Returns one device's share of this part, divided over `tensor` devices, and its experts over `expert`.

        A divided weight is smaller along one dimension; others are replicated. By default a part is replicated and only
        its children are divided. Raises InputError if the degree does not divide it.
        """
        return replace(self, **self._shard_children(tensor, expert))

    def _shard_children(self, tensor: int, expert: int) -> dict[str, Any]:
        sharded: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Part):
                sharded[field.name] = value.shard(tensor, expert)
            elif isinstance(value, tuple) and any(isinstance(item, Part) for item in value):
                own = {
                    x: x.shard(tensor, expert) for x in dict.fromkeys(value) if isinstance(x, Part)
                }  # equal ones once
                sharded[field.name] = tuple(own.get(x, x) for x in value)
        return sharded

    def spreads(self) -> dict[str, int]:
        """Returns the weights with one slice per expert along their first dimension, and the number of slices.

        Expert parallelism gives each device whole slices, so `shard` does not change their number.
        """
        return {}

    def child_run(self, name: str, run: Pass) -> Pass | None:
        """Returns the pass as the child `name` sees it, which may differ from this part's own (norms per head).

        None if the child does not run in this pass.
        """
        return run

    def children(self) -> Iterator[tuple[str, Part]]:
        """Yields (name, part) for the parts directly below; a name is one or more path segments."""
        return iter(self._below)

    @cached_property
    def _below(self) -> tuple[tuple[str, Part], ...]:
        """The default result of `children`, cached, since every fold walks the parts."""
        found: list[tuple[str, Part]] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Part):
                found.append((field.name, value))
            elif isinstance(value, tuple):
                found += ((f"{field.name}.{i}", item) for i, item in enumerate(value) if isinstance(item, Part))
        return tuple(found)

    @cached_property
    def _all_below(self) -> tuple[tuple[str, Part], ...]:
        """The paths of all parts below, cached: equal blocks may be one object."""
        found: list[tuple[str, Part]] = []
        for name, child in self.children():
            found.append((name, child))
            found += [(f"{name}.{path}", below) for path, below in child._all_below]
        return tuple(found)

    @cached_property
    def _stored_parameters(self) -> tuple[tuple[str, Weight, Part], ...]:
        """What `stored_weights` yields but for buffers, cached: equal blocks may be one object."""
        return self._gathered({name: weight for name, weight in self.holds().items() if weight.learned}, buffers=False)

    @cached_property
    def _stored_buffers(self) -> tuple[tuple[str, Weight, Part], ...]:
        """What `buffers` yields."""
        return self._gathered(self.buffers(), buffers=True)

    def _gathered(self, own: dict[str, Weight], *, buffers: bool) -> tuple[tuple[str, Weight, Part], ...]:
        found: list[tuple[str, Weight, Part]] = [(name, weight, self) for name, weight in own.items()]
        for name, child in (*self.children(), *self.extras()):
            if child.borrows is None:
                held = child._stored_buffers if buffers else child._stored_parameters
                found += [(f"{name}.{path}", weight, owner) for path, weight, owner in held]
        return tuple(found)

    def at(self, path: str) -> Part:
        """Returns the part at a path of `walk`, "blocks.3.attention.body"; raises InputError for an unknown path."""
        return edit.at(self, path)

    def edit(self, path: str, /, **changes: Any) -> Self:  # noqa: ANN401  # fields' values
        """Returns this part with fields changed in the parts at `path`, in which `*` stands for any one segment.

        `spec.edit("blocks.*.attention.body", window=128)`, `spec.edit("blocks.0-3.ffn.body", d_ff=512)`. Raises
        InputError for an unknown path or field, and for values that the parts refuse.
        """
        return edit.edit(self, path, changes)

    def replace_where(
        self,
        which: type[Part] | tuple[type[Part], ...] | Callable[[str, Part], bool],
        change: Part | Callable[[Part], Part] | None = None,
        /,
        **changes: Any,  # noqa: ANN401  # fields' values
    ) -> Self:
        """Returns this part with all parts changed that are of a type, or for which `which(path, part)` is true.

        `change` is a replacement, or a function from a part to its replacement; otherwise `changes` are fields.
        Children are changed before their owners. Raises InputError as `edit` does, and if nothing matches.
        """
        return edit.replace_where(self, which, change, changes)

    def rereads(self) -> dict[str, Weight]:
        """Weights of other parts that it reads once more in each pass, by their paths in the whole model."""
        return {}

    @property
    def lends(self) -> str | None:
        """The name under which later parts of the stack use the weights of this one and of those below it."""
        return None

    @property
    def borrows(self) -> str | None:
        """The name of the earlier part whose weights this one, which is otherwise equal, uses; None for its own.

        Parts that borrow multiply and remember as usual, but hold nothing; each use reads the weights again.
        """
        return None

    @cached_property
    def holders(self) -> dict[str, str]:
        """For the path of each part below this one that borrows its weights the path of the one that holds them."""
        lent: dict[str, str] = {}
        found: dict[str, str] = {}
        at, of = "", ""  # the part that borrows, and its lender
        for path, below in walk(self):
            if below.lends is not None:
                lent[below.lends] = path
            if below.borrows is not None and below.borrows in lent:
                at, of = path, lent[below.borrows]
            if at and (path == at or path.startswith(f"{at}.")):
                found[path] = of + path[len(at) :]
        return found

    def extras(self) -> Iterator[tuple[str, Part]]:
        """Yields (name, part) for parts that are stored with this one, but run only in a pass with `predictors`.

        They are built, loaded and saved like children, but in all other costs count only as stored.
        """
        return iter(())


def walk(part: Part, path: str = "") -> Iterator[tuple[str, Part]]:
    """Yields (path, part) for `part` and everything below it, parents first; the root's path is empty."""
    yield path, part
    yield from ((f"{path}.{name}", below) for name, below in part._all_below) if path else part._all_below


def walk_stored(part: Part, path: str = "") -> Iterator[tuple[str, Part]]:
    """Yields (path, part) as `walk` does, including extras and the parts below them."""
    yield path, part
    for name, child in (*part.children(), *part.extras()):
        yield from walk_stored(child, f"{path}.{name}" if path else name)


def walk_held(part: Part, path: str = "") -> Iterator[tuple[str, Part]]:
    """Yields (path, part) as `walk` does, but for parts that borrow their weights."""
    if part.borrows is not None:
        return
    yield path, part
    for name, child in part.children():
        yield from walk_held(child, f"{path}.{name}" if path else name)


def runs(part: Part, run: Pass, path: str = "") -> Iterator[tuple[str, Part, Pass]]:
    """Yields (path, part, the pass as that part sees it), in the order of `walk`, without parts that do not run."""
    yield path, part, run
    for name, child in (*part.children(), *(part.extras() if run.predictors else ())):
        seen = part.child_run(name, run)
        if seen is not None:
            yield from runs(child, seen, f"{path}.{name}" if path else name)


def weights(part: Part) -> Iterator[tuple[str, Weight, Part]]:
    """Yields (full path, weight, owner) for every parameter tensor below `part`, extras excluded: as built."""
    for path, owner in walk_held(part):
        for name, weight in owner.holds().items():
            yield (f"{path}.{name}" if path else name), weight, owner


def divided(part: Part, field: str, degree: int) -> int:
    """Returns a field of `part` divided by the degree; raises InputError naming it if that is not whole."""
    value = getattr(part, field)
    require(part, field, value % degree == 0, f"a multiple of {degree}, the number of devices that share it")
    return value // degree


# A divided vocabulary is padded to a multiple of this, as in vLLM and SGLang (Megatron-LM uses twice as many).
VOCABULARY_PADDING = 64


def divided_vocabulary(n_vocab: int, degree: int) -> int:
    """Returns the rows of a vocabulary that one of `degree` devices holds.

    A vocabulary that the degree does not divide is padded to the next multiple of 64 and of the degree; one that is
    smaller than its padding is replicated.
    """
    if n_vocab % degree == 0:
        return n_vocab // degree
    multiple = math.lcm(VOCABULARY_PADDING, degree)
    return min(n_vocab, math.ceil(n_vocab / multiple) * multiple // degree)


def buffers(part: Part) -> Iterator[tuple[str, Weight, Part]]:
    """Yields (full path, buffer, owner) for every buffer below `part`, including those of extras."""
    if part.borrows is None:
        yield from part._stored_buffers


def stored_weights(part: Part) -> Iterator[tuple[str, Weight, Part]]:
    """Yields (full path, weight, owner) for all that a checkpoint stores: parameters, extras, buffers."""
    if part.borrows is None:
        yield from part._stored_parameters
        yield from part._stored_buffers


def require(part: Part, field: str, ok: bool, allowed: str, fix: str = "") -> None:
    """Raises InputError naming `field` of `part` unless `ok`."""
    if not ok:
        name = type(part).__name__
        raise InputError(field=f"{name}.{field}", value=getattr(part, field), allowed=allowed, fix=fix)


# A dimension beyond this is a mistake or an attack: no published model has a vector or a table of 2^31 rows.
LARGEST_SIZE = 2**31 - 1
# Blocks of one stack. Published models have at most 126 (Llama 3.1 405B), a paper 1,000 (DeepNet, arXiv 2203.00555).
MOST_BLOCKS = 1024


def is_size(value: object) -> bool:
    """Returns whether `value` is a whole number from 1 to LARGEST_SIZE."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_SIZE


def require_sizes(part: Part, *names: str) -> None:
    """Raises InputError unless each named field is a whole number from 1 to LARGEST_SIZE."""
    for name in names:
        require(part, name, is_size(getattr(part, name)), "a whole number from 1 to 2^31-1")


def require_names(part: Part, *names: str) -> None:
    """Raises InputError unless each named field is an identifier, or None."""
    for name in names:
        value = getattr(part, name)
        require(part, name, value is None or (isinstance(value, str) and value.isidentifier()), "a name, or none")


def require_number(part: Part, name: str, *, above: float = 0.0) -> None:
    """Raises InputError unless the named field is a finite number greater than `above`."""
    value = getattr(part, name)
    require(part, name, is_finite(value) and value > above, f"a finite number above {above:g}")


def is_finite(value: object) -> bool:
    """Returns whether `value` is a number that a float can represent, and not a bool."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= sys.float_info.max
    return isinstance(value, float) and math.isfinite(value)


def require_flags(part: Part, *names: str) -> None:
    """Raises InputError unless each named field is true or false."""
    for name in names:
        require(part, name, isinstance(getattr(part, name), bool), "true or false")


def require_format(part: Part, name: str, width: int) -> None:
    """Raises InputError unless the named field is None, or a block format that divides rows of `width` numbers."""
    value = getattr(part, name)
    if value is None:
        return
    if not isinstance(value, str) or value not in BLOCKS:  # hints are for mistakes: they take a while
        fix = near(value, BLOCKS) if isinstance(value, str) else ""
        require(part, name, False, one_of(BLOCKS), fix)
    block = BLOCKS[value][0]
    require(
        part, name, width % block == 0, f"a format whose blocks divide rows of {width}; blocks of {value} are {block}"
    )


def require_choice(part: Part, name: str, allowed: tuple[str, ...]) -> None:
    """Raises InputError unless the named field is one of `allowed`."""
    require(part, name, getattr(part, name) in allowed, one_of(allowed))

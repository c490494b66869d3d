"""The costs of a model: folds over its parts' declarations, keyed by path. There are no formulas of models here."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby

from asbuilt.cost.dtypes import cache_format
from asbuilt.cost.folded import Held
from asbuilt.cost.mixtures import held as find_held
from asbuilt.kernels.memory import Saved, memory
from asbuilt.spec.block import Block
from asbuilt.spec.linear import Map, Mapped
from asbuilt.spec.model import Model
from asbuilt.spec.part import (
    KINDS,
    Kind,
    Part,
    Pass,
    Product,
    runs,
    stored_weights,
    walk,
    walk_held,
    walk_stored,
    weights,
)

BLOCK = re.compile(r"(.*?\.)??blocks\.\d+(?=\.|$)")
# The numbers of equal neighbours, of which the first stands for all.
FIRST = re.compile(r"(\d+)-\d+")
# Backward has two more products per product: one for the gradient of each factor.
TRAINING_FACTOR = 3


def exact(value: Fraction | int) -> int | float:
    """Returns an int if `value` is whole, else the nearest float."""
    return int(value) if Fraction(value).denominator == 1 else float(value)


def parameters(spec: Part) -> dict[Kind, int]:
    """Returns the number of parameters of each kind of part; a tied head has none of its own."""
    counts: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for _, weight, owner in weights(spec):
        counts[owner.kind] += weight.size
    return counts


def total_parameters(spec: Part) -> int:
    """Returns the number of parameters as built."""
    return sum(weight.size for _, weight, _ in weights(spec))


def active_parameters(spec: Part, *, tables: bool = True) -> int:
    """Returns the number of parameters that one token uses: of experts the chosen ones, of tables all rows.

    Shared experts, routers, norms, embedding and head count in full; buffers do not, as they are not parameters.
    Without `tables`, tables that are only looked up do not count, as in many model cards. A tied head multiplies its
    table, which therefore counts.
    """
    one = Pass(tokens=1)
    multiplied = set() if tables else {product.weight_path for product in products(spec, one)}
    return int(
        sum(
            weight.size * part.share(name, one)
            for path, part in walk_held(spec)
            for name, weight in part.holds().items()
            if tables or weight.role != "table" or (f"{path}.{name}" if path else name) in multiplied
        )
    )


def stored_extra(spec: Part) -> dict[str, int]:
    """Returns how many numbers a checkpoint stores besides the parameters as built, by kind.

    Parameters that are computed rather than stored count as negative.
    """
    return {
        "computed": -sum(weight.size for _, weight, _ in weights(spec) if not weight.learned),
        "buffers": sum(buffer.size for _, part in walk_held(spec) for buffer in part.buffers().values()),
        "predictors": sum(weight.size for _, extra in spec.extras() for _, weight, _ in stored_weights(extra)),
    }


def weight_bytes(spec: Part, dtype: str | Held) -> int:
    """Returns the bytes of all weights at `dtype`, rounded up.

    It is a plain dtype, a GGUF block format, a mixture such as q4_k_m, or a function that returns a weight's bytes.
    """
    held = find_held(spec, dtype) if isinstance(dtype, str) else dtype
    return math.ceil(sum(held(path, weight, owner) for path, weight, owner in weights(spec)))


@dataclass(frozen=True, kw_only=True)
class PathProduct:
    """One product of one pass, with the path of its part."""

    path: str
    product: Product

    @property
    def weight_path(self) -> str | None:
        """The full path of the product's weight; None for products of activations."""
        name = self.product.weight
        if name is None or name.startswith("/"):
            return name and name[1:]
        return f"{self.path}.{name}" if self.path else name


def products(spec: Part, run: Pass) -> Iterator[PathProduct]:
    """Yields every matrix product of one pass."""
    held_by = spec.holders
    for path, part, seen in runs(spec, run):
        for product in part.multiplies(seen):
            if path in held_by and product.weight is not None:
                product = replace(product, weight=f"/{held_by[path]}.{product.weight}")
            yield PathProduct(path=path, product=product)


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one pass: of weight products, of attention scores and weighted sums in full, and of unmasked pairs.

    `one_gradient` are those of products of which only one factor needs a gradient (`Product.one_gradient`),
    `no_gradient` those that are computed without gradients, `caching` those needed only with a cache, `recomputed`
    those that the backward pass computes again.
    """

    products: int
    scores: int
    scores_causal: int
    one_gradient: int = 0
    no_gradient: int = 0
    no_gradient_causal: int = 0
    caching: int = 0
    recomputed: int = 0

    @property
    def forward(self) -> int:
        """FLOPs with full scores, as in kernels that do not skip masked pairs."""
        return self.products + self.scores

    @property
    def forward_causal(self) -> int:
        """FLOPs with masked pairs skipped."""
        return self.products + self.scores_causal

    @property
    def training(self) -> int:
        """Forward with full scores, plus twice that for backward, or once if only one factor needs a gradient.

        What the kernels recompute in the backward pass counts once more.
        """
        return self._backward(self.forward, self.no_gradient)

    @property
    def training_causal(self) -> int:
        """As `training`, with masked pairs skipped."""
        return self._backward(self.forward_causal, self.no_gradient_causal)

    def _backward(self, forward: int, no_gradient: int) -> int:
        trained = TRAINING_FACTOR * (forward - self.caching) + self.recomputed
        return trained - self.one_gradient - (TRAINING_FACTOR - 1) * no_gradient


def flops(spec: Part, run: Pass) -> Flops:
    """Returns the FLOPs of one pass, 2abc for each product (a,b)x(b,c)."""
    all_products = [p.product for p in products(spec, run)]
    scores = [p for p in all_products if p.weight is None]
    alone = [p for p in all_products if p.no_gradient and not p.caching]
    return Flops(
        products=sum(p.flops for p in all_products if p.weight is not None),
        scores=sum(p.flops for p in scores),
        scores_causal=sum(p.causal_flops for p in scores),
        one_gradient=sum(p.flops for p in all_products if p.one_gradient),
        no_gradient=sum(p.flops for p in alone),
        no_gradient_causal=sum(p.causal_flops for p in alone),
        caching=sum(p.flops for p in all_products if p.caching),
        recomputed=sum(p.flops for p in all_products if p.recomputed and not p.caching),
    )


@dataclass(frozen=True, kw_only=True)
class CacheBill:
    """Cache bytes of one sequence.

    `per_token` is the growth per token while windows are not full, `unbounded` once they are; `window` is the size of
    full windows, `fixed` is independent of length. `per_source_token` is per token that an encoder read; `at_seq`
    includes these. `expanded` is the growth per token if every head's keys and values were cached in place of latents.
    """

    per_token: int
    unbounded: int
    window: int
    fixed: int
    per_source_token: int
    expanded: int
    at_seq: int


def cache(
    spec: Part,
    tokens: int,
    dtype: str,
    source: int | None = None,
    *,
    predictors: bool = False,
    state: str | None = None,
) -> CacheBill:
    """Returns the cache bytes of one sequence of `tokens` tokens in `dtype`, with states in `state`: `cache_format`.

    `source` is the number of the encoder's tokens, if it reads a text; None means as many. With `predictors` those of
    the model's own predictors are counted too.
    """
    each = cache_format(dtype, state)
    everything = [r for _, part in (walk_stored if predictors else walk)(spec) for r in part.remembers()]
    remembered = [r for r in everything if r.of == "sequence"]
    growing = [r for r in remembered if r.grows]
    sources = [r for r in everything if r.of == "source"]
    read = sum(r.size * r.number_bytes(each) for r in sources if r.n_source is None)
    heard = sum(r.size * r.n_source * r.number_bytes(each) for r in sources if r.n_source is not None)
    kept = sum(r.size * r.tokens_kept(tokens) * r.number_bytes(each) for r in remembered)
    return CacheBill(
        per_token=math.ceil(sum(r.per_token * r.number_bytes(each) for r in growing)),
        unbounded=math.ceil(sum(r.per_token * r.number_bytes(each) for r in growing if r.window is None)),
        window=math.ceil(sum(r.size * r.window * r.number_bytes(each) for r in growing if r.window is not None)),
        fixed=math.ceil(heard + sum(r.size * r.number_bytes(each) for r in remembered if r.per == "sequence")),
        per_source_token=math.ceil(read),
        expanded=math.ceil(sum(r.expanded * r.number_bytes(each) for r in growing)),
        at_seq=math.ceil(kept + heard + read * (tokens if source is None else source)),
    )


def saved_tensors(spec: Part, run: Pass, path: str = "") -> dict[str, Saved]:
    """Returns every tensor that autograd saves in one forward pass, by path and name, shared ones once per stack."""
    kept: dict[str, Saved] = {}
    reads: dict[str, str] = {}  # parts that share the input of another part, by path
    stacks: list[str] = []  # paths of the models around the current part
    of_heads: set[str] = set()
    for at, part, seen in runs(spec, run, path):
        stacks = [stack for stack in stacks if at.startswith(stack)]
        if isinstance(part, Model):
            stacks.append(f"{at}." if at else "")
        computed = memory(part)
        below = f"{at}." if at else ""
        for second, first in computed.same_input():
            read = f"{below}{first}" if first else at
            reads[f"{below}{second}"] = reads.get(read, read)
        of_heads.update(f"{at}.{name}" if at else name for name in computed.of_heads())
        for tensor in computed.saves(seen) if seen.gradients else ():
            tensor = replace(tensor, divided="width") if at in of_heads and tensor.divided != "none" else tensor
            where = reads.get(at, at) if tensor.name == "input" else at
            stack = stacks[-1] if stacks else ""
            kept[f"{stack}:{tensor.name}" if tensor.shared else f"{where}:{tensor.name}"] = tensor
    return kept


def recomputed_tensors(spec: Part, path: str = "") -> set[str]:
    """Returns the keys of `saved_tensors` that selective checkpointing drops, for any kernel."""
    keys: set[str] = set()
    for at, part in walk(spec, path):
        for name in memory(part).recomputes():
            below, _, tensor = name.rpartition(":")
            keys.add(f"{at}.{below}:{tensor}" if below and at else f"{below or at}:{tensor}")
    return keys


def loss_saves(spec: Model, run: Pass) -> tuple[Saved, ...]:
    """Returns what cross-entropy over float32 logits saves: log-probabilities and targets; nothing without logits."""
    rows, classes = _logits(spec, replace(run, logits="all"))
    if not classes:
        return ()
    return (
        Saved(name="log-probabilities", size=rows * classes, width="wide"),
        Saved(name="targets", size=rows, width="int64"),
        Saved(name="total weight", size=1, width="wide"),
    )


def logits_bytes(spec: Model, run: Pass) -> int:
    """Returns the bytes of the logits of one pass, or similarities, in the pass's dtype; 0 without a language head."""
    rows, classes = _logits(spec, run)
    if spec.gives == "similarities":
        rows, classes = run.batch * run.images, run.batch
    return rows * classes * run.width


def _logits(spec: Model, run: Pass) -> tuple[int, int]:
    """Returns the rows and columns of the logits: per token, or per image."""
    head = spec.head
    if run.logits == "pooled" or head is None or not head.n_scores:
        return 0, 0
    return run.rows if run.logits == "all" and head.per_token else run.batch, head.n_scores


@dataclass(frozen=True, kw_only=True)
class SavedBill:
    """Bytes saved for the backward pass: all, without recomputed tensors, or only the blocks' inputs.

    `selective` excludes what the parts of a block can recompute (`Memory.recomputes`). `checkpointed` counts the
    blocks' inputs and the tensors outside the blocks; both include what is `lent` to blocks that are repeated. `block`
    is what the largest block saves, held once while it is recomputed.
    """

    all: int
    selective: int
    checkpointed: int
    lent: int
    block: int
    loss: int


def saved(spec: Model, run: Pass) -> SavedBill:
    """Returns the saved bytes of one training step's forward pass; the loss is counted separately."""
    kept = saved_tensors(spec, run)
    own: dict[str, int] = {}
    dropped = sum(kept[key].nbytes(run.width) for key in recomputed_tensors(spec) & kept.keys())
    for key, tensor in kept.items():
        block = BLOCK.match(key.partition(":")[0])
        where = block.group() if block else ""
        own[where] = own.get(where, 0) + tensor.nbytes(run.width)
    inputs = sum(
        seen.rows * part.stream_width * run.width for _, part, seen in runs(spec, run) if isinstance(part, Block)
    )
    together: dict[str, int] = {}
    for path, part, seen in runs(spec, run) if run.gradients else ():
        stack = path.partition("blocks.")[0]
        together |= {f"{stack}:{name}": size for name, size in memory(part).lent_bytes(seen).items()}
    lent = sum(together.values())
    return SavedBill(
        all=sum(own.values()),
        selective=sum(own.values()) - dropped + lent,
        checkpointed=inputs + own.get("", 0) + lent,
        lent=lent,
        block=max(size for block, size in own.items() if block),
        loss=sum(s.nbytes(run.width) for s in loss_saves(spec, run)),
    )


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Memory traffic of one step, by component: weights read once, cache read and written, table rows looked up."""

    weights: dict[Kind, int]
    lookups: int
    cache: int

    @property
    def total(self) -> int:
        """The total."""
        return sum(self.weights.values()) + self.lookups + self.cache


def moved(spec: Part, run: Pass, dtype: str | Held, kv_dtype: str, state: str | None = None) -> Moved:
    """Returns the memory traffic of one pass, without activations.

    A weight is read once for each part that uses it, regardless of the number of sequences, and only the experts that
    are expected to be used; of a table only the looked-up rows, unless a tied head multiplies it. Cached keys and
    values are read once per sequence and new ones are written. `dtype` is as in `weight_bytes`; `kv_dtype` and `state`
    are as in `cache_format`.
    """
    held, kv = find_held(spec, dtype) if isinstance(dtype, str) else dtype, cache_format(kv_dtype, state)
    multiplied = {p.weight_path for p in products(spec, run)}
    by_kind: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    lookups, held_by = Fraction(0), spec.holders
    for path, owner, seen in runs(spec, run):
        at = held_by.get(path, path)
        for name, weight in owner.holds().items():
            full = f"{at}.{name}" if at else name
            nbytes = held(full, weight, owner)
            if weight.role == "table":
                lookups += nbytes / weight.shape[0] * seen.rows
            else:
                share = owner.share(name, seen)
                by_kind[owner.kind] += math.ceil(nbytes if share == 1 else nbytes * share)
            if weight.role == "table" and full in multiplied:
                by_kind["head"] += math.ceil(nbytes)
        for full, weight in owner.rereads().items():
            by_kind[owner.kind] += math.ceil(held(full, weight, owner))
    everything = walk_stored(spec) if run.predictors else walk(spec)
    remembered = [r for _, part in everything for r in part.attends()]
    read = sum(r.size * r.tokens_read(run) * r.number_bytes(kv) for r in remembered)
    return Moved(weights=by_kind, lookups=math.ceil(lookups), cache=math.ceil(run.batch * read))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the costs: a part, `count` times if equal neighbours are folded; figures are for one of them."""

    path: str
    part: str
    kind: Kind
    parameters: int
    flops_per_token: int | float
    cache_bytes_per_token: int
    count: int


def rows(spec: Model, run: Pass, kv_dtype: str) -> list[Row]:
    """Returns the costs by path, for parts that hold, multiply or remember anything; equal blocks folded.

    Parts that do not run are included, without products.
    """
    size = cache_format(kv_dtype)
    lines: list[Row] = []
    held_by = spec.holders
    for path, part, seen, count in _folded(spec, run):
        borrowed = FIRST.sub(r"\1", path) in held_by
        held, remembered = {} if borrowed else part.local_weights(), part.remembers()
        multiplied = () if seen is None else part.multiplies(seen)
        kinds: dict[str, Kind] = {"": part.kind}
        kinds |= _maps_of_other_kinds(part)
        for map_name, kind in kinds.items():
            own = [weight.size for name, weight in held.items() if _map_of(kinds, name) == map_name]
            products = [product for product in multiplied if _map_of(kinds, product.weight or "") == map_name]
            kept = () if map_name else remembered
            if not (own or products or kept):
                continue
            lines.append(
                Row(
                    path=f"{path}.{map_name}" if map_name else path,
                    part=type(part.maps[map_name] if map_name else part).__name__,  # type: ignore[attr-defined]
                    kind=kind,
                    parameters=sum(own),
                    flops_per_token=exact(Fraction(sum(p.flops for p in products), run.rows)),
                    cache_bytes_per_token=math.ceil(sum(r.per_token * r.number_bytes(size) for r in kept if r.grows)),
                    count=count,
                )
            )
    return lines


def _maps_of_other_kinds(part: Part) -> dict[str, Kind]:
    """Returns the linear maps of a part that count under another kind than the part itself."""
    maps = part.maps if isinstance(part, Mapped) else {}
    return {name: one.kind for name, one in maps.items() if one.kind != part.kind}


def _map_of(maps: Container[str], weight: str) -> str:
    """Returns which of these maps holds the weight of this name, empty for none."""
    name = weight.partition(".")[0]
    return name if name in maps else ""


def _folded(
    part: Part, run: Pass | None, path: str = "", count: int = 1
) -> Iterator[tuple[str, Part, Pass | None, int]]:
    """Yields (path, part, run, count) as `runs` does, with consecutive blocks of equal costs as one, `blocks.0-31`.

    The run is None for parts that do not run.
    """
    yield path, part, run, count
    below = [
        (name, child, None if run is None else part.child_run(name, run))
        for name, child in part.children()
        if not isinstance(child, Map)  # covered by the part whose map it is
    ]
    for _, group in groupby(below, lambda one: (one[1].billed, one[2]) if isinstance(one[1], Block) else one[0]):
        (name, child, seen), *others = group
        label = f"{name}-{others[-1][0].split('.')[1]}" if others else name
        yield from _folded(child, seen, f"{path}.{label}" if path else label, count * (1 + len(others)))

"""The counted tree of one device's part of a model, and fast folds over it.

`cost.weight_bytes`, `cost.cache`, `cost.moved` and `cost.flops` walk every part of a model, but a plan needs hundreds
of passes. Here the tree is built once with equal parts counted, each part beside the device's share of it, which
changes no figure. Serving plans fold it here, training plans in `plan/train/shares.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal

from asbuilt.spec.part import CacheFormat, Kind, Part, Pass, Product, Remembered, Weight

Number = int | Fraction
# Passes whose costs are cached, per model and placement.
MOST_KEPT = 1000
# returns the bytes of a weight from its path, the weight, and the part that owns it
Held = Callable[[str, Weight, Part], Fraction]


Side = Literal["all", "experts", "dense"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Node:
    """A part that occurs `count` times; `path` is the first one's, `own` is one device's share of it.

    A `borrowed` part uses the weights of another. On `side` "experts" are routed experts, on "dense" all else.
    """

    path: str
    name: str
    whole: Part
    own: Part
    count: int
    children: tuple[Node, ...]
    borrowed: bool = False
    side: Side = "all"

    def has(self, weight: str | None) -> bool:
        """Returns whether the part's weight of this name, or what is of no weight, is here."""
        return self.side == "all" or (weight in self.own.spreads()) == (self.side == "experts")

    def sided(self, side: Side) -> Node:
        """Returns the node with one side of it and of all below."""
        return replace(self, side=side, children=tuple(child.sided(side) for child in self.children))

    def runs(self, run: Pass) -> Iterator[tuple[Node, Pass]]:
        """Yields every node with the pass as its part sees it, parents first."""
        yield self, run
        for child in self.children:
            seen = self.own.child_run(child.name, run)
            if seen is not None:
                yield from child.runs(seen)

    def times(self, times: Callable[[str], int]) -> Node:
        """Returns the node with the count of each child multiplied by `times(name)`, dropping those with 0."""
        kept = ((child, times(child.name)) for child in self.children)
        return replace(self, children=tuple(child.scaled(n) for child, n in kept if n))

    def scaled(self, factor: int) -> Node:
        """Returns the node with all counts below it multiplied by `factor`."""
        if factor == 1:
            return self
        children = tuple(child.scaled(factor) for child in self.children)
        return replace(self, count=factor * self.count, children=children)

    def below(self) -> Iterator[Node]:
        """Yields every node, parents first, including those that do not run in some passes."""
        yield self
        for child in self.children:
            yield from child.below()


def tree(whole: Part, own: Part, path: str = "", name: str = "", count: int = 1, borrowed: bool = False) -> Node:
    """Returns the tree below `whole`, of which one device has `own`; equal children of one field are merged."""
    borrowed = borrowed or whole.borrows is not None
    groups: dict[tuple[str, Part], list[tuple[str, Part]]] = {}
    for (child_name, child), (_, own_child) in zip(whole.children(), own.children(), strict=True):
        groups.setdefault((child_name.split(".")[0], child), []).append((child_name, own_child))
    children = []
    for (_, child), group in groups.items():
        first, own_child = group[0]
        below = f"{path}.{first}" if path else first
        children.append(tree(child, own_child, below, first, count * len(group), borrowed))
    return Node(path=path, name=name, whole=whole, own=own, count=count, children=tuple(children), borrowed=borrowed)


@dataclass(frozen=True, kw_only=True, eq=False)
class Census:
    """A part with equal items of its tuples merged, `small`; `order[field][i]` is the merged index of item i."""

    small: Part
    order: dict[str, tuple[int, ...]]


def census(part: Part) -> Census:
    """Returns the census of `part`; maxima over items are the same in `small`, which has as many blocks as it needs."""
    once, order = {}, {}
    for f in fields(part):
        value = getattr(part, f.name)
        if isinstance(value, tuple) and len(value) > 1 and all(isinstance(item, Part) for item in value):
            number: dict[Part, int] = {}
            order[f.name] = tuple(number.setdefault(item, len(number)) for item in value)
            least = getattr(part, "least_blocks", 1) if f.name == "blocks" else 1
            once[f.name] = tuple(number) + value[-1:] * (least - len(number))
    return Census(small=replace(part, **once), order=order)


@dataclass(frozen=True, kw_only=True)
class CacheNumbers:
    """The numbers of one sequence's cache: those in the cache's dtype, and those that are float32 in any narrower."""

    cached: int
    float32: int
    vectors: tuple[tuple[int, int], ...] = ()
    """Of the cached ones those of tokens: width of a vector, and how many vectors."""
    states: int = 0
    """Of the cached ones those of states."""

    def nbytes(self, each: Number | CacheFormat) -> Number:
        """Returns their bytes, with `each` for a number in the cache's dtype."""
        if not isinstance(each, CacheFormat):
            return self.cached * each + self.float32 * max(4, each)
        tokens = sum(count * each.vector_bytes(width) for width, count in self.vectors)
        return tokens + self.states * each.state + self.float32 * max(4, each.state)


@dataclass(kw_only=True)
class RunCost:
    """The costs of one kind of part in one pass: bytes of weights, looked-up rows and cache; FLOPs."""

    weights: int = 0
    lookups: Number = 0
    cache: Number = 0
    products: Number = 0
    scores: Number = 0
    scores_causal: Number = 0

    def grown(self, two: RunCost, batch: int) -> RunCost:
        """Returns the cost of `batch` sequences, extrapolated from this one, of one, and that of two; weights stay."""
        more = batch - 1
        return RunCost(
            weights=self.weights,
            lookups=self.lookups + more * (two.lookups - self.lookups),
            cache=self.cache + more * (two.cache - self.cache),
            products=self.products + more * (two.products - self.products),
            scores=self.scores + more * (two.scores - self.scores),
            scores_causal=self.scores_causal + more * (two.scores_causal - self.scores_causal),
        )

    @property
    def nbytes(self) -> int:
        """Total bytes moved."""
        return self.weights + math.ceil(self.lookups) + math.ceil(self.cache)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One weight of a node: its bytes on this device, for each of `count`; no node if it is another stage's.

    A step reads it for each of `reads`: one that parts share is held once, and read for every use.
    """

    name: str
    weight: Weight
    nbytes: Number
    count: int
    reads: int
    kind: Kind
    node: Node | None
    path: str


def _numberless(path: str) -> str:
    """Returns a path without the numbers of items."""
    return ".".join(name for name in path.split(".") if not name.isdigit())


def _whole(number: Fraction) -> Number:
    """Returns whole numbers as int, which is ten times as fast."""
    return number.numerator if number.denominator == 1 else number


class Folded:
    """The folds over a counted tree, with the bytes of weights from `held`.

    Experts are spread over `expert` devices, in `groups` groups with separate batches, with `redundant` further
    replicas, as even as can be, over which an expert's rows are divided.
    """

    def __init__(self, root: Node, held: Held, *, expert: int = 1, groups: int = 1, redundant: int = 0) -> None:
        self.root = root
        self.held, self.expert, self.groups, self.redundant = held, expert, groups, redundant
        self.nodes = list(self.root.below())
        self._of_few: dict[
            tuple[Pass, Number | CacheFormat], tuple[dict[Kind, RunCost], dict[Kind, RunCost], dict[Node, Pass]]
        ] = {}

    @cached_property
    def stored(self) -> list[Stored]:
        """Every weight, including another stage's weights that are multiplied here too."""
        lent = set(self._holders.values())
        found: list[Stored] = []
        held: set[str] = set()  # of those that parts share; the first use on this stage holds them
        for node in self.nodes:
            for entry in self._own(node):
                if node.borrowed or node.path in lent:
                    entry = replace(entry, count=0 if entry.path in held else 1)
                    held.add(entry.path)
                found.append(entry)
        here = {entry.path for entry in found}
        # of equal parts the first one's path stands for all
        merged = {(e.node.whole, _numberless(e.path)) for e in found if e.node is not None and e.count > 1}
        for path in self.multiplied_elsewhere - here:
            whole = _find(self.root.whole, path)
            if (whole[0], _numberless(path)) in merged:
                continue
            own = _find(self.root.own, path)
            nbytes = self.held(path, whole[1], whole[0]) * Fraction(own[1].size, whole[1].size)
            found.append(
                Stored(
                    name=path,
                    weight=own[1],
                    nbytes=_whole(nbytes),
                    count=1,
                    reads=1,
                    kind="head",
                    node=None,
                    path=path,
                )
            )
        return found

    @cached_property
    def _holders(self) -> dict[str, str]:
        """The paths of parts whose weights others use, by the paths of those."""
        return self.root.whole.holders

    def _own(self, node: Node) -> Iterator[Stored]:
        wholes, spread = node.whole.holds(), node.own.spreads()
        at = self._holders.get(node.path, node.path)
        for name, weight in node.own.holds().items():
            if not node.has(name):
                continue
            path = f"{at}.{name}" if at else name
            whole = wholes[name]
            nbytes = self.held(path, whole, node.whole)
            if weight.size != whole.size:
                nbytes *= Fraction(weight.size, whole.size)
            if self.expert > 1 and name in spread:
                nbytes *= Fraction(spread[name] + self.redundant, spread[name] * self.expert)
            yield Stored(
                name=name,
                weight=weight,
                nbytes=_whole(nbytes),
                count=node.count,
                reads=node.count,
                kind=node.whole.kind,
                node=node,
                path=path,
            )

    @cached_property
    def multiplied_elsewhere(self) -> set[str]:
        """Full paths of weights that one part multiplies and another one owns."""
        return {
            product.weight[1:]
            for node, run in self.root.runs(Pass(tokens=1))
            for product in node.own.multiplies(run)
            if product.weight is not None and product.weight.startswith("/") and node.has(product.weight)
        }

    @cached_property
    def remembered(self) -> list[tuple[Node, Remembered]]:
        """Every cached tensor with its node."""
        return [(node, r) for node in self.nodes if node.has(None) for r in node.own.remembers()]

    @cached_property
    def attended(self) -> list[tuple[Node, Remembered]]:
        """Every cached tensor with each node that reads it."""
        return [(node, r) for node in self.nodes if node.has(None) for r in node.own.attends()]

    @cached_property
    def weight_bytes(self) -> dict[Kind, int]:
        """Bytes of weights by kind of part, rounded up."""
        by_kind: dict[Kind, Number] = {}
        for entry in self.stored:
            by_kind[entry.kind] = by_kind.get(entry.kind, 0) + entry.nbytes * entry.count
        return {kind: math.ceil(nbytes) for kind, nbytes in by_kind.items()}

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.weight_bytes.values())

    @cached_property
    def active_parameters(self) -> Number:
        """Parameters that one token uses on one device, as in `cost.active_parameters`."""
        one = Pass(tokens=1)
        return sum(
            (
                e.weight.size * e.count * (e.node.own.share(e.name, one) if e.node is not None else 0)
                for e in self.stored
            ),
            0,
        )

    def cache_numbers(
        self, tokens: int, kept: Callable[[Remembered, int], Number] = Remembered.tokens_kept
    ) -> CacheNumbers:
        """Returns how many numbers the cache of one sequence has; `kept` returns for how many tokens."""
        found: dict[str | None, Number] = {None: 0, "float32": 0}
        vectors: dict[int, Number] = {}
        states: Number = 0
        for node, r in self.remembered:
            count = node.count * kept(r, tokens)
            found[r.dtype] += count * r.size
            if r.dtype is None and r.per == "sequence":
                states += count * r.size
            elif r.dtype is None:
                vectors[r.width] = vectors.get(r.width, 0) + count * (r.size // r.width)
        return CacheNumbers(
            cached=int(found[None]),
            float32=int(found["float32"]),
            vectors=tuple((width, int(many)) for width, many in vectors.items()),
            states=int(states),
        )

    def step(self, run: Pass, kv_bytes: Number | CacheFormat) -> dict[Kind, RunCost]:
        """Returns the traffic and FLOPs of one pass, by kind of part; `kv_bytes` are those of one cached number.

        Products, lookups and cache grow linearly with the number of sequences, as the tests prove for every part; how
        many experts are used depends on the whole batch.
        """
        one = replace(run, batch=1)
        if (one, kv_bytes) not in self._of_few:
            if len(self._of_few) >= MOST_KEPT:
                self._of_few.clear()
            first, second = (self._without_choice(replace(run, batch=batch), kv_bytes) for batch in (1, 2))
            self._of_few[one, kv_bytes] = first, second, dict(self.root.runs(one))
        first, second, seen = self._of_few[one, kv_bytes]
        steps: dict[Kind, RunCost] = {kind: step.grown(second[kind], run.batch) for kind, step in first.items()}
        for entry in self._chosen:
            if entry.node is not None and entry.node in seen:
                own = self._run_of(entry.node, replace(seen[entry.node], batch=run.batch))
                share = self._share(entry.node, entry.name, own)
                steps[entry.kind].weights += math.ceil(entry.nbytes * share) * entry.reads
        return steps

    def _share(self, node: Node, name: str, run: Pass) -> Fraction:
        """Returns the share of a weight that a pass reads; of replicas each is read if a row of its part needs it."""
        if not self.redundant or name not in node.own.spreads():
            return node.own.share(name, run)
        many = node.own.spreads()[name]
        each, more = divmod(many + self.redundant, many)  # replicas of an expert; of `more` of them one more
        held = ((each, many - more), (each + 1, more))
        return sum((n * r * node.own.share(name, run, r) for r, n in held), Fraction(0)) / (many + self.redundant)

    @cached_property
    def _chosen(self) -> list[Stored]:
        """Weights of which a pass may read only a share."""
        return [e for e in self.stored if e.node is not None and type(e.node.own).share is not Part.share]

    def _without_choice(self, run: Pass, kv_bytes: Number | CacheFormat) -> dict[Kind, RunCost]:
        """Returns the costs without the weights of which a pass may read only a share."""
        kinds: list[Kind] = [*(entry.kind for entry in self.stored), *(node.whole.kind for node in self.nodes)]
        steps: dict[Kind, RunCost] = {kind: RunCost() for kind in kinds}
        seen, chosen = dict(self.root.runs(run)), {id(entry) for entry in self._chosen}
        for entry in self.stored:
            if entry.node is not None and entry.node not in seen:
                continue
            if entry.node is None or entry.weight.role != "table":
                steps[entry.kind].weights += 0 if id(entry) in chosen else math.ceil(entry.nbytes) * entry.reads
            else:
                row = _whole(Fraction(entry.nbytes, entry.weight.shape[0]))
                steps[entry.kind].lookups += row * seen[entry.node].rows * entry.reads
                if entry.path in self.multiplied_elsewhere:
                    steps["head"].weights += math.ceil(entry.nbytes)
        for node, r in self.attended:
            read = node.count * r.size * r.tokens_read(run)
            steps[node.whole.kind].cache += run.batch * read * r.number_bytes(kv_bytes)
        for node in seen:
            self._multiply(steps[node.whole.kind], node, self._run_of(node, seen[node]))
        return steps

    def _run_of(self, node: Node, run: Pass) -> Pass:
        """Returns the pass as a node sees it: experts process the rows of all groups."""
        return replace(run, batch=run.batch * self.groups) if self.groups > 1 and node.own.spreads() else run

    def _multiply(self, step: RunCost, node: Node, run: Pass) -> None:
        spread = node.own.spreads() if self.expert > 1 else {}
        for product in node.own.multiplies(run):
            if not node.has(product.weight):
                continue
            share = Fraction(node.count, self.expert) if product.weight in spread else node.count
            if product.weight is None:
                step.scores += product.flops * share
                step.scores_causal += product.causal_flops * share
            else:
                step.products += product.flops * share

    @cached_property
    def _summed(self) -> dict[Node, set[str]]:
        """Weights of each node whose inner dimension is divided over devices."""
        found = {}
        for node in self.nodes:
            wholes = node.whole.local_weights()
            names = {
                name
                for name, weight in node.own.local_weights().items()
                if weight.split == "in" and weight.size < wholes[name].size
            }
            if names:
                found[node] = names
        return found

    def contracted(self, run: Pass) -> list[tuple[Node, Product]]:
        """Returns the products whose inner dimension is divided over devices, so that their results must be summed."""
        return [
            (node, product)
            for node, seen in self.root.runs(run)
            if node in self._summed
            for product in node.own.multiplies(seen)
            if product.weight in self._summed[node]
        ]


def _find(root: Part, path: str) -> tuple[Part, Weight]:
    """Returns the part and the weight at a full path."""
    part, rest = root, path
    while rest:
        held = part.holds()
        if rest in held:
            return part, held[rest]
        for name, child in part.children():
            if rest.startswith(f"{name}."):
                part, rest = child, rest[len(name) + 1 :]
                break
        else:
            break
    raise KeyError(path)

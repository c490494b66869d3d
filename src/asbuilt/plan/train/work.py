"""FLOPs of a piece by what its backward pass needs, and its products one by one, for their time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from asbuilt.cost.bill import TRAINING_FACTOR
from asbuilt.cost.folded import Node
from asbuilt.plan.placement import Placement
from asbuilt.spec import Block, Pass
from asbuilt.spec.part import Weight

# The loss is computed in float32.
LOGITS_WIDTH = 4
# How the names of an adapter's own matrices end.
ADAPTER = ("lora_a", "lora_b")


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank adapters on frozen maps of the blocks (arXiv 2106.09685), on `targets` or on all.

    `nf4` holds the frozen matrices in NF4 with double quantisation (QLoRA, arXiv 2305.14314).
    """

    rank: int
    targets: tuple[str, ...] | None
    nf4: bool


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Which share of the work a device takes: the run it sees, its tensor- and expert-parallel degrees.

    `sequence` says that what tensor parallelism leaves whole is split by tokens (Korthikanti et al., arXiv 2205.05198),
    `vocabulary` that embedding, head and loss are divided too, `gathers` that a context's keys and values are gathered.
    """

    run: Pass
    cp: int
    tp: int
    ep: int
    sequence: bool
    vocabulary: bool = True
    gathers: bool = False

    @property
    def by_tokens(self) -> int:
        """The number of devices that split undivided tensors by tokens (sequence parallelism)."""
        return self.tp if self.sequence else 1

    @property
    def placement(self) -> Placement:
        """The placement of the layers, divided by tensor parallelism."""
        return Placement(tp=self.tp, etp=self.tp, vocabulary=self.vocabulary)

    @property
    def local(self) -> Pass:
        """The rank's own tokens, the last ones: they see all keys."""
        tokens = self.run.tokens // self.cp
        return replace(self.run, tokens=tokens, past=self.run.tokens - tokens)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One device's products with one weight in a micro-batch, forward: FLOPs, and the numbers of factors and result.

    `gradients` are the products of the same size in the backward pass. `narrow` ones run in fp8 where products do,
    `spread` weights are those of experts. `repeated` tells that torchtitan's list of operations computes it again.
    """

    flops: int
    rows: int
    weights: int
    gradients: int
    narrow: bool = False
    spread: bool = False
    repeated: bool = False
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs of one forward pass by what its backward pass needs: both factors' gradients, or only one's.

    `frozen` are those of one gradient: of weights that are not trained, and of products with the data itself. `alone`
    are those that are computed without gradients, `recomputed` those that a kernel computes again in its backward pass,
    which are among the others.
    """

    trained: int = 0
    frozen: int = 0
    scores: int = 0
    scores_causal: int = 0
    alone: int = 0
    alone_causal: int = 0
    recomputed: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            trained=self.trained + other.trained,
            frozen=self.frozen + other.frozen,
            scores=self.scores + other.scores,
            scores_causal=self.scores_causal + other.scores_causal,
            alone=self.alone + other.alone,
            alone_causal=self.alone_causal + other.alone_causal,
            recomputed=self.recomputed + other.recomputed,
        )

    def times(self, count: int) -> Work:
        """The same for `count` of them."""
        return Work(
            trained=count * self.trained,
            frozen=count * self.frozen,
            scores=count * self.scores,
            scores_causal=count * self.scores_causal,
            alone=count * self.alone,
            alone_causal=count * self.alone_causal,
            recomputed=count * self.recomputed,
        )

    def forward(self, *, causal: bool = True) -> int:
        """One forward pass."""
        scores = self.scores_causal + self.alone_causal if causal else self.scores + self.alone
        return self.trained + self.frozen + scores

    def training(self, *, causal: bool = True) -> int:
        """Forward, backward at twice that, or once for products whose weight is frozen, and what is recomputed."""
        alone = self.alone_causal if causal else self.alone
        trained = TRAINING_FACTOR * self.forward(causal=causal) + self.recomputed
        return trained - self.frozen - (TRAINING_FACTOR - 1) * alone


def split(size: int, ways: int) -> int:
    """Returns the largest of `ways` shares of `size`."""
    return -(-size // ways)


def times_in(node: Node, below: Node) -> int:
    """Returns the number of instances of a child in one instance of the node."""
    return below.count // node.count


def splits(held: Mapping[str, Weight], name: str) -> bool:
    """Whether tensor parallelism divides a product by its weight; an adapter's is divided like its map's.

    The weight of another part is a table, which is divided by its rows.
    """
    if name.endswith(ADAPTER):
        plain = name.removesuffix("_lora_a").removesuffix("_lora_b")
        name = plain if plain != name else f"{name.rpartition('.')[0]}.weight"
    return name.startswith("/") or held[name].split is not None


def timed(node: Node, at: Slice, adapters: Adapters | None) -> Iterator[Timed]:
    """Yields the rank's products with weights; torchtitan's list has every other one of a block, and its first."""
    inside, number = isinstance(node.whole, Block), 0
    for below, seen in node.runs(at.run):
        held, stacks = below.own.local_weights(), below.own.spreads()
        for product in below.own.multiplies(seen):
            if product.caching or product.no_gradient or product.weight is None:
                continue
            number += 1
            frozen = adapters is not None and not product.weight.endswith(ADAPTER)
            ways = at.cp * (1 if splits(held, product.weight) else at.by_tokens)
            matrix = held[product.weight].size if product.weight in stacks else product.n * product.b * product.c
            yield Timed(
                flops=split(product.flops, ways),
                rows=split(product.n * product.a * (product.b + product.c), ways),
                weights=matrix,
                gradients=(1 if frozen or product.one_gradient else 2) + product.recomputed,
                narrow=inside and below.own.kind != "router",
                spread=product.weight in stacks,
                repeated=inside and number % 2 == 0,
                count=times_in(node, below),
            )


def scored(node: Node, at: Slice) -> int:
    """Scores of a micro-batch: results of each part's first product of two activations."""
    found = 0
    for below, seen in node.runs(at.run):
        scores = [p for p in below.own.multiplies(seen) if p.weight is None and not p.caching and not p.no_gradient]
        found += times_in(node, below) * sum(p.n * p.a * p.c for p in scores[:1])
    return split(found, at.cp)


def listed(node: Node, at: Slice) -> int:
    """Bytes of the results that torchtitan's list of operations keeps: see `timed`, and what attention gives."""
    kept, number = 0, 0
    for below, seen in node.runs(at.local):
        held, times = below.own.local_weights(), times_in(node, below)
        products = [p for p in below.own.multiplies(seen) if not p.caching and not p.no_gradient]
        mixed = [p for p in products if p.weight is None]
        kept += times * sum(p.n * p.a * (p.c * seen.width + LOGITS_WIDTH) for p in mixed[1:2])  # and sums of rows
        for product in products:
            number += product.weight is not None
            if product.weight is None or number % 2 == 0:
                continue
            weight = held.get(product.weight)
            ways = 1 if weight is not None and weight.split == "out" else at.by_tokens
            kept += times * split(product.n * product.a * product.c * seen.width, ways)
    return kept

"""One device's view of a model under one placement: its counted tree, and the part of it that each stage holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from asbuilt.cost.folded import CacheNumbers, Census, Folded, Node, Side, census, tree
from asbuilt.errors import InputError
from asbuilt.kernels.memory import memory
from asbuilt.plan.placement import Placement
from asbuilt.plan.precision import Precision
from asbuilt.plan.stage import Stage, stages
from asbuilt.spec import Kind, Model, Part, Pass, runs
from asbuilt.spec.part import Kernel


@dataclass(frozen=True, kw_only=True, eq=False)
class Known:
    """Cached results about a model: its census, its counted trees and its devices by placement."""

    spec: Model
    census: Census
    devices: dict[tuple[object, ...], Device] = field(default_factory=dict)
    trees: dict[tuple[int, int, bool], Node] = field(default_factory=dict)
    shards: dict[tuple[int, int, bool], Part | InputError] = field(default_factory=dict)
    peaks: dict[tuple[int, int, bool], dict[tuple[int, int, Kernel, int], int]] = field(default_factory=dict)

    def shard(self, tensor: int, expert: int = 1, vocabulary: bool = True) -> Part | InputError:
        """Returns one device's share of the census, or the InputError if it cannot be divided like this.

        Without `vocabulary` embedding and head stay whole.
        """
        key = (tensor, expert, vocabulary)
        if key not in self.shards:
            small = self.census.small
            whole = {} if vocabulary else {name: one for name, one in small.children() if name in ("embedding", "head")}
            try:
                own = small if (tensor, expert) == (1, 1) else small.shard(tensor, expert)
                self.shards[key] = replace(own, **whole) if whole else own
            except InputError as error:
                self.shards[key] = error
        return self.shards[key]

    def tree(self, layout: Placement) -> Node:
        """Returns the counted tree of the census under a placement; raises InputError if it does not divide."""
        key = (*layout.sharding, layout.vocabulary)
        if key not in self.trees:
            own = self.shard(*key)
            if isinstance(own, InputError):
                raise own
            self.trees[key] = tree(self.census.small, own)
        return self.trees[key]

    @cached_property
    def unplanned(self) -> tuple[tuple[str, str, str, str], ...]:
        """What cannot be planned."""
        return tuple(_unplanned(self.census.small))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The kind of each block, in order."""
        return self.census.order.get("blocks") or tuple(range(len(getattr(self.spec, "blocks", ())) or 1))

    def divides(self, tensor: int, expert: int = 1) -> bool:
        """Returns whether the degrees divide the model."""
        return isinstance(self.shard(tensor, expert), Part)


# The root's children after the blocks.
ABOVE = ("norm", "head")
_known: dict[int, Known] = {}
MOST_KNOWN = 32
MOST_DEVICES = 64
MOST_RUNS = 1000


def known(spec: Model) -> Known:
    """Returns the cached results for this spec object; the last few models are cached."""
    found = _known.get(id(spec))
    if found is None:  # the model is kept alive, so that its id is not reused
        found = Known(spec=spec, census=census(spec))
        if len(_known) >= MOST_KNOWN:
            _known.pop(next(iter(_known)), None)
        _known[id(spec)] = found
    return found


def degrees(spec: Model, most: int) -> list[int]:
    """Returns the tensor parallel degrees that heads, hidden widths and vocabulary allow."""
    found = known(spec)
    return [degree for degree in range(1, most + 1) if found.divides(degree)]


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceStage:
    """What one device of a pipeline stage holds; `held` and `curves` cache counts and times of its weights."""

    stage: Stage
    folds: Folded
    held: dict[tuple[int, object], CacheNumbers] = field(default_factory=dict)
    curves: dict[tuple[object, ...], object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Device:
    """The devices of one copy of the model: its stages, and one device's part of the model (distinct blocks once).

    Peaks do not depend on the format of weights, so devices of all formats keep them together.
    """

    stages: tuple[DeviceStage, ...]
    own: Part
    host: DeviceStage | None = None
    """What is in host memory, and computed there."""
    _peak_bytes: dict[tuple[int, int, Kernel, int], int] = field(default_factory=dict)
    _kept: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)

    def peak_bytes(self, chunk: int, context: int, kernel: Kernel, width: int) -> int:
        """Returns the peak bytes while a sequence is prefilled chunk by chunk, with logits of its last token.

        The peak is in the last chunk, after all other tokens; or in the first one, before which an encoder runs.
        """
        key = (min(chunk, context), context, kernel, width)
        if key not in self._peak_bytes:
            if len(self._peak_bytes) > MOST_RUNS:
                self._peak_bytes.clear()
            tokens = key[0]
            runs = (
                Pass(tokens=tokens, past=past, logits="last", kernel=kernel, width=width)
                for past in {0, context - tokens}
            )
            self._peak_bytes[key] = max(map(memory(self.own).peak_bytes, runs))
        return self._peak_bytes[key]

    def kept(self, chunk: int, positions: int, width: int) -> tuple[int, int]:
        """Returns the bytes of tables for `positions`, and of workspaces for passes of `chunk` tokens."""
        key = (chunk, positions, width)
        if key not in self._kept:
            run = Pass(tokens=chunk, logits="last", kernel="engine", width=width)
            seen = {(part, here) for _, part, here in runs(self.own, run)}
            tables = sum(memory(part).resident(positions, width) for part in {part for part, _ in seen})
            self._kept[key] = tables, max(memory(part).workspace(here) for part, here in seen)
        return self._kept[key]


def device(spec: Model, layout: Placement, precision: Precision) -> Device:
    """Returns the stages of one copy of the model, equal stages once."""
    kept, key = known(spec), (layout.sharding, layout.ep, layout.groups, layout.pp, layout.redundant, precision)
    if key not in kept.devices:
        if len(kept.devices) >= MOST_DEVICES:
            kept.devices.clear()
        kept.devices[key] = _device(kept, layout, precision)
    return kept.devices[key]


def _device(kept: Known, layout: Placement, precision: Precision) -> Device:
    root = kept.tree(layout)
    found = tuple(
        DeviceStage(
            stage=stage,
            folds=Folded(
                root.times(_times(kept.census, stage)),
                precision.held,
                expert=layout.ep,
                groups=layout.groups,
                redundant=layout.redundant,
            ),
        )
        for stage in stages(kept.order, layout.pp)
    )
    return Device(
        stages=found, own=root.own, _peak_bytes=kept.peaks.setdefault((*layout.sharding, layout.vocabulary), {})
    )


def split(spec: Model, precision: Precision, layers: int, experts: int) -> Device:
    """Returns the device that holds what follows the first `layers` blocks, beside a host that holds the rest.

    The host has the parts before the blocks, the first `layers` of them, and the routed experts of the first `experts`.
    """
    kept, key = known(spec), ("split", layers, experts, precision)
    if key not in kept.devices:
        if len(kept.devices) >= MOST_DEVICES:
            kept.devices.clear()
        kept.devices[key] = _split(kept, precision, layers, experts)
    return kept.devices[key]


def _split(kept: Known, precision: Precision, layers: int, experts: int) -> Device:
    root, order = kept.tree(Placement()), kept.order
    experts = max(layers, experts)

    def part(number: int, blocks: Sequence[int]) -> tuple[Stage, Node]:
        stage = Stage(number=number, pp=2, blocks=tuple(Counter(blocks).items()))
        return stage, root.times(_times(kept.census, stage))

    above, below = part(0, order[:layers]), part(1, order[experts:])
    both = Stage(number=1, pp=3, blocks=tuple(Counter(order[layers:experts]).items()))
    shared = root.times(_times(kept.census, both))
    sides: tuple[tuple[tuple[Stage, Node], Side], ...] = ((below, "dense"), (above, "experts"))
    found = [
        DeviceStage(
            stage=stage,
            folds=Folded(replace(node, children=node.children + shared.sided(side).children), precision.held),
        )
        for (stage, node), side in sides
    ]
    peaks = kept.peaks.setdefault((*Placement().sharding, True), {})
    return Device(stages=(found[0],), host=found[1], own=root.own, _peak_bytes=peaks)


def _times(found: Census, stage: Stage) -> Callable[[str], int]:
    """Returns how often a stage has each of the root's children: its blocks, and at the ends the parts outside them."""
    others = {name: Counter(order) for name, order in found.order.items() if name != "blocks"}
    blocks = dict(stage.blocks)

    def times(name: str) -> int:
        field, _, number = name.partition(".")
        if field == "blocks":
            return blocks.get(int(number), 0)
        here = stage.last if field in ABOVE else stage.first
        return (others[field][int(number)] if field in others else 1) if here else 0

    return times


def unplanned(spec: Model) -> tuple[tuple[str, str, str, str], ...]:
    """Returns (path, part, figure, reason) for parts with a figure that cannot be planned, equal blocks once."""
    return known(spec).unplanned


def _unplanned(small: Part) -> Iterator[tuple[str, str, str, str]]:
    """Yields (path, part, figure, reason); a part inside another of its kind is covered by the outer part."""
    if getattr(small, "head", small) is None:
        yield "", type(small).__name__, "decode", "it has no head, so it does not generate"
    if getattr(getattr(small, "head", None), "gives", "logits") == "labels":
        yield "", type(small).__name__, "decode", "its head gives labels, so it does not generate"
    whole, step = Pass(tokens=2), Pass(tokens=1, past=8)
    for path, part, run in _outermost(small, step):
        mixes = part.kind in ("attention", "ssm") and any(p.weight is None for p in part.multiplies(run))
        reads = getattr(part, "kv_from", None) is not None  # an earlier layer's, which is held to this itself
        if mixes and not part.remembers() and not reads:
            yield path, type(part).__name__, "decode", "it has no cache, so it cannot decode"
    for path, part, run in _outermost(small, whole):
        if part.multiplies(run) and not memory(part).peak_bytes(run):
            yield path, type(part).__name__, "activations", "it does not declare its working memory"


def _outermost(small: Part, run: Pass) -> Iterator[tuple[str, Part, Pass]]:
    """Yields the parts that run and are not directly inside a part of their own kind."""
    kinds: dict[str, Kind] = {}
    for path, part, seen in runs(small, run):
        kinds[path] = part.kind
        if part.kind == "other" or part.kind != kinds.get(path.rpartition(".")[0]):
            yield path, part, seen

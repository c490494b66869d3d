"""How a model lies over devices: tensor, pipeline and expert degrees, what each device holds, and its folds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from asbuilt.cost.folded import Census, Folded, census
from asbuilt.errors import InputError
from asbuilt.families.shared.reader import is_whole
from asbuilt.kernels.memory import memory
from asbuilt.plan.conventions import NODE
from asbuilt.plan.precision import Precision
from asbuilt.spec import Kind, Model, Part, Pass, runs, walk
from asbuilt.spec.part import Kernel

MOST_GPUS = 2**20
MOST_DEGREE = 1024


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`gpus` devices: `replicas` copies of the model, each in `pp` stages of max(tp, ep) devices.

    Attention is divided over `tp` devices; where experts go to more than those, `groups` such groups share them, each
    with sequences of its own.
    """

    gpus: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def groups(self) -> int:
        """Groups of attention within one copy."""
        return max(1, self.ep // self.tp)

    @property
    def per_copy(self) -> int:
        """Devices of one copy of the model."""
        return self.pp * max(self.tp, self.ep)

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.gpus // self.per_copy


@dataclass(frozen=True, kw_only=True, eq=False)
class Known:
    """What is known of a model once it was looked at: its census, what cannot be planned of it, and its devices."""

    spec: Model
    census: Census
    unplanned: tuple[tuple[str, str, str, str], ...]
    devices: dict[tuple[Placement, Precision], Device] = field(default_factory=dict)
    shards: dict[tuple[int, int], Part | InputError] = field(default_factory=dict)

    def shard(self, tensor: int, expert: int = 1) -> Part | InputError:
        """Returns what one of so many devices has of the census, or why the model cannot be divided so."""
        key = (tensor, expert)
        if key not in self.shards:
            small = self.census.small
            try:
                self.shards[key] = small if key == (1, 1) else small.shard(tensor, expert)
            except InputError as error:
                self.shards[key] = error
        return self.shards[key]

    def divides(self, tensor: int, expert: int = 1) -> bool:
        """Whether the degrees divide the model."""
        return isinstance(self.shard(tensor, expert), Part)


_known: dict[int, Known] = {}
MOST_KNOWN = 32
MOST_DEVICES = 64
MOST_RUNS = 1000


def known(spec: Model) -> Known:
    """Returns what is known of this very object; the last few models that were asked for are kept."""
    found = _known.get(id(spec))
    if found is None:  # the model is kept with it, so that no other one gets its id
        small = census(spec)
        found = Known(spec=spec, census=small, unplanned=tuple(_unplanned(small.small)))
        if len(_known) >= MOST_KNOWN:
            _known.pop(next(iter(_known)), None)
        _known[id(spec)] = found
    return found


def degrees(spec: Model, most: int = MOST_DEGREE) -> list[int]:
    """Returns the tensor parallel degrees that heads, hidden numbers and vocabulary allow."""
    found = known(spec)
    return [degree for degree in range(1, most + 1) if found.divides(degree)]


def place(
    spec: Model, *, gpus: int | None, tp: int | None, pp: int | None, ep: int | None, node: int = NODE
) -> Placement:
    """Returns the layout that the given degrees make, the others chosen.

    Without `tp`, tensor parallelism takes as many of the devices as it can within one `node`; what it leaves over
    becomes pipeline stages, or copies where there are more devices than layers. Raises InputError naming the degree
    that does not fit the model or the number of devices.
    """
    for name, value in (("gpus", gpus), ("tp", tp), ("pp", pp), ("ep", ep)):
        if value is not None and not (is_whole(value) and 1 <= value <= MOST_GPUS):
            raise InputError("out of bounds", field=name, value=value, allowed=f"1 to {MOST_GPUS:,}")
    experts, found = ep or 1, known(spec)
    _require_experts(found, experts)
    if tp is None:
        share = max(1, (gpus or experts) // (pp or 1))
        tp = max(
            d
            for d in range(1, min(node, MOST_DEGREE, share) + 1)
            if share % d == 0
            and found.divides(d)
            and not (experts % d and d % experts)
            and (share <= node or node % d == 0)
        )
    else:
        _require_tensor(found, tp)
    if max(tp, experts) % min(tp, experts):
        raise InputError("does not go with tp", field="ep", value=experts, allowed=f"a divisor or a multiple of {tp}")
    width = max(tp, experts)
    if isinstance(refused := found.shard(tp, experts), InputError):
        raise refused
    stages = pp or _stages(spec, gpus or width, width)
    layout = Placement(gpus=gpus or width * stages, tp=tp, pp=stages, ep=experts)
    if stages > len(_layers(spec)):
        raise InputError("more stages than layers", field="pp", value=stages, allowed=f"1 to {len(_layers(spec))}")
    if layout.gpus % layout.per_copy:
        raise InputError(
            "does not hold whole copies of the model",
            field="gpus",
            value=layout.gpus,
            allowed=f"a multiple of {layout.per_copy}, pp {stages} x max(tp {tp}, ep {ep})",
        )
    return layout


def _stages(spec: Model, gpus: int, width: int) -> int:
    rest = gpus // width if gpus % width == 0 else 1
    return rest if rest <= len(_layers(spec)) else 1


def _layers(spec: Part) -> tuple[Part, ...]:
    return getattr(spec, "blocks", ()) or (spec,)


def _require_tensor(found: Known, tp: int) -> None:
    error = found.shard(tp)
    if isinstance(error, InputError):
        allowed = ", ".join(map(str, degrees(found.spec)))
        raise InputError(
            "the model cannot be divided so",
            field="tp",
            value=tp,
            allowed=allowed,
            fix=f"{error.field} = {error.value} is not {error.allowed}",
        ) from error


def _require_experts(found: Known, ep: int) -> None:
    if ep == 1:
        return
    numbers = {n for _, part in walk(found.census.small) for n in part.spreads().values()}
    if not numbers:
        raise InputError("the model has no experts", field="ep", value=ep, allowed="1")
    if any(n % ep for n in numbers):
        allowed = [d for d in range(1, max(numbers) + 1) if all(n % d == 0 for n in numbers)]
        raise InputError("does not divide the experts", field="ep", value=ep, allowed=", ".join(map(str, allowed)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """One kind of pipeline stage, of which there are `count`; `last` makes logits; `held` keeps what was counted."""

    folds: Folded
    count: int
    last: bool
    held: dict[tuple[int, int, bool], int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Device:
    """What the devices of one copy hold: the stages, and the part of the model that one device has (blocks once)."""

    stages: tuple[Stage, ...]
    own: Part
    layout: Placement
    _peak_bytes: dict[tuple[int, int, Kernel, int], int] = field(default_factory=dict)

    def peak_bytes(self, chunk: int, context: int, kernel: Kernel, width: int) -> int:
        """Returns the most bytes alive at once while a sequence is prefilled chunk by chunk, logits for its last token.

        That is while the last chunk is, with all the tokens before it; or the first one, before which an encoder runs.
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


def device(spec: Model, layout: Placement, precision: Precision) -> Device:
    """Returns the stages of one copy of the model, equal stages once."""
    kept, key = known(spec), (replace(layout, gpus=layout.per_copy), precision)
    if key not in kept.devices:
        if len(kept.devices) >= MOST_DEVICES:
            kept.devices.clear()
        kept.devices[key] = _device(kept, layout, precision)
    return kept.devices[key]


def _device(kept: Known, layout: Placement, precision: Precision) -> Device:
    found, small, own = kept.census, kept.census.small, kept.shard(layout.tp, layout.ep)
    assert isinstance(own, Part), own  # place() refuses what cannot be divided
    order = found.order.get("blocks") or tuple(range(len(_layers(small))))
    kinds: dict[tuple[tuple[tuple[int, int], ...], bool, bool], int] = {}
    for i, (first, end) in enumerate(_cuts(len(order), layout.pp)):
        held = tuple(sorted(Counter(order[first:end]).items()))
        key = (held, i == 0, i == layout.pp - 1)
        kinds[key] = kinds.get(key, 0) + 1
    stages = []
    for (held, starts, ends), count in kinds.items():
        times = _times(found, dict(held), starts, ends)
        folds = Folded(small, precision.held, own=own, expert=layout.ep, groups=layout.groups, times=times)
        stages.append(Stage(folds=folds, count=count, last=ends))
    return Device(stages=tuple(stages), own=own, layout=layout)


def _times(found: Census, blocks: dict[int, int], starts: bool, ends: bool) -> Callable[[str], int]:
    """How often a stage has each of the root's children: its blocks, and at the ends what lies outside them."""
    others = {name: Counter(order) for name, order in found.order.items() if name != "blocks"}

    def times(name: str) -> int:
        field, _, number = name.partition(".")
        if field == "blocks":
            return blocks.get(int(number), 0)
        here = ends if field in ("norm", "head") else starts
        return (others[field][int(number)] if field in others else 1) if here else 0

    return times


def _cuts(layers: int, stages: int) -> Iterator[tuple[int, int]]:
    """As even as can be, the first stages with one layer more where there is a rest."""
    each, rest = divmod(layers, stages)
    at = 0
    for i in range(stages):
        end = at + each + (i < rest)
        yield at, end
        at = end


def unplanned(spec: Model) -> tuple[tuple[str, str, str, str], ...]:
    """Returns (path, part, figure, why) for parts of which a figure cannot be planned, equal blocks once."""
    return known(spec).unplanned


def _unplanned(small: Part) -> Iterator[tuple[str, str, str, str]]:
    """A part within another of its kind is that one's affair: what it caches and where it works is declared there."""
    if getattr(small, "head", small) is None:
        yield "", type(small).__name__, "decode", "it has no head, so it makes no tokens"
    whole, step = Pass(tokens=2), Pass(tokens=1, past=8)
    for path, part, run in _outermost(small, step):
        mixes = part.kind in ("attention", "ssm") and any(p.weight is None for p in part.multiplies(run))
        if mixes and not part.remembers():
            yield path, type(part).__name__, "decode", "it remembers nothing, so tokens cannot be made one by one"
    for path, part, run in _outermost(small, whole):
        if part.multiplies(run) and not memory(part).peak_bytes(run):
            yield path, type(part).__name__, "activations", "it does not declare the room it works in"


def _outermost(small: Part, run: Pass) -> Iterator[tuple[str, Part, Pass]]:
    """Yields what has a part in the run and lies directly in no part of its own kind."""
    kinds: dict[str, Kind] = {}
    for path, part, seen in runs(small, run):
        kinds[path] = part.kind
        if part.kind == "other" or part.kind != kinds.get(path.rpartition(".")[0]):
            yield path, part, seen

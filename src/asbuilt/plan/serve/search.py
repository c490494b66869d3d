"""The cheapest layout of a machine that serves a goal: copies of the model, each with its degrees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asbuilt.errors import InputError
from asbuilt.plan.placement import Placement, divisors
from asbuilt.plan.serve.limits import Goal, copied, least
from asbuilt.plan.serve.place import MOST_DEGREE, place
from asbuilt.plan.serve.roofline import Roofline
from asbuilt.spec import Model

# The most devices that are tried, and of one copy of the model; and how many times as many as the narrowest copy that
# fits a wider one has at most.
MOST, MOST_OF_COPY, WIDER = 256, 64, 8
DEGREES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """A layout that meets the goal, with the fewest copies that do; `options` are its degrees on the command line."""

    roofline: Roofline
    tokens_per_second: float

    @property
    def layout(self) -> Placement:
        """The placement."""
        return self.roofline.capacity.layout

    @property
    def options(self) -> str:
        """The layout as options: --gpus 8 --tp 2 --pp 1."""
        layout = self.layout
        ep = f" --ep {layout.ep}" if layout.ep > 1 else ""
        more = f" --redundant-experts {layout.redundant}" if layout.redundant else ""
        return f"--gpus {layout.gpus} --tp {layout.tp} --pp {layout.pp}{ep}{more}"


def search(
    roofline: Roofline, goal: Goal, context: int, *, gpus: int | None = None, most: int = MOST
) -> tuple[Found, ...]:
    """Returns the layouts that meet the goal, the one with the fewest devices first, and of those the fastest.

    With `gpus` all have that many devices; without, a layout that needs more than another one found before is dropped.
    """
    if roofline.capacity.offload is not None:
        raise InputError("layouts with layers in host memory are not searched", field="search", fix="leave out -ngl")
    if roofline.prefiller is not None:
        raise InputError("layouts of two pools are not searched", field="search", fix="leave out --prefill-gpus")
    found: list[Found] = []
    best = gpus or most
    narrowest = None
    redundant = roofline.capacity.layout.redundant
    for copy in copies(roofline.capacity.spec, gpus or most, roofline.conventions.node, redundant):
        if roofline.capacity.machine.slice_of and copy.gpus > 1:
            break
        if not _holds(roofline, copy, context) or copy.gpus > WIDER * (narrowest or copy.gpus):
            continue
        narrowest = narrowest or copy.gpus
        count = _fewest(roofline, goal, context, copy, gpus, best)
        if count is not None:
            best = best if gpus else min(best, count * copy.gpus)
            at = copied(roofline, copy, count)
            found.append(Found(roofline=at, tokens_per_second=_speed(at, goal, context)))
    return tuple(sorted(found, key=lambda f: (f.layout.gpus, -f.tokens_per_second, f.layout.pp)))


def copies(spec: Model, gpus: int, node: int, redundant: int = 0) -> Iterator[Placement]:
    """Yields the layouts of one copy of the model on up to `gpus` devices, those with few devices first.

    Where experts are spread, `redundant` replicas are with them, as far as they divide evenly.
    """
    for width in range(1, min(gpus, MOST_OF_COPY) + 1):
        for tp in divisors(width):
            for pp in divisors(width // tp):
                if tp <= min(node, MOST_DEGREE) and tp in DEGREES and pp in DEGREES and width // (tp * pp) in DEGREES:
                    yield from _with_experts(spec, width, tp, pp, node, redundant)


def _with_experts(spec: Model, width: int, tp: int, pp: int, node: int, redundant: int) -> Iterator[Placement]:
    """Yields the layouts with these degrees whose experts make one copy of all devices."""
    for ep in {1, width // pp}:
        if ep == 1 and tp * pp != width:
            continue
        try:
            more = redundant if redundant and ep > 1 else None
            yield place(spec, gpus=width, tp=tp, pp=pp, ep=ep, node=node, redundant=more)
        except InputError:
            continue


def _holds(roofline: Roofline, copy: Placement, context: int) -> bool:
    """Returns whether a sequence fits, on a copy whose devices have the memory for its weights at all."""
    capacity = roofline.capacity
    if capacity.alone.total_bytes > copy.gpus * capacity.memory:
        return False
    return bool(copied(roofline, copy, 1).capacity.running(context))


def _fewest(roofline: Roofline, goal: Goal, context: int, copy: Placement, gpus: int | None, best: int) -> int | None:
    """Returns the fewest copies that meet the goal, on at most `best` devices, None if there are none."""

    def meets(count: int) -> bool:
        at = copied(roofline, copy, count)
        return goal.met(at, context) and goal.serves(at)

    if gpus is not None:
        count, rest = divmod(gpus, copy.gpus)
        return count if not rest and meets(count) else None
    return least(meets, best // copy.gpus)


def _speed(roofline: Roofline, goal: Goal, context: int) -> float:
    """Returns tokens/s of the goal's users, or of as many as are served if none were asked for."""
    users = goal.users if goal.users > 1 else max(1, int(min(roofline.capacity.running(context), 10**6)))
    return users / roofline.judged.decode(users, context).seconds

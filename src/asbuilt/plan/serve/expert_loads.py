"""The load of expert-parallel devices: that of the busiest over the mean, with replicas of experts and without.

Experts are placed as expert-parallel load balancing does (EPLB; DeepSeek-AI 2024, arXiv 2412.19437, section 3.4): each
further replica is one of the expert whose replicas have the most load each, and replicas are dealt, the heaviest first,
to the device with the least load that has room. Without replicas the experts lie in order. How loaded an expert is
comes from a file of measured counts; without one all are equal, which no placement makes worse than it is: a lower
bound.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asbuilt.errors import InputError
from asbuilt.files import read_regular
from asbuilt.plan.placement import Placement
from asbuilt.plan.render import Cell, Table
from asbuilt.shown import number, size
from asbuilt.spec import Model, walk

if TYPE_CHECKING:
    from asbuilt.plan.serve.plan import ServePlan

LARGEST_FILE, MOST_LAYERS = 1 << 24, 10_000
Loads = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Replicas of experts on `ep` devices, and the load of the busiest over the mean: in each layer that was measured.

    `before` is that of the experts alone, None where they do not divide evenly.
    """

    experts: int
    redundant: int
    ep: int
    measured: bool
    after: tuple[float, ...]
    before: tuple[float, ...] | None

    @property
    def slots(self) -> int:
        """Experts and replicas of each layer on a device."""
        return (self.experts + self.redundant) // self.ep


def read_loads(path: Path) -> Loads:
    """Returns the loads in a file: on each line those of one layer's experts, or on one line those of all layers.

    Raises InputError naming the line that has anything but numbers of at least 0, and one that has nothing above 0.
    """
    text = read_regular(path, LARGEST_FILE, "expert-loads").decode(errors="replace")
    found: list[tuple[float, ...]] = []
    for at, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            loads = tuple(float(word) for word in re.split(r"[,;\s]+", line.strip()))
        except ValueError:
            loads = ()
        if not loads or not all(math.isfinite(load) and load >= 0 for load in loads) or not 0 < sum(loads) < math.inf:
            allowed = "a number for each expert, at least 0 and not all 0: tokens that it computed"
            raise InputError(field=f"expert-loads: line {at}", value=line[:80], allowed=allowed)
        if len(found) >= MOST_LAYERS:
            raise InputError(
                "too many lines", field="expert-loads", value=str(path), allowed=f"at most {MOST_LAYERS:,}"
            )
        found.append(loads)
    if not found:
        raise InputError(
            "no loads in the file", field="expert-loads", value=str(path), fix="write a line for each layer"
        )
    return tuple(found)


def experts(spec: Model, layout: Placement, loads: Loads | None) -> Experts | None:
    """Returns the experts' replicas and their loads, None if nothing was asked of them.

    Raises InputError if the loads are not those of the model's experts, or the experts are on one device.
    """
    if not layout.redundant and loads is None:
        return None
    mixtures = [n for _, part in walk(spec) if (n := max(part.spreads().values(), default=0))]
    if loads is not None:
        _require_loads(mixtures, layout, loads)
    many, ep = mixtures[0], layout.ep
    each: Loads = loads or tuple((1.0,) * n for n in dict.fromkeys(mixtures))
    return Experts(
        experts=many,
        redundant=layout.redundant,
        ep=ep,
        measured=loads is not None,
        after=tuple(balanced(row, layout.redundant, ep) if layout.redundant else in_order(row, ep) for row in each),
        before=None if any(len(row) % ep for row in each) else tuple(in_order(row, ep) for row in each),
    )


def _require_loads(mixtures: Sequence[int], layout: Placement, loads: Loads) -> None:
    field = "expert-loads"
    if not mixtures:
        raise InputError("the model has no experts", field=field, fix="leave it out")
    if layout.ep == 1:
        raise InputError("the experts are not spread over devices", field=field, fix="give --ep too")
    if len(loads) not in (1, len(mixtures)):
        allowed = f"1 or {len(mixtures)}, the model's layers with experts"
        raise InputError("number of lines", field=field, value=len(loads), allowed=allowed)
    wanted = mixtures if len(loads) > 1 else mixtures[:1]
    for at, (row, many) in enumerate(zip(loads, wanted, strict=True), 1):
        if len(row) != many:
            raise InputError(
                f"numbers on line {at}", field=field, value=len(row), allowed=f"{many}, one for each expert"
            )


def in_order(loads: Sequence[float], ep: int) -> float:
    """Returns the busiest device's load over the mean, where each has as many experts, in order."""
    each = len(loads) // ep
    return max(sum(loads[i * each : (i + 1) * each]) for i in range(ep)) * ep / sum(loads)


def balanced(loads: Sequence[float], redundant: int, ep: int) -> float:
    """Returns the busiest device's load over the mean, with so many replicas, each placed as EPLB places it."""
    replicas = [1] * len(loads)
    heaviest = [(-load, i) for i, load in enumerate(loads)]
    heapq.heapify(heaviest)
    for _ in range(redundant):
        _, i = heaviest[0]
        replicas[i] += 1
        heapq.heapreplace(heaviest, (-loads[i] / replicas[i], i))
    parts = sorted((load / n for load, n in zip(loads, replicas, strict=True) for _ in range(n)), reverse=True)
    room = len(parts) // ep
    devices = [(0.0, i, 0) for i in range(ep)]
    full: list[float] = []
    for part in parts:
        load, i, held = devices[0]
        if held + 1 == room:
            heapq.heappop(devices)
            full.append(load + part)
        else:
            heapq.heapreplace(devices, (load + part, i, held + 1))
    return max(full) * ep / sum(loads)


def replica_bytes(plan: ServePlan) -> int:
    """Returns the bytes of replicas on the fullest device."""
    capacity, layout = plan.capacity, plan.layout
    return max(
        round(
            sum(
                entry.nbytes
                * entry.count
                * layout.redundant
                / (entry.node.own.spreads()[entry.name] + layout.redundant)
                for entry in stage.folds.stored
                if entry.node is not None and entry.name in entry.node.own.spreads()
            )
        )
        for stage in capacity.device.stages
    )


def plain(plan: ServePlan) -> dict[str, Any] | None:
    """Returns replicas and loads as plain data, None if nothing was asked of them."""
    found = plan.experts
    if found is None:
        return None
    loads = {"with": found.after, "without": found.before}
    return {
        "experts": found.experts,
        "redundant": found.redundant,
        "on_a_device": found.slots,
        "replica_bytes": replica_bytes(plan),
        "loads": "measured" if found.measured else "even",
        "busiest_over_mean": {name: _summary(rows) for name, rows in loads.items()},
    }


def _summary(rows: tuple[float, ...] | None) -> dict[str, float] | None:
    return None if rows is None else {"mean": sum(rows) / len(rows), "most": max(rows)}


def table(plan: ServePlan) -> Table:
    """Returns replicas and loads; no rows if nothing was asked of them."""
    found = plan.experts
    if found is None:
        return Table("", (), [])
    of = f"{len(found.after):,} layers of the file" if found.measured else "all experts alike: a lower bound"
    rows: list[tuple[Cell, ...]] = [
        ("experts of a layer on a device", str(found.slots), f"({found.experts} + {found.redundant}) / {found.ep}"),
        ("replicas on a device", size(replica_bytes(plan)), "in the weights"),
        ("busiest device's load, replicas placed by load", _said(found.after), of),
        ("without replicas, experts in order", _said(found.before), of),
    ]
    return Table("Routed experts", ("", "answer", "from"), rows if found.redundant else rows[:1] + rows[3:])


def _said(rows: tuple[float, ...] | None) -> str:
    found = _summary(rows)
    if found is None:
        return "not divided evenly"
    most = f", most {number(found['most'], 4)}" if found["most"] > found["mean"] * (1 + 1e-9) else ""
    return f"{number(found['mean'], 4)} times the mean{most}"

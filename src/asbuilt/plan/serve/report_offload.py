"""What a plan keeps in host memory, as plain data and as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from asbuilt.plan.render import Cell, Table
from asbuilt.plan.serve.expected import LEVELS
from asbuilt.plan.serve.offload import HOST_SHARE
from asbuilt.shown import size

if TYPE_CHECKING:
    from asbuilt.plan.serve.plan import ServePlan
    from asbuilt.plan.serve.roofline import Run


def plain(plan: ServePlan) -> dict[str, Any] | None:
    """Returns what the host holds, what a step takes there and on the way, and the processor; None if it holds nothing.

    `seconds_per_step` are the minimum; `expected` are by level.
    """
    capacity, step = plan.capacity, plan.decode
    if capacity.host is None or step is None:
        return None
    held, offload = capacity.host
    users, levels = capacity.in_host(plan.context), {level: plan.roofline.at(level) for level in LEVELS}
    return {
        "gpu_layers": offload.gpu_layers,
        "cpu_moe": offload.cpu_moe,
        "blocks_in_host": offload.layers,
        "blocks_with_experts_in_host": offload.crossing_experts,
        "weight_bytes": held.folds.total_bytes,
        "room_bytes": offload.room,
        "cache_bytes_per_user": capacity.per_user(held, plan.context),
        "users_that_fit": None if users == math.inf else int(users),
        "crossing_bytes_per_step": plan.roofline.crossing(step.run.rows),
        "bus_bytes_per_second": plan.conventions.host,
        "seconds_per_step": _seconds(step.run),
        "expected": {level: _seconds(at.decode(step.batch, plan.context)) for level, at in levels.items()},
        "processor": asdict(offload.processor) | {"rates": dict(offload.processor.rates)},
    }


def _seconds(run: Run) -> dict[str, float]:
    """Returns a step's seconds on the host, on the device, and of the bus."""
    found = {where: sum(c.seconds for c in run.components if c.where == where) for where in ("host", "device")}
    return found | {"bus": run.link_seconds}


def in_host(plan: ServePlan) -> Table:
    """Returns what host memory holds; no rows if nothing."""
    found = plain(plan)
    if found is None:
        return Table("", (), [])
    blocks, experts = found["blocks_in_host"], found["blocks_with_experts_in_host"]
    what = [f"{blocks} blocks"] * bool(blocks) + [f"routed experts of {experts} more"] * bool(experts)
    lines = (
        ("room for weights and caches", found["room_bytes"], f"{HOST_SHARE:g} of the memory"),
        ("weights", found["weight_bytes"], ", ".join(["embedding", *what])),
        ("cache per user", found["cache_bytes_per_user"], f"{plan.context:,} tokens"),
        ("over the bus in a step", found["crossing_bytes_per_step"], f"{size(found['bus_bytes_per_second'])}/s"),
    )
    rows: list[tuple[Cell, ...]] = [(name, nbytes, size(nbytes), note) for name, nbytes, note in lines]
    return Table(f"Host memory, {found['processor']['name']}", ("line", "value", "", "from"), rows, drop=("from",))


def assumed(plan: ServePlan) -> Iterator[tuple[Cell, ...]]:
    """Yields what is assumed of the host."""
    if plan.capacity.host is not None:
        said = f"one computes after the other; prompts are computed there too; {HOST_SHARE:g} of its memory is used"
        yield ("host", said, "-ngl, --n-cpu-moe, --cpu, --host")

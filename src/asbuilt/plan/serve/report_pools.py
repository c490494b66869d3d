"""What a plan with one pool of devices for prompts and one for answers says of both, as plain data and as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from asbuilt.plan.render import Cell, Table
from asbuilt.plan.serve.capacity import Capacity
from asbuilt.plan.serve.expected import LEVELS
from asbuilt.plan.serve.ladder import ladder
from asbuilt.plan.serve.roofline import Roofline
from asbuilt.plan.serve.transfer import TRANSFERS
from asbuilt.shown import number, size, time

if TYPE_CHECKING:
    from asbuilt.plan.serve.plan import ServePlan


def plain(plan: ServePlan) -> dict[str, Any] | None:
    """Returns both pools, what crosses between them, the time to a first token and the balance; None with one pool.

    Seconds without a level are theoretical minima; `layout` and the figures outside are those of the decode pool.
    """
    found = plan.disaggregated
    if found is None:
        return None
    levels = {level: plan.roofline.at(level) for level in LEVELS}
    bandwidth, source = found.network
    balances = plan.balances
    return {
        "gpus": found.gpus,
        "prefill": _pool(found.prefiller.capacity, plan.context),
        "decode": _pool(plan.capacity, plan.context),
        "transfer": {
            "how": found.transfer,
            "tokens": found.prompt,
            "bytes": found.crossing.nbytes,
            "bytes_from_a_device": math.ceil(found.crossing.sending),
            "bytes_to_a_device": found.crossing.receiving,
            "bandwidth": bandwidth,
            "source": source,
            "seconds": plan.roofline.crossed(found.prompt),
            "expected": {level: at.crossed(found.prompt) for level, at in levels.items()},
        },
        "first_token": {
            "prefill_seconds": plan.prefill.seconds,
            "prefill_expected": {level: _prefilling(at, found.prompt) for level, at in levels.items()},
            "seconds": plan.roofline.first_token(found.prompt),
            "expected": {level: at.first_token(found.prompt) for level, at in levels.items()},
        },
        "balance": None
        if balances is None
        else {
            level: {
                "prefill_requests_per_second": one.prefill,
                "decode_requests_per_second": one.decode,
                "decode_users": one.users,
                "prefill_gpus_per_decode_gpu": one.ratio,
                "bound": one.bound,
            }
            for level, one in balances.items()
        },
    }


def _prefilling(roofline: Roofline, prompt: int) -> float:
    assert roofline.prefiller is not None
    return roofline.prefiller.prefill(prompt).seconds


def _pool(capacity: Capacity, context: int) -> dict[str, Any]:
    layout, lines = capacity.layout, ladder(capacity, context, 0)
    users = capacity.users(context)
    return {
        **{name: getattr(layout, name) for name in ("gpus", "tp", "pp", "ep")},
        "replicas": layout.copies,
        "groups": layout.replicas,
        "chunk": capacity.chunk,
        "weight_bytes": capacity.weight_bytes(),
        "kv_budget_bytes": max(0, int(lines[-1].value)),
        "sequences_that_fit": None if users == math.inf else int(users),
        "ladder": [{"line": line.name, "bytes": line.value} for line in lines],
    }


def tables(plan: ServePlan) -> Iterator[Table]:
    """Yields both pools side by side, and of what the time to a first token consists; nothing with one pool."""
    found = plain(plan)
    if found is None:
        return
    pools = found["prefill"], found["decode"]
    rows: list[tuple[Cell, ...]] = [
        ("devices", *(f"{one['gpus']} (tp {one['tp']}, pp {one['pp']}, ep {one['ep']})" for one in pools)),
        ("groups, each with its own sequences", *(f"{one['groups']:,}" for one in pools)),
        ("weights of a device", *(size(one["weight_bytes"]) for one in pools)),
        ("cache of a device", *(size(one["kv_budget_bytes"]) for one in pools)),
        (f"sequences of {plan.context:,} tokens that fit", *(_many(one["sequences_that_fit"]) for one in pools)),
    ]
    if plan.balances is not None:
        one = plan.balances["middle"]
        rows.append(("expected requests/s at most", *(_rate(rate) for rate in (one.prefill, one.decode))))
        if math.isfinite(one.ratio):
            rows.append(("devices for equal rates", f"{number(one.ratio, 3)} for each that decodes", ""))
    yield Table("Pools", ("", "prefill", "decode"), rows)
    yield _first(plan, found)


def _rate(requests: float) -> str:
    return number(requests, 4) if math.isfinite(requests) else "any number"


def _many(users: int | None) -> str:
    return "any number" if users is None else f"{users:,}"


def _first(plan: ServePlan, found: dict[str, Any]) -> Table:
    crossing, first = found["transfer"], found["first_token"]
    where = f"{size(crossing['bytes'])} over {crossing['bandwidth'] / 1e9:g} GB/s a device ({crossing['source']})"
    rows: list[tuple[Cell, ...]] = [
        ("prefill", time(first["prefill_expected"]["middle"]), time(first["prefill_seconds"]), ""),
        (f"cache sent, {crossing['how']}", time(crossing["expected"]["middle"]), time(crossing["seconds"]), where),
        ("first token", time(first["expected"]["middle"]), time(first["seconds"]), ""),
    ]
    title = f"Time to first token, prompt of {plan.prefill.prompt:,}, nothing else being served"
    return Table(title, ("", "expected", "minimum", "from"), rows)


def assumed(plan: ServePlan) -> Iterator[tuple[Cell, ...]]:
    """Yields what is assumed of the pools."""
    if plan.disaggregated is not None:
        said = (
            f"{TRANSFERS[plan.disaggregated.transfer]}; every device sends and receives its share, one cache at a "
            "time; the first token is counted when its cache has arrived; a cache that waits for room to be decoded "
            "in takes no memory of the pool that prefills"
        )
        yield ("two pools", said, "--prefill-gpus, --decode-gpus, --kv-transfer, --network")


def served(plan: ServePlan) -> Iterator[tuple[str, Any]]:
    """Yields rows of a simulated workload: a name, and what it shows of one level."""
    if plan.disaggregated is None:
        return
    yield "of which prefill, with waiting, 95th", lambda s: time(s.pools.prefill.p95)
    yield "of which cache sent, 95th", lambda s: time(s.pools.transfer.p95)
    yield "room for decoding, waited for, 95th", lambda s: time(s.pools.admission.p95)
    yield "prefill busy", lambda s: f"{s.pools.prefill_busy:.0%}"
    yield "links busy, sending and receiving", lambda s: f"{s.pools.sending:.0%}, {s.pools.receiving:.0%}"


def asked(plan: ServePlan) -> dict[str, Any]:
    """Returns what was asked of the pools, None for each that was not."""
    pools = plan.asked.pools
    first, second = (None, None) if pools is None else (one.plain() for one in pools)
    transfer = None if pools is None else plan.roofline.transfer
    return {"prefill_gpus": first, "decode_gpus": second, "kv_transfer": transfer}

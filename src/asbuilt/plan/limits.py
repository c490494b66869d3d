"""Backwards: the largest context, the largest batch, the smallest card and count, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from asbuilt.catalog import machines
from asbuilt.catalog.machine import Machine, MemoryConvention
from asbuilt.errors import InputError
from asbuilt.plan.devices import Placement, place
from asbuilt.plan.ladder import Capacity, reserved
from asbuilt.plan.precision import cache_bytes, precision
from asbuilt.plan.roofline import Roofline

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def largest(holds: Callable[[int], bool], most: int) -> int:
    """Returns the largest number up to `most` for which `holds`, which is true up to some number; 0 where for none."""
    if most < 1 or not holds(1):
        return 0
    if holds(most):
        return most
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def largest_context(capacity: Capacity, users: int, most: int) -> int:
    """Returns the most tokens per sequence, up to `most`, at which `users` fit."""
    return largest(lambda context: capacity.users(context) >= users, most)


def largest_batch(roofline: Roofline, context: int, users: int, seconds: float) -> int:
    """Returns the most sequences, up to `users`, whose step takes no longer than `seconds`."""
    return largest(lambda batch: roofline.decode(batch, context).seconds <= seconds, users)


def smallest_count(capacity: Capacity, context: int, users: int) -> int | None:
    """Returns the smallest of COUNTS of this machine on which `users` fit, laid out as without options."""
    for count in COUNTS:
        found = _with_gpus(capacity, count)
        if found is not None and found.users(context) >= users and found.holds_weights:
            return count
    return None


def _with_gpus(capacity: Capacity, count: int) -> Capacity | None:
    room = count * capacity.memory * capacity.conventions.utilisation
    if capacity.layout.per_copy * capacity.weight_bytes() > 4 * room:  # far too few: not worth laying out
        return None
    try:
        layout = place(capacity.spec, gpus=count, tp=None, pp=None, ep=None)
    except InputError:
        return None
    return replace(capacity, layout=layout)


def smallest_card(capacity: Capacity, context: int, users: int) -> Machine | None:
    """Returns the accelerator of the catalogue with the least memory that alone holds `users`."""
    alone, conventions = replace(capacity, layout=Placement()), capacity.conventions
    stage = alone.device.stages[0]
    each = alone.per_user(stage, context) + alone.scratch(stage)
    needed = alone.fixed(stage) - alone.reserve + users * each
    for memory, machine in _by_memory(conventions.memory):
        if memory - reserved(memory, conventions) >= needed:
            return machine
    return None


@cache
def _by_memory(convention: MemoryConvention) -> list[tuple[int, Machine]]:
    """The catalogue's accelerators, the least memory first, the fastest of equals."""
    rows = [machine for machine in machines.MACHINES.values() if machine.kind == "accelerator"]
    return sorted(((m.memory_bytes(convention), m) for m in rows), key=lambda found: (found[0], -found[1].bandwidth))


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One thing to change: the option that changes it, whether it then fits, and how many users there are then."""

    change: str
    option: str
    fits: bool
    users: int
    effect: str


def suggest(capacity: Capacity, context: int, users: int) -> tuple[Suggestion, ...]:
    """Returns what to change where `users` do not fit, best first.

    What makes them fit comes before what does not. Among those, what costs the model least comes first: a narrower
    cache, narrower weights, then more devices, another card, a shorter context, fewer users.
    """
    found = [*_narrower(capacity, context, users), *_more(capacity, context, users), *_less(capacity, context, users)]
    return tuple(sorted(found, key=lambda s: not s.fits))


def _suggestion(change: str, option: str, capacity: Capacity, context: int, wanted: int) -> Suggestion:
    users = int(min(capacity.users(context), 2**62)) if capacity.holds_weights else 0
    fits = users >= wanted
    weights = capacity.weight_bytes()
    effect = f"weights {weights / 1e9:,.1f} GB a device, {users:,} users of {context:,} tokens"
    if not capacity.holds_weights:
        effect = f"weights {weights / 1e9:,.1f} GB a device: still too much"
    return Suggestion(change=change, option=option, fits=fits, users=users, effect=effect)


def _narrower(capacity: Capacity, context: int, users: int) -> Iterator[Suggestion]:
    kv = capacity.kv_bytes > cache_bytes("fp8")
    if kv:
        changed = replace(capacity, kv_dtype="fp8")
        yield _suggestion("cache in 8 bits", "--kv-dtype fp8", changed, context, users)
    now = capacity.weight_bytes()
    for name, said in (("fp8:128", "weights in 8 bits"), ("int4:128", "weights in 4 bits")):
        changed = replace(capacity, precision=precision(name))
        if changed.weight_bytes() >= 0.95 * now:
            continue
        yield _suggestion(said, f"--dtype {name}", changed, context, users)
        if kv:
            both = replace(changed, kv_dtype="fp8")
            yield _suggestion(f"{said}, cache in 8", f"--dtype {name} --kv-dtype fp8", both, context, users)


def _more(capacity: Capacity, context: int, users: int) -> Iterator[Suggestion]:
    count = smallest_count(capacity, context, users)
    if count is not None and count > capacity.layout.gpus:
        changed = _with_gpus(capacity, count)
        assert changed is not None
        said = f"{count} devices: tp {changed.layout.tp}, pp {changed.layout.pp}"
        yield _suggestion(said, f"--gpus {count}", changed, context, users)
    card = smallest_card(capacity, context, users)
    if card is not None and card.memory_bytes() > capacity.machine.memory_bytes():
        changed = replace(capacity, machine=card, layout=Placement())
        yield _suggestion(f"one {card.name}", f"--gpu {card.name}", changed, context, users)


def _less(capacity: Capacity, context: int, users: int) -> Iterator[Suggestion]:
    if not capacity.holds_weights:
        return
    shorter = largest_context(capacity, users, context)
    if 0 < shorter < context:
        yield _suggestion(f"at most {shorter:,} tokens", f"--context {shorter}", capacity, shorter, users)
    fewer = int(min(capacity.users(context), users))
    if 0 < fewer < users:
        yield _suggestion(f"at most {fewer:,} users", f"--users {fewer}", capacity, context, fewer)

"""The inverse questions: the largest context and batch, the smallest card and count, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from asbuilt.catalog import machines
from asbuilt.catalog.machine import Machine, MemoryConvention
from asbuilt.errors import InputError
from asbuilt.plan.placement import Placement, served
from asbuilt.plan.precision import precision
from asbuilt.plan.serve.place import place
from asbuilt.plan.serve.roofline import Roofline
from asbuilt.plan.serve.tandem import simulate
from asbuilt.plan.serve.workload import Workload
from asbuilt.plan.suggestion import Suggestion
from asbuilt.spec.part import CacheFormat

MOST_USERS = 10**9
# Requests of a workload that is simulated for each change.
TRIED = 600
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def largest(holds: Callable[[int], bool], most: int) -> int:
    """Returns the largest number up to `most` for which `holds`, a monotonic predicate; 0 if there is none."""
    if most < 1 or not holds(1):
        return 0
    if holds(most):
        return most
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def least(holds: Callable[[int], bool], most: int) -> int | None:
    """Returns the least number up to `most` for which `holds`, a monotonic predicate, None if there is none."""
    high = 1
    while high < most and not holds(high):
        high *= 2
    high = min(high, most)
    if high < 1 or not holds(high):
        return None
    low = high // 2  # does not hold
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The requirements: a number of sequences, and limits in seconds for a step and a first token, None for no limit.

    `prompt` is the number of tokens before the first token, None for one chunk. A `workload` is held to the limits too.
    Other cards are of the same vendor unless `any_vendor`.
    """

    users: int
    latency: float | None = None
    first_token: float | None = None
    prompt: int | None = None
    workload: Workload | None = None
    any_vendor: bool = False

    @property
    def timed(self) -> bool:
        """Whether there is a time limit."""
        return self.latency is not None or self.first_token is not None

    def prompt_at(self, roofline: Roofline, context: int) -> int:
        """Returns the tokens of the prompt, for sequences of `context` tokens."""
        return min(context, roofline.capacity.chunk if self.prompt is None else self.prompt)

    def meets_targets(self, roofline: Roofline, context: int, users: int) -> bool:
        """Returns whether the step of `users` sequences and the first token of one meet their targets."""
        judged = roofline.judged
        if self.latency is not None and judged.decode(users, context).seconds > self.latency:
            return False
        prompt = self.prompt_at(roofline, context)
        return self.first_token is None or judged.first_token(prompt) <= self.first_token

    def met(self, roofline: Roofline, context: int) -> bool:
        """Returns whether the users fit and are served within the targets."""
        return running(roofline, context) >= self.users and self.meets_targets(roofline, context, self.users)

    def serves(self, roofline: Roofline) -> bool:
        """Returns whether the workload's rate is kept up and 95% of its requests are served within the targets."""
        if self.workload is None:
            return True
        few = replace(self.workload, requests=min(TRIED, self.workload.count(self.workload.users)))
        found = simulate(roofline.judged, few)
        if found is not None and found.sustained is None:  # too few to say, so as many as it takes
            found = simulate(roofline.judged, replace(self.workload, requests=None))
        return found is not None and found.meets(self.latency, self.first_token)


def running(roofline: Roofline, context: int) -> int | float:
    """Returns how many sequences fit and run at once; none where the devices that prefill do not fit one."""
    prefiller = roofline.prefiller
    return roofline.capacity.running(context) if prefiller is None or prefiller.capacity.running(context) else 0


def most_users(roofline: Roofline, goal: Goal, context: int) -> int:
    """Returns the largest number of sequences of `context` tokens, up to MOST_USERS, that fit within the targets."""
    room = int(min(running(roofline, context), MOST_USERS))
    return largest(lambda users: goal.meets_targets(roofline, context, users), room) if goal.timed else room


def largest_context(roofline: Roofline, goal: Goal, most: int) -> int:
    """Returns the most tokens per sequence, up to `most`, at which the goal is met."""
    return largest(lambda context: goal.met(roofline, context), most)


def smallest_count(roofline: Roofline, goal: Goal, context: int) -> int | None:
    """Returns the smallest of COUNTS of this machine that meets the goal with the default placement.

    For a workload it is the number of devices of the fewest copies of this placement that serve it.
    """
    if goal.workload is not None:
        own = roofline.capacity.layout.per_copy

        def meets(count: int) -> bool:
            at = copied(roofline, roofline.capacity.layout, count)
            return goal.met(at, context) and goal.serves(at)

        count = least(meets, max(1, COUNTS[-1] // own))
        return None if count is None else count * own
    capacity = roofline.capacity
    for count in COUNTS:
        if count * capacity.memory < capacity.alone.total_bytes:  # devices hold the weights once at least
            continue
        found = _with_gpus(roofline, count)
        if found is not None and goal.met(found, context) and goal.serves(found):
            return count
    return None


def copied(roofline: Roofline, copy: Placement, count: int) -> Roofline:
    """Returns the roofline of that many copies of the model, each with the degrees of `copy`."""
    layout = served(copy.per_copy * count, tp=copy.tp, pp=copy.pp, ep=copy.ep, redundant=copy.redundant)
    return _moved(roofline, roofline.capacity.machine, layout)


def _with_gpus(roofline: Roofline, count: int) -> Roofline | None:
    capacity = roofline.capacity
    if capacity.machine.slice_of:  # over which a model is not divided
        return copied(roofline, Placement(), count)
    try:
        layout = place(capacity.spec, gpus=count, tp=None, pp=None, ep=None, node=capacity.conventions.node)
    except InputError:
        return None
    return _moved(roofline, capacity.machine, layout)


def _moved(roofline: Roofline, machine: Machine, layout: Placement) -> Roofline:
    return replace(roofline, capacity=roofline.capacity.moved(machine, layout))


def smallest_card(roofline: Roofline, goal: Goal, context: int) -> Machine | None:
    """Returns the catalogue's accelerator with the least memory, of those the engine describes, that meets the goal."""
    for machine in _by_memory(roofline.conventions.memory):
        if not roofline.capacity.engine.describes(machine) or not _of_vendor(roofline, goal, machine):
            continue
        alone = _moved(roofline, machine, Placement())
        if _rated(alone) and goal.met(alone, context) and goal.serves(alone):
            return machine
    return None


def _of_vendor(roofline: Roofline, goal: Goal, machine: Machine) -> bool:
    """Returns whether the machine is of the same vendor, as far as that is known, or any was asked for."""
    vendor = roofline.capacity.machine.vendor
    return goal.any_vendor or not vendor or machine.vendor == vendor


def _rated(roofline: Roofline) -> bool:
    """Returns whether the machine's rate at this precision is known."""
    try:
        return bool(roofline.rates)
    except InputError:
        return False


@cache
def _by_memory(convention: MemoryConvention) -> list[Machine]:
    """Returns the catalogue's accelerators by ascending memory, and by speed if equal."""
    rows = [machine for machine in machines.MACHINES.values() if machine.kind == "accelerator"]
    return sorted(rows, key=lambda machine: (machine.memory_bytes(convention), -machine.bandwidth))


def suggest(
    roofline: Roofline, goal: Goal, context: int, *, count: int | None, card: Machine | None
) -> tuple[Suggestion, ...]:
    """Returns suggestions if the goal is not met, best first, of which `count` and `card` are known to meet it.

    Changes that suffice come before those that do not. Among them, the order is by impact: a narrower cache, narrower
    weights, then more devices, another card, a shorter context, fewer users.
    """
    found = [
        *_narrower(roofline, goal, context),
        *_more(roofline, goal, context, count, card),
        *_less(roofline, goal, context),
    ]
    return tuple(sorted(found, key=lambda s: not s.fits))


def _suggestion(change: str, option: str, roofline: Roofline, goal: Goal, context: int) -> Suggestion:
    every = [one for one in (roofline, roofline.prefiller) if one is not None]
    holds = all(one.capacity.holds_weights(context) for one in every)
    users = most_users(roofline, goal, context) if holds else 0
    weights = f"weights {roofline.capacity.weight_bytes() / 1e9:,.1f} GB a device"
    in_time = " within the targets" if goal.timed else ""
    fits = holds and users >= goal.users and goal.serves(roofline)
    if users >= goal.users and not fits:
        in_time += ", but not the workload"
    effect = f"{weights}, {users:,} users of {context:,} tokens{in_time}" if holds else f"{weights}: still does not fit"
    return Suggestion(change=change, option=option, fits=fits, users=users, effect=effect)


def _narrower(roofline: Roofline, goal: Goal, context: int) -> Iterator[Suggestion]:
    capacity = roofline.capacity
    one = capacity.kv_bytes
    kv = (one.each if isinstance(one, CacheFormat) else one) > 1
    if kv:
        changed = roofline.changed(kv_dtype="fp8")
        yield _suggestion("cache in 8 bits", "--kv-dtype fp8", changed, goal, context)
    now = capacity.weight_bytes()
    for name, said in (("fp8:128", "weights in 8 bits"), ("int4:128", "weights in 4 bits")):
        changed = roofline.changed(precision=precision(name))
        if changed.capacity.weight_bytes() >= 0.95 * now:
            continue
        yield _suggestion(said, f"--dtype {name}", changed, goal, context)
        if kv:
            both = changed.changed(kv_dtype="fp8")
            yield _suggestion(f"{said}, cache in 8", f"--dtype {name} --kv-dtype fp8", both, goal, context)


def _more(
    roofline: Roofline, goal: Goal, context: int, count: int | None, card: Machine | None
) -> Iterator[Suggestion]:
    if count is not None and count > roofline.capacity.layout.gpus:
        now, degrees = roofline.capacity.layout, ""
        if goal.workload is None:
            changed = _with_gpus(roofline, count)
            assert changed is not None
        else:
            changed, degrees = copied(roofline, now, count // now.per_copy), f" --tp {now.tp} --pp {now.pp}"
            degrees += f" --ep {now.ep}" if now.ep > 1 else ""
            degrees += f" --redundant-experts {now.redundant}" if now.redundant else ""
        layout = changed.capacity.layout
        said = f"{count} devices: tp {layout.tp}, pp {layout.pp}"
        yield _suggestion(said, f"--gpus {count}{degrees}", changed, goal, context)
    if card is not None and card != roofline.capacity.machine:
        changed = _moved(roofline, card, Placement())
        yield _suggestion(f"one {card.name}", f"--gpu {card.name}", changed, goal, context)


def _less(roofline: Roofline, goal: Goal, context: int) -> Iterator[Suggestion]:
    shorter = largest_context(roofline, goal, context) if goal.workload is None else 0
    if (goal.prompt or 1) <= shorter < context:
        yield _suggestion(f"at most {shorter:,} tokens", f"--context {shorter}", roofline, goal, shorter)
    fewer = min(most_users(roofline, goal, context), goal.users)
    if 0 < fewer < goal.users and goal.workload is None:
        less = replace(goal, users=fewer)
        yield _suggestion(f"at most {fewer:,} users", f"--users {fewer}", roofline, less, context)

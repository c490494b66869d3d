"""The answers that a serving plan is made of: a prompt's prefill, a step, caches, and what other conventions say."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from asbuilt.plan.placement import Placement
from asbuilt.plan.serve import limits
from asbuilt.plan.serve.capacity import Capacity
from asbuilt.plan.serve.conventions import MEANING
from asbuilt.plan.serve.pages import held_bytes
from asbuilt.plan.serve.roofline import Bound, Roofline, Run
from asbuilt.spec.part import CacheFormat

# The conventions that affect the number of users, and those that affect speed.
OF_USERS, OF_SPEED = ("memory", "windows", "count", "kernel"), ("embedding", "flops", "scores")
# Another convention's answer is printed if it differs by more than this fraction.
MATTERS = 0.005


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """One prompt alone: the minimum seconds to the first token, and the bottleneck."""

    prompt: int
    seconds: float
    bound: Bound
    run: Run


@dataclass(frozen=True, kw_only=True)
class Decode:
    """One step of `batch` sequences at the context: minimum seconds, maximum tokens/s, bottleneck, either roof."""

    batch: int
    seconds_per_step: float
    overlapped_seconds: float
    tokens_per_second: float
    tokens_per_second_per_user: float
    memory_tokens_per_second: float
    compute_tokens_per_second: float
    bound: Bound
    run: Run


@dataclass(frozen=True, kw_only=True)
class Caches:
    """Bytes of one sequence's cache on all devices of a copy: theoretical minimum, asbuilt's, a paged engine's."""

    minimum: int
    object: int
    paged: int


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The answer with another setting of one convention, if different."""

    switch: str
    value: str
    users: int
    tokens_per_second: float
    meaning: str


def prefill(roofline: Roofline, prompt: int) -> Prefill:
    """Returns the prefill of one prompt alone."""
    run = roofline.prefill(prompt)
    return Prefill(prompt=prompt, seconds=run.seconds, bound=run.bound, run=run)


def decode(roofline: Roofline, batch: int, context: int) -> Decode:
    """Returns the step in which `batch` sequences reach `context` tokens."""
    run = roofline.decode(batch, context)
    seconds = run.seconds
    return Decode(
        batch=batch,
        seconds_per_step=seconds,
        overlapped_seconds=run.overlapped_seconds,
        tokens_per_second=batch / seconds,
        tokens_per_second_per_user=1 / seconds,
        memory_tokens_per_second=batch / run.memory_seconds,
        compute_tokens_per_second=batch / run.compute_seconds,
        bound=run.bound,
        run=run,
    )


def caches(capacity: Capacity, context: int) -> Caches:
    """Returns the caches of the whole model: a cache that is replicated on devices counts once."""
    alone = replace(capacity, layout=Placement(), offload=None).device.stages[0]
    numbers, c = alone.folds.cache_numbers(context), capacity.conventions
    paged = held_bytes(alone, context, replace(capacity.pages, block=c.block_size), capacity.kv_bytes, capacity.width)
    own = capacity.kv_bytes if isinstance(capacity.kv_bytes, CacheFormat) else capacity.precision.width
    return Caches(
        minimum=math.ceil(numbers.nbytes(capacity.kv_bytes)),
        object=math.ceil(numbers.nbytes(own)),
        paged=math.ceil(paged),
    )


def alternatives(
    roofline: Roofline, goal: limits.Goal, context: int, users: int, step: Decode
) -> tuple[Alternative, ...]:
    """Returns the answers with every other setting of a convention that change users or tokens/s of the step."""
    now, found = roofline.conventions, []
    for switch, value, other in now.others((*OF_USERS, *OF_SPEED)):
        changed = roofline.changed(conventions=other)
        then, speed = users, step.tokens_per_second
        if switch in OF_USERS or goal.timed:
            then = limits.most_users(changed, goal, context)
        if switch in OF_SPEED:
            speed = step.batch / changed.decode(step.batch, context).seconds
        if then != users or abs(speed / step.tokens_per_second - 1) > MATTERS:
            found.append(
                Alternative(
                    switch=switch, value=value, users=then, tokens_per_second=speed, meaning=MEANING[switch][value]
                )
            )
    return tuple(found)

"""Users and memory by context, and by format of weights and cache: what a plan is asked first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from asbuilt.plan.precision import Precision, precision
from asbuilt.plan.serve.capacity import Capacity

CONTEXTS = (4096, 8192, 32768, 131072)
WEIGHTS = ("bf16", "fp8:128", "int4:128")
CACHES = ("bf16", "fp8")
# Formats whose weights differ by less than this share are one row.
ALIKE = 0.05


@dataclass(frozen=True, kw_only=True)
class Row:
    """One format of weights and cache: bytes of weights on the fullest device, and by context users and bytes of one.

    The bytes of a user's cache are those on one device, of the stage with the least room.
    """

    weights: str
    cache: str
    weight_bytes: int
    users: tuple[int, ...]
    user_bytes: tuple[int, ...]


def contexts(capacity: Capacity, asked: int) -> tuple[int, ...]:
    """Returns the contexts of the columns: the usual ones that the model has, and the one asked for."""
    return tuple(sorted({asked, *(n for n in CONTEXTS if n <= capacity.spec.max_positions)}))


def rows(capacity: Capacity, asked: int) -> Iterator[Row]:
    """Yields the format that was asked for, then the others that differ from it."""
    seen: list[tuple[int, str]] = []
    caches = dict.fromkeys([capacity.kv_dtype, *CACHES])
    for held in _precisions(capacity):
        for cache in caches:
            one = replace(capacity, precision=held, kv_dtype=cache)
            weights = one.weight_bytes()
            if any(kv == cache and abs(weights - other) < ALIKE * other for other, kv in seen):
                continue
            seen.append((weights, cache))
            yield _row(one, asked)


def _precisions(capacity: Capacity) -> Iterator[Precision]:
    yield capacity.precision
    for name in WEIGHTS:
        if name != capacity.precision.name:
            yield precision(name)


def _row(capacity: Capacity, asked: int) -> Row:
    columns = contexts(capacity, asked)
    stages = [capacity.tightest(n) for n in columns]
    return Row(
        weights=capacity.precision.name,
        cache=capacity.kv_dtype,
        weight_bytes=capacity.weight_bytes(),
        users=tuple(int(min(capacity.running(n), 10**9)) for n in columns),
        user_bytes=tuple(capacity.per_user(stage, n) for stage, n in zip(stages, columns, strict=True)),
    )

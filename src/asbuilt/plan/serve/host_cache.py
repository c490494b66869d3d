"""A second, larger cache in host memory, for sequences that wait: how many it holds, and the time to bring one back.

Each device of a copy of the model sends its own share over its own bus, so a sequence takes as long as the device with
the most of it. What is brought back is not computed again; the time of that stands beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asbuilt.errors import InputError
from asbuilt.plan.render import Cell, Table
from asbuilt.plan.serve.expected import LEVELS, Level
from asbuilt.plan.serve.roofline import Roofline
from asbuilt.shown import size, time

if TYPE_CHECKING:
    from asbuilt.plan.serve.plan import ServePlan

LARGEST = 1e15


@dataclass(frozen=True, kw_only=True)
class HostCache:
    """`nbytes` of host memory for the caches of one copy: bytes of a sequence in all and on the fullest device.

    `seconds` are those to bring a sequence of `context` tokens back, at least and by level; `computing` those to
    prefill it instead.
    """

    nbytes: int
    context: int
    sequence: int
    on_device: int
    seconds: float
    expected: dict[Level, float]
    computing: float
    expected_computing: dict[Level, float]

    @property
    def sequences(self) -> int:
        """How many whole sequences are held."""
        return self.nbytes // self.sequence

    @property
    def tokens(self) -> int:
        """How many tokens are held, in sequences of the context."""
        return self.nbytes * self.context // self.sequence


def host_cache(roofline: Roofline, nbytes: float, context: int) -> HostCache:
    """Returns the cache; raises InputError where the model keeps none, and where there is no host memory beside it."""
    capacity, machine = roofline.capacity, roofline.capacity.machine
    if not 0 < nbytes <= LARGEST:
        raise InputError(field="kv-host", value=nbytes, allowed="a size above 0, such as 64GiB")
    if machine.kind == "cpu" or machine.shared_memory:
        raise InputError(f"{machine.name} has no memory beside the host's", field="kv-host", fix="leave it out")
    if capacity.offload is not None:
        raise InputError("is not planned with layers in host memory", field="kv-host", fix="leave one of them out")
    shares = [(capacity.per_user(stage, context), stage.stage.count) for stage in capacity.device.stages]
    whole = capacity.layout.tp * sum(nbytes * count for nbytes, count in shares)
    if not whole:
        raise InputError("the model has no cache", field="kv-host", value=nbytes, fix="leave it out")
    most = max(nbytes for nbytes, _ in shares)
    host = roofline.conventions.host
    rates: dict[Level, Roofline] = {level: roofline.at(level) for level in LEVELS}
    return HostCache(
        nbytes=math.floor(nbytes),
        context=context,
        sequence=whole,
        on_device=most,
        seconds=most / host,
        expected={level: most / (host * at.reached.link) for level, at in rates.items()},
        computing=roofline.prefill(context).seconds,
        expected_computing={level: at.prefill(context).seconds for level, at in rates.items()},
    )


def plain(plan: ServePlan) -> dict[str, Any] | None:
    """Returns the cache in host memory as plain data, None without one."""
    found = plan.host_cache
    if found is None:
        return None
    return {
        "bytes": found.nbytes,
        "bytes_of_a_sequence": found.sequence,
        "bytes_on_a_device": found.on_device,
        "sequences": found.sequences,
        "tokens": found.tokens,
        "seconds": found.seconds,
        "expected": found.expected,
        "prefill_seconds": found.computing,
        "expected_prefill": found.expected_computing,
        "bus_bytes_per_second": plan.conventions.host,
    }


def table(plan: ServePlan) -> Table:
    """Returns what host memory caches; no rows without."""
    found = plan.host_cache
    if found is None:
        return Table("", (), [])
    rows: list[tuple[Cell, ...]] = [
        ("sequences of a copy", f"{found.sequences:,}", f"{size(found.nbytes)} over {size(found.sequence)}"),
        ("tokens", f"{found.tokens:,}", ""),
        (
            "to bring one back",
            _times(found.expected),
            f"minimum {time(found.seconds)}, {size(found.on_device)} a device",
        ),
        ("to compute it again", _times(found.expected_computing), f"minimum {time(found.computing)}"),
    ]
    return Table(f"Cache in host memory, sequences of {plan.context:,} tokens", ("", "expected", "from"), rows)


def _times(seconds: dict[Level, float]) -> str:
    slow, middle, fast = (seconds[level] for level in LEVELS)
    return f"{time(middle)} ({time(fast)} to {time(slow)})"

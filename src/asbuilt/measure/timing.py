"""The clock for all timings, and the share of the machine that other processes use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

# Called as `timing.clock()`, so that a test can replace it.
clock: Callable[[], float] = time.perf_counter

STAT = Path("/proc/stat")
# Columns of /proc/stat: user, nice, system, irq, softirq and steal, without idle and iowait; user includes guests.
BUSY_FIELDS = (1, 2, 3, 6, 7, 8)


def seconds(work: Callable[[], object]) -> float:
    """Returns the seconds of one call of `work`."""
    start = clock()
    work()
    return clock() - start


class Others:
    """The CPU time that other processes have used, on the CPUs available to this one, since its construction."""

    def __init__(self) -> None:
        self.start, self.busy, self.own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def share(self) -> float | None:
        """Returns their share, 0 to 1; None if the system does not report it."""
        elapsed, busy = time.perf_counter() - self.start, _busy_seconds()
        if busy is None or self.busy is None or elapsed <= 0:
            return None
        theirs = (busy - self.busy) - (_own_seconds() - self.own)
        return min(1.0, max(0.0, theirs / (elapsed * len(_processors()))))


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _processors() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _busy_seconds() -> float | None:
    """Returns the busy seconds, since boot, of the CPUs available to this process."""
    try:
        lines = [line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu")]
        ticks = os.sysconf("SC_CLK_TCK")
        wanted = {f"cpu{number}" for number in _processors()}
        found = [sum(int(line[field]) for field in BUSY_FIELDS) for line in lines if line[0] in wanted]
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return sum(found) / ticks if len(found) == len(wanted) else None

"""How much memory this process may use: the least of the machine's, the container's and the resource limit's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
UNLIMITED = 1 << 60  # cgroups v1 reports "no limit" as a slightly larger number


def total() -> int | None:
    """Returns the total memory in bytes; None where the system does not report it (Windows)."""
    return _least(_physical(), _container(), _limit())


def free() -> int | None:
    """Returns the bytes available without paging, reclaimable file cache included; None if unknown."""
    return _least(_available(), total())


def _least(*found: int | None) -> int | None:
    return min((value for value in found if value is not None), default=None)


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # an unknown name, or Windows, which has no sysconf
        return None


def _available() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _container() -> int | None:
    for path in CGROUPS:
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return limit if limit < UNLIMITED else None
    return None


def _limit() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit

"""How long loading a model takes, and how much memory at most.

The peak is the kernel's own (VmHWM, reset before where that is allowed), so that nothing is missed. It counts pages of
mapped files, which the system can drop: those are said apart. Where the system has no such counters, or the process was
larger before, only the time is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asbuilt.measure import timing
from asbuilt.measure.run import weight_bytes
from asbuilt.nn.model import Model
from asbuilt.shown import number, size

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SLACK = 2**20  # bytes by which the counters, which each CPU keeps for itself, may be behind


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Seconds from opened headers to a model that can run, and bytes of its weights.

    `peak_bytes` is by how much the process grew at most meanwhile, `mapped_bytes` how much of that were pages of mapped
    files, at the end; None where the system does not say.
    """

    seconds: float
    weight_bytes: int
    peak_bytes: int | None = None
    mapped_bytes: int | None = None

    def document(self) -> dict[str, Any]:
        """Returns it as plain data; `ratio` is the peak without mapped pages, in bytes of weights."""
        return asdict(self) | {"ratio": self.ratio}

    @property
    def ratio(self) -> float | None:
        """The peak without pages of mapped files, divided by the weights' bytes."""
        if self.peak_bytes is None or self.mapped_bytes is None:
            return None
        return (self.peak_bytes - self.mapped_bytes) / self.weight_bytes

    def __str__(self) -> str:
        told = f"loaded in {number(self.seconds, 3)} s"
        if self.ratio is None or self.peak_bytes is None:
            return told
        mapped = f", {size(self.mapped_bytes)} of it pages of mapped files" if self.mapped_bytes else ""
        ratio = f"{self.ratio:.2f} times the weights' {size(self.weight_bytes)}"
        return f"{told}, with at most {size(self.peak_bytes)} more memory{mapped}: {ratio}"


def loaded(load: Callable[[], Model]) -> tuple[Model, Loading]:
    """Returns the model that `load` returns, and what loading took."""
    before = _reset()
    began = timing.clock()
    model = load()
    seconds = timing.clock() - began
    after = None if before is None else _status()
    found: dict[str, int] = {}
    if before is not None and after is not None:
        fresh = before["VmHWM"] - before["VmRSS"] < SLACK or after["VmHWM"] > before["VmHWM"]
        if fresh:
            found["peak_bytes"] = max(0, after["VmHWM"] - before["VmRSS"])
            found["mapped_bytes"] = max(0, after["RssFile"] - before["RssFile"])
    return model, Loading(seconds=seconds, weight_bytes=weight_bytes(model), **found)


def _reset() -> dict[str, int] | None:
    """Has the kernel begin a new peak, where it lets us; returns what the process holds, None if it does not say."""
    with contextlib.suppress(OSError):
        RESET.write_text("5")
    return _status()


def _status() -> dict[str, int] | None:
    """Returns the bytes of the process: resident, of files, and the peak."""
    try:
        lines = STATUS.read_text().splitlines()
        found = {name: text for name, _, text in (line.partition(":") for line in lines)}
        return {name: 1024 * int(found[name].split()[0]) for name in ("VmHWM", "VmRSS", "RssFile")}
    except (OSError, KeyError, IndexError, ValueError):
        return None

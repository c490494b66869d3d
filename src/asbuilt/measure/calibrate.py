"""What this machine can do, kept in a cache between runs: measured by `micro`, which never runs the model.

A machine is not always as fast as it was: it may have been busy when it was calibrated, or be busy now. So what is
kept also holds how long a small model's step and prefill took then, and it is used only where they take as long now.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from asbuilt.errors import InputError
from asbuilt.files import read_object
from asbuilt.measure import micro
from asbuilt.measure.rates import DTYPES, Calibration, Line, Rates, Table

Say = Callable[[str], None]

VERSION = 11
# How many times slower or faster a probe may be than when the machine was calibrated: as a predicted speed may miss by.
DRIFT = 1.2
LOOKS = 4  # before it is believed: a neighbour may take a machine for seconds
LARGEST = 1 << 20  # bytes of a calibration file; one takes 20 kB


def machine() -> dict[str, str | int | float]:
    """Returns what identifies this machine and the software that runs on it."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _memory(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{sys.platform} {platform.machine()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def cache_path() -> Path | None:
    """Returns where this machine's calibration is kept: `$XDG_CACHE_HOME/asbuilt`, else `~/.cache/asbuilt`.

    None without a home. A relative XDG_CACHE_HOME is ignored, as its specification asks.
    """
    said = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        base = said if said.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    key = hashlib.sha256(json.dumps([VERSION, machine()], sort_keys=True).encode()).hexdigest()[:16]
    return base / "asbuilt" / f"calibration-{key}.json"


def calibrate(*, refresh: bool = False, say: Say = lambda text: None, warn: Say = lambda text: None) -> Calibration:
    """Returns this machine's calibration: the kept one where the machine still runs at that speed, else a fresh one.

    Takes a few seconds, or half a minute where it measures anew. `say` hears of progress, `warn` of what the user
    should know: a cache that cannot be used, or a machine whose speed changes faster than it can be measured.
    """
    path = cache_path()
    kept = None if refresh or path is None else _read(path, warn)
    if kept is not None:
        say("checking this machine's calibration")
        drift = drift_now(kept)
        if drift <= DRIFT:
            return kept
        say(f"this machine's speed differs {drift:.2f} times from when it was calibrated")
    say("calibrating this machine")
    with torch.inference_mode():
        fresh = micro.measured(machine())
    drift = drift_now(fresh)
    if drift > DRIFT:
        warn(f"this machine's speed changed {drift:.2f} times while it was calibrated: speeds may be missed by as much")
    elif path is not None:
        _write(path, fresh, warn)
    return fresh


def drift_now(calibration: Calibration) -> float:
    """Returns how many times slower or faster the machine is than when it was calibrated, at best of a few looks."""
    drifts = []
    with torch.inference_mode():
        probe = micro.Probe()
        for _ in range(LOOKS):
            drifts.append(calibration.drift(probe()))
            if drifts[-1] <= DRIFT:
                break
    return min(drifts)


def _read(path: Path, warn: Say) -> Calibration | None:
    """Returns the calibration kept in a file, None where there is none or it is none; says so in the second case."""
    try:
        path.lstat()
    except OSError:
        return None
    try:
        return _calibration(read_object(path, LARGEST))
    except (InputError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        warn(f"{path} is no calibration of this machine: it is measured anew")
        return None


def _calibration(plain: dict[str, Any]) -> Calibration:
    """Returns a calibration of plain data; raises one of the exceptions above for anything else."""
    rates = {name: _rates(kinds) for name, kinds in plain.pop("rates").items()}
    found = Calibration(rates=rates, **plain)
    probes = {"reading", *(f"{name} {kind}" for name in DTYPES for kind in micro.KINDS)}
    _require(found.machine == machine() and found.rates.keys() == DTYPES.keys() and found.probes.keys() == probes)
    _require_positive(found.read_bandwidth, *found.probes.values())
    _require(found.others is None or 0 <= found.others <= 1)
    return found


def _rates(plain: dict[str, Any]) -> Rates:
    tables = {name: _table(plain.pop(name), axes) for name, axes in micro.GRIDS.items()}
    lines = {name: Line(**line) for name, line in plain.pop("lines").items()}
    stacks = plain.pop("between")
    between = _table(stacks, tuple(tuple(axis) for axis in stacks["axes"]))
    _require(len(between.axes) == 1 and len(between.axes[0]) == len(micro.STACKS))
    _require_positive(*between.axes[0])
    _require(tuple(sorted(set(between.axes[0]))) == between.axes[0])
    found = Rates(**tables, lines=lines, between=between, **plain)
    _require(lines.keys() == micro.LINES.keys())
    _require_positive(found.product_rate, found.row_rate, *(line.rate for line in lines.values()))
    _require_positive(*(line.start for line in lines.values()))
    return found


def _table(plain: dict[str, Any], axes: tuple[tuple[int, ...], ...]) -> Table:
    seconds = tuple(plain["seconds"])
    _require(tuple(map(tuple, plain["axes"])) == axes and len(seconds) == math.prod(map(len, axes)))
    _require_positive(*seconds)
    return Table(axes=axes, seconds=seconds)


def _require(right: bool) -> None:
    if not right:
        raise ValueError("no calibration")


def _require_positive(*numbers: float) -> None:
    _require(all(type(number) in (int, float) and 0 < number < math.inf for number in numbers))


def _write(path: Path, fresh: Calibration, warn: Say) -> None:
    """Keeps a calibration: written aside, then renamed. A cache that cannot be written to costs one in every run."""
    aside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".calibration-", delete=False) as file:
            aside = Path(file.name)
            json.dump(asdict(fresh), file, indent=1)
        aside.replace(path)
    except OSError as error:
        if aside is not None:
            aside.unlink(missing_ok=True)
        warn(f"the calibration cannot be kept in {path.parent} ({error.strerror}): it is measured in every run")

"""This machine's speed, cached between runs: measured by `micro`, which never runs the model in question.

A machine's speed varies: it may have been busy when it was calibrated, or be busy now. So the cache also stores how
long a small model's step and prefill took then, and is used only if they take as long now.
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
from asbuilt.kernels import native
from asbuilt.measure import micro
from asbuilt.measure.rates import DTYPES, Calibration, LinearTime, Rates, TimeGrid

Say = Callable[[str], None]

VERSION = 12
# How many times slower or faster a probe may be than at calibration: the tolerance of a predicted speed.
DRIFT = 1.2
LOOKS = 4  # probes before a drift is believed: other processes may slow a machine down for seconds
LARGEST = 1 << 20  # bytes of a calibration file; one takes 20 kB


def machine() -> dict[str, str | int | float]:
    """Returns what identifies this machine and its software."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "native": native.instructions() or "none",
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
    """Returns the folder of the cached calibration: `$XDG_CACHE_HOME/asbuilt`, else `~/.cache/asbuilt`.

    None without a home directory. A relative XDG_CACHE_HOME is ignored, as its specification demands.
    """
    said = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        base = said if said.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    key = hashlib.sha256(json.dumps([VERSION, machine()], sort_keys=True).encode()).hexdigest()[:16]
    return base / "asbuilt" / f"calibration-{key}.json"


def calibrate(*, refresh: bool = False, say: Say = lambda text: None, warn: Say = lambda text: None) -> Calibration:
    """Returns this machine's calibration: the cached one if the machine still runs at that speed, else a fresh one.

    Takes a few seconds, or half a minute for a fresh one. `say` is called with progress, `warn` with what the user
    should know: a cache that cannot be used, or a machine whose speed changes faster than it can be measured.
    """
    path = cache_path()
    kept = None if refresh or path is None else _read(path, warn)
    if kept is not None:
        say("checking this machine's calibration")
        drift = drift_now(kept)
        if drift <= DRIFT:
            return kept
        say(f"this machine's speed has changed by a factor of {drift:.2f} since it was calibrated")
    say("calibrating this machine")
    with torch.inference_mode():
        fresh = micro.measured(machine())
    drift = drift_now(fresh)
    if drift > DRIFT:
        warn(f"this machine's speed changed by a factor of {drift:.2f} during calibration: speeds may be as far off")
    elif path is not None:
        _write(path, fresh, warn)
    return fresh


def stored() -> Calibration | None:
    """Returns this machine's cached calibration, whether or not it still runs at that speed; None without one."""
    path = cache_path()
    return None if path is None else _read(path, lambda text: None)


def drift_now(calibration: Calibration) -> float:
    """Returns how many times slower or faster the machine is than at calibration, the best of a few probes."""
    drifts = []
    with torch.inference_mode():
        probe = micro.Probe()
        for _ in range(LOOKS):
            drifts.append(calibration.drift(probe()))
            if drifts[-1] <= DRIFT:
                break
    return min(drifts)


def _read(path: Path, warn: Say) -> Calibration | None:
    """Returns the calibration in a file, None if there is no file or, with a warning, if it is invalid."""
    try:
        path.lstat()
    except OSError:
        return None
    try:
        return _calibration(read_object(path, LARGEST))
    except (InputError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        warn(f"{path} is not a calibration of this machine: calibrating again")
        return None


def _calibration(plain: dict[str, Any]) -> Calibration:
    """Returns the calibration that plain data describe; raises one of the exceptions above for anything else."""
    rates = {name: _rates(kinds) for name, kinds in plain.pop("rates").items()}
    found = Calibration(rates=rates, **plain)
    probes = {"reading", *(f"{name} {kind}" for name in DTYPES for kind in micro.KINDS)}
    _require(found.machine == machine() and found.rates.keys() == DTYPES.keys() and found.probes.keys() == probes)
    _require_positive(found.read_bandwidth, *found.probes.values())
    _require(found.others is None or 0 <= found.others <= 1)
    return found


def _rates(plain: dict[str, Any]) -> Rates:
    tables = {name: _table(plain.pop(name), axes) for name, axes in micro.GRIDS.items()}
    lines = {name: LinearTime(**line) for name, line in plain.pop("lines").items()}
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


def _table(plain: dict[str, Any], axes: tuple[tuple[int, ...], ...]) -> TimeGrid:
    seconds = tuple(plain["seconds"])
    _require(tuple(map(tuple, plain["axes"])) == axes and len(seconds) == math.prod(map(len, axes)))
    _require_positive(*seconds)
    return TimeGrid(axes=axes, seconds=seconds)


def _require(right: bool) -> None:
    if not right:
        raise ValueError("not a calibration")


def _require_positive(*numbers: float) -> None:
    _require(all(type(number) in (int, float) and 0 < number < math.inf for number in numbers))


def _write(path: Path, fresh: Calibration, warn: Say) -> None:
    """Writes a calibration atomically. Without a writable cache, every run calibrates again."""
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
        warn(f"the calibration cannot be cached in {path.parent} ({error.strerror}): every run calibrates again")

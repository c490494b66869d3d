"""What this machine can do, kept in a cache between runs: measured by `micro`, which never runs the model."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from asbuilt.measure import micro
from asbuilt.measure.rates import Calibration, Line, Rates, Table

VERSION = 8


def machine() -> dict[str, str | int | float]:
    """Returns what identifies this machine and the software that runs on it."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
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


def cache_path() -> Path:
    """Returns where this machine's calibration is kept: `$XDG_CACHE_HOME/asbuilt`, else `~/.cache/asbuilt`."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = hashlib.sha256(json.dumps([VERSION, machine()], sort_keys=True).encode()).hexdigest()[:16]
    return base / "asbuilt" / f"calibration-{key}.json"


def calibrate(*, refresh: bool = False, say: Callable[[str], None] = lambda text: None) -> Calibration:
    """Returns this machine's calibration, measured now unless it was before; takes a few seconds."""
    path = cache_path()
    if not refresh and (kept := _read(path)) is not None:
        return kept
    say("calibrating this machine")
    with torch.inference_mode():
        fresh = micro.measured(machine())
    _write(path, fresh)
    return fresh


def _read(path: Path) -> Calibration | None:
    try:
        plain = json.loads(path.read_text())
        rates = {name: Rates(**{kind: _plain(value) for kind, value in kinds.items()})
                 for name, kinds in plain.pop("rates").items()}  # fmt: skip
        return Calibration(rates=rates, **plain)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # absent, or written by another version: measure again


def _plain(value: Any) -> Any:  # noqa: ANN401
    """A table, lines or a number, of what the file has."""
    if not isinstance(value, dict):
        return float(value)
    if "axes" in value:
        return Table(axes=tuple(map(tuple, value["axes"])), seconds=tuple(value["seconds"]))
    return {name: Line(**line) for name, line in value.items()}


def _write(path: Path, fresh: Calibration) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        aside.write_text(json.dumps(asdict(fresh), indent=1))
        aside.replace(path)
    except OSError:
        return  # a home that cannot be written to costs a calibration per run, nothing else

"""What this machine can do, from micro-benchmarks that never run a model; kept in a cache between runs.

Every kind of work gets a line `seconds = start + amount / rate`, fitted through two amounts. The shapes are fixed here
and belong to no model. What a small call costs is measured between products that read whole matrices, as it is made in
a decode step: with the processor's caches full of weights it takes several times what it takes in a loop of its own.
Times are lower quartiles, as the measured ones are, since a shared machine is slower than itself half of the time.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.rows import row_products

VERSION = 6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REPEATS = 15


@dataclass(frozen=True)
class Line:
    """seconds = start + amount / rate; the amount is in bytes or FLOPs."""

    start: float
    rate: float

    def seconds(self, amount: float) -> float:
        """Returns the predicted time."""
        return self.start + amount / self.rate


@dataclass(frozen=True)
class Rates:
    """One dtype's lines: one row times a matrix and elementwise work by bytes, matrices and attention by FLOPs."""

    vector: Line
    matrix: Line
    attention: Line
    attention_read: Line
    arithmetic: Line
    transcendental: Line


@dataclass(frozen=True)
class Calibration:
    """The machine, its read bandwidth in bytes/s, and what a call that only looks and a module's entry cost."""

    machine: dict[str, str | int | float]
    read_bandwidth: float
    view_seconds: float
    module_seconds: float
    rates: dict[str, Rates]


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
        fresh = _measure()
    _write(path, fresh)
    return fresh


def _read(path: Path) -> Calibration | None:
    try:
        plain = json.loads(path.read_text())
        rates = {
            name: Rates(**{kind: Line(**line) for kind, line in lines.items()})
            for name, lines in plain.pop("rates").items()
        }
        return Calibration(rates=rates, **plain)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # absent, or written by another version: measure again


def _write(path: Path, fresh: Calibration) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        aside.write_text(json.dumps(asdict(fresh), indent=1))
        aside.replace(path)
    except OSError:
        return  # a home that cannot be written to costs a calibration per run, nothing else


def seconds(work: Callable[[], object], *, at_least: float = 0.02) -> float:
    """Returns the mean time of one call: the lower quartile of REPEATS batches of `at_least` seconds each."""
    work()
    start = time.perf_counter()
    work()
    count = max(1, int(at_least / max(time.perf_counter() - start, 1e-7)))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(count):
            work()
        times.append((time.perf_counter() - start) / count)
    return quarter(times)


def quarter(times: list[float]) -> float:
    """Returns what a quarter of the times stay below: the machine as it mostly is when its neighbours let it."""
    return statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]


def _measure() -> Calibration:
    tiny, module = torch.ones(8, 8), torch.nn.Identity()
    return Calibration(
        machine=machine(),
        read_bandwidth=_read_bandwidth(),
        view_seconds=_between_products(torch.float32, [lambda: tiny.transpose(0, 1), lambda: tiny.view(64)]),
        module_seconds=_between_products(torch.float32, [lambda: module(tiny)] * 2),
        rates={name: _rates(dtype) for name, dtype in DTYPES.items()},
    )


def _between_products(dtype: torch.dtype, calls: list[Callable[[], object]]) -> float:
    """Returns the mean time of the calls, made one after the other between products of a row with a matrix."""
    x = torch.ones(1, 768, dtype=dtype)
    weight = _pool(lambda: torch.ones(1024, 768, dtype=dtype))
    spent, count = [], 200
    with row_products(x, 1):
        for _ in range(count):
            F.linear(x, weight())
            start = time.perf_counter()
            for call in calls:
                call()
            spent.append((time.perf_counter() - start) / len(calls))
    return statistics.median(spent)


def _read_bandwidth() -> float:
    block = torch.ones(64 * 2**20)
    return block.nbytes / seconds(block.sum)


def _rates(dtype: torch.dtype) -> Rates:
    return Rates(
        vector=_fit(*(_vector(dtype, n, 768) for n in (768, 6144))),
        matrix=_fit(*(_matrix(dtype, n) for n in (512, 2048))),
        attention=_fit(*(_attention(dtype, n) for n in (128, 512))),
        attention_read=_fit(*(_attention_read(dtype, n) for n in (64, 2048))),
        arithmetic=_elementwise(dtype, [lambda x: x * x, lambda x: x + x, lambda x: x.roll(8, -1), lambda x: x * 0.5]),
        transcendental=_elementwise(dtype, [F.silu, torch.exp, torch.rsqrt]),
    )


def _fit(small: tuple[float, float], large: tuple[float, float]) -> Line:
    (less, fast), (more, slow) = small, large
    rate = (more - less) / max(slow - fast, 1e-12)
    return Line(start=max(0.0, fast - less / rate), rate=rate)


def _pool(make: Callable[[], Tensor], nbytes: int = 300 * 2**20) -> Callable[[], Tensor]:
    """Returns a source of tensors that together outgrow every cache, so that each comes from memory."""
    first = make()
    tensors = [first, *(make() for _ in range(min(512, nbytes // first.nbytes)))]
    at = iter(range(0))

    def following() -> Tensor:
        nonlocal at
        i = next(at, None)
        if i is None:
            at = iter(range(len(tensors)))
            i = next(at)
        return tensors[i]

    return following


def _vector(dtype: torch.dtype, out: int, inside: int) -> tuple[float, float]:
    x = torch.ones(1, inside, dtype=dtype)
    weight = _pool(lambda: torch.ones(out, inside, dtype=dtype))
    with row_products(x, 1):
        return out * inside * x.element_size(), seconds(lambda: F.linear(x, weight()))


def _matrix(dtype: torch.dtype, out: int, rows: int = 512, inside: int = 768) -> tuple[float, float]:
    x, weight = torch.ones(rows, inside, dtype=dtype), torch.ones(out, inside, dtype=dtype)
    return 2 * rows * inside * out, seconds(lambda: F.linear(x, weight))


def _attention(dtype: torch.dtype, tokens: int, heads: int = 8, width: int = 64) -> tuple[float, float]:
    q = torch.ones(1, heads, tokens, width, dtype=dtype)
    return 4 * heads * width * tokens**2, seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))


def _attention_read(dtype: torch.dtype, keys: int, heads: int = 4, width: int = 64) -> tuple[float, float]:
    q, k = torch.ones(1, heads, 3, width, dtype=dtype), torch.ones(1, heads, keys, width, dtype=dtype)
    return 2 * k.nbytes, seconds(lambda: F.scaled_dot_product_attention(q, k, k))


def _elementwise(dtype: torch.dtype, works: list[Callable[[Tensor], Tensor]], numbers: int = 2**20) -> Line:
    small, large = torch.ones(768, dtype=dtype), torch.ones(numbers, dtype=dtype)
    start = _between_products(dtype, [lambda work=work: work(small) for work in works])
    return Line(start=start, rate=2 * large.nbytes / seconds(lambda: works[0](large)))

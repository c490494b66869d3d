"""The measured speed of products in each dtype on this CPU: without bf16 instructions they are emulated.

With AVX2 alone a product in bf16 takes about six times as long as in float32; with AVX-512 or AMX for bf16 it takes
half. A product of a single row is different: it is memory-bound, and a narrow dtype has half the bytes to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from asbuilt.dtypes import BLOCKS
from asbuilt.kernels import native
from asbuilt.kernels.rows import POOL, SHAPE, linear, row_products

# Tokens of the timed prefill, and repetitions of each product: a few tens of milliseconds in total.
ROWS, ROUNDS = 32, 4
CPUINFO = Path("/proc/cpuinfo")
# Flags of processors, x86-64 and ARM, that have instructions for products in a dtype.
FLAGS = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16", "svebf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
}
Calls = tuple[Callable[[], object], Callable[[], object]]


@dataclass(frozen=True)
class Speed:
    """Seconds of one matrix product per token of a prefill, and per decode step."""

    prefill: float
    decode: float

    def seconds(self, prompt_tokens: int, new_tokens: int) -> float:
        """Returns the matrix's seconds for a whole request, to compare dtypes."""
        return prompt_tokens * self.prefill + new_tokens * self.decode


@cache
def speeds(dtypes: tuple[torch.dtype, ...]) -> tuple[Speed, ...]:
    """Returns the speed of each dtype on one CPU thread, measured once per process.

    The dtypes alternate, and the shortest time of each counts, since other work on the machine can only add to it. One
    thread is used because several would mostly wait for each other on a busy machine.
    """
    with torch.inference_mode(), one_thread():
        return _measured([_calls(dtype) for dtype in dtypes])


@cache
def packed_speeds(format: str) -> tuple[Speed, Speed]:
    """Returns the speed of the native kernels with blocks of a format, and of float32, as `speeds` does."""
    with torch.inference_mode(), one_thread():
        packed, wide = _measured([_packed_calls(format), _calls(torch.float32)])
    return packed, wide


@cache
def has_instructions(dtype: torch.dtype) -> bool | None:
    """Returns whether this processor has instructions for products in a narrow dtype, None if it is not known."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.partition(":")[0].strip().lower() in ("flags", "features")), None)
    return None if found is None else not FLAGS[dtype].isdisjoint(found.split())


def _measured(kinds: Sequence[Calls]) -> tuple[Speed, ...]:
    calls = [call for kind in kinds for call in kind]
    shortest = [min(times[1:]) for times in zip(*([_timed(c) for c in calls] for _ in range(ROUNDS)), strict=True)]
    pairs = zip(shortest[::2], shortest[1::2], strict=True)
    return tuple(Speed(prefill=many / ROWS, decode=one) for many, one in pairs)


@contextmanager
def one_thread() -> Iterator[None]:
    """Has torch use one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _calls(dtype: torch.dtype) -> Calls:
    """Returns a product of many rows and one of a single row, each using the next matrix of a pool."""
    pool = [torch.ones(SHAPE, dtype=dtype) for _ in range(POOL)]
    many, one = (torch.ones(rows, SHAPE[1], dtype=dtype) for rows in (ROWS, 1))

    def next_product(x: Tensor) -> None:
        pool.append(pool.pop(0))
        with row_products(x.dtype, x.device, len(x)):
            linear(x, pool[0])

    return lambda: next_product(many), lambda: next_product(one)


def _packed_calls(format: str) -> Calls:
    """Returns the same products with interleaved blocks, by the native kernels."""
    size, nbytes = BLOCKS[format]
    pool = [torch.zeros(SHAPE[0], SHAPE[1] // size * nbytes, dtype=torch.uint8) for _ in range(POOL)]
    many, one = (torch.ones(rows, SHAPE[1]) for rows in (ROWS, 1))

    def next_product(x: Tensor) -> None:
        pool.append(pool.pop(0))
        native.products(x, [(pool[0], format + native.INTERLEAVED, None)], native.ready(x))

    return lambda: next_product(many), lambda: next_product(one)


def _timed(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start

"""The measured speed of products in each dtype on this CPU: without bf16 instructions they are emulated.

With AVX2 alone a product in bf16 takes about six times as long as in float32; with AVX-512 or AMX for bf16 it takes
half. A product of a single row is different: it is memory-bound, and a narrow dtype has half the bytes to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from time import perf_counter

import torch
from torch import Tensor

from asbuilt.kernels.rows import POOL, SHAPE, linear, row_products

# Tokens of the timed prefill, and repetitions of each product: a few tens of milliseconds in total.
ROWS, ROUNDS = 32, 8


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
    with torch.inference_mode(), _one_thread():
        calls = [call for dtype in dtypes for call in _calls(dtype)]
        shortest = [min(times[1:]) for times in zip(*([_timed(c) for c in calls] for _ in range(ROUNDS)), strict=True)]
    pairs = zip(shortest[::2], shortest[1::2], strict=True)
    return tuple(Speed(prefill=many / ROWS, decode=one) for many, one in pairs)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _calls(dtype: torch.dtype) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns a product of many rows and one of a single row, each using the next matrix of a pool."""
    pool = [torch.ones(SHAPE, dtype=dtype) for _ in range(POOL)]
    many, one = (torch.ones(rows, SHAPE[1], dtype=dtype) for rows in (ROWS, 1))

    def next_product(x: Tensor) -> None:
        pool.append(pool.pop(0))
        with row_products(x.dtype, x.device, len(x)):
            linear(x, pool[0])

    return lambda: next_product(many), lambda: next_product(one)


def _timed(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start

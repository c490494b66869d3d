"""How fast this processor multiplies in each dtype, found by trying: one that lacks bf16 instructions emulates them.

With AVX2 alone a product in bf16 takes about six times as long as in float32; with AVX-512 or AMX for bf16 it takes
half. Reading the weights for a single row is another matter: there a narrow dtype has half the bytes to read.
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

# Tokens of a prefill that is tried, and how often each product is: a few tens of milliseconds in all.
ROWS, ROUNDS = 32, 8


@dataclass(frozen=True)
class Speed:
    """Seconds of one matrix for each token of a prefill, and for the one token of a decode step."""

    prefill: float
    decode: float

    def seconds(self, prompt_tokens: int, new_tokens: int) -> float:
        """Returns what the matrix takes for a whole request; requests are compared by it."""
        return prompt_tokens * self.prefill + new_tokens * self.decode


@cache
def speeds(dtypes: tuple[torch.dtype, ...]) -> tuple[Speed, ...]:
    """Returns the speed of each dtype on one thread of the CPU, measured once in a process, to be compared.

    The dtypes take turns, and the shortest time of each counts: other work on the machine can only add to it. On one
    thread, since several wait for each other, and on a busy machine for nothing else than that.
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
    """A product of many rows and one of a single row, each time with the next matrix of a pool."""
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

"""One row times a matrix on a CPU: oneDNN prepares itself anew for every such product, PyTorch's own kernel does not.

Which of the two is faster depends on the processor, so it is measured, once for each dtype: decoding is little else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import mkldnn

NARROW = (torch.bfloat16, torch.float16)
# Large enough that reading it is the work, as in a model, and enough of them that they do not stay in a near cache.
SHAPE, POOL, REPEATS = (2048, 768), 8, 24


@contextmanager
def row_products(x: Tensor, rows: int) -> Iterator[None]:
    """Runs products of `rows` rows like `x` with the kernel that is faster for them; the results are as exact."""
    single = rows == 1 and x.dtype in NARROW and x.device.type == "cpu" and not torch.is_grad_enabled()
    if single and mkldnn.enabled and own_kernel_is_faster(x.dtype, torch.get_num_threads()):
        mkldnn.enabled = False
        try:
            yield
        finally:
            mkldnn.enabled = True
    else:
        yield


@cache
def own_kernel_is_faster(dtype: torch.dtype, threads: int) -> bool:
    """Returns whether PyTorch's own product of one row beats oneDNN's here, from some milliseconds of trying both."""
    if not mkldnn.is_available():
        return False
    with torch.inference_mode():
        x = torch.ones(1, SHAPE[1], dtype=dtype)
        pool = [torch.ones(SHAPE, dtype=dtype) for _ in range(POOL)]
        theirs = _seconds(x, pool)
        mkldnn.enabled = False
        try:
            return _seconds(x, pool) < theirs
        finally:
            mkldnn.enabled = True


def _seconds(x: Tensor, pool: list[Tensor]) -> float:
    times = []
    for i in range(REPEATS):
        start = time.perf_counter()
        F.linear(x, pool[i % POOL])
        times.append(time.perf_counter() - start)
    return statistics.median(times)

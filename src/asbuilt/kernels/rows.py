"""Products on a CPU, of which those of one row dominate decoding: torch's usual call is not the fastest.

The native kernels read narrow weights at half the bytes and compute in float32, whatever instructions the CPU has.
Without them: for narrow dtypes oneDNN repeats its setup for every product of one row, while PyTorch's own kernel does
not; in float32 a BLAS may use only one core, while the same matrix as a batch of pieces is distributed over all. Which
is faster depends on the CPU, so it is measured once per dtype.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import mkldnn

from asbuilt.kernels import native

NARROW = (torch.bfloat16, torch.float16)
# Large enough to be memory-bound, as in a model, and enough of them that they do not stay in a near cache.
SHAPE, POOL, REPEATS = (2048, 768), 8, 24
# From so many rows on a product is bound by arithmetic rather than by memory.
MANY, TIMED_MANY = 12, 64


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Returns x W^T + b, (..., out) from (..., in), written to `out` if given, in the way that is the fastest here."""
    made = _native(x, weight, bias)
    if made is not None:
        return made if out is None else out.copy_(made)
    if x.dtype is torch.float32 and x.numel() == weight.shape[1] and not torch.is_grad_enabled() and _cuts(x, weight):
        n = pieces()
        y = by_pieces(x, weight, n, None if out is None else out.view(n, -1, 1)).view(*x.shape[:-1], -1)
        return y if bias is None else y.add_(bias)
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _native(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Returns the native kernels' product where they are there and faster, else None."""
    if native.ready(x, weight, bias, dtype=x.dtype) is None or not native.multiplies(weight, None):
        return None
    many = x.numel() >= MANY * x.shape[-1]
    return native.linear(x, weight, bias) if native_is_faster(x.dtype, many, torch.get_num_threads()) else None


def by_pieces(x: Tensor, weight: Tensor, n: int, out: Tensor | None = None) -> Tensor:
    """Returns (n, out/n, 1): W x of one row x, with the rows of W in `n` equal pieces; written to `out` if given."""
    row = x.reshape(1, 1, -1).expand(n, -1, -1)
    return torch.bmm(weight.view(n, -1, weight.shape[1]), row.transpose(1, 2), out=out)


def pieces() -> int:
    """Returns into how many pieces a matrix is divided: a power of two, at least the number of threads."""
    return 1 << max(1, (torch.get_num_threads() - 1).bit_length())


def _cuts(x: Tensor, weight: Tensor) -> bool:
    fits = x.device.type == "cpu" and weight.shape[0] % pieces() == 0 and weight.is_contiguous()
    return fits and pieces_are_faster(torch.get_num_threads())


@contextmanager
def row_products(dtype: torch.dtype, device: torch.device, rows: int) -> Iterator[None]:
    """Runs products of `rows` rows with the faster kernel; the results are equally accurate."""
    single = rows == 1 and dtype in NARROW and device.type == "cpu" and not torch.is_grad_enabled()
    if single and mkldnn.enabled and own_kernel_is_faster(dtype, torch.get_num_threads()):
        mkldnn.enabled = False
        try:
            yield
        finally:
            mkldnn.enabled = True
    else:
        yield


@cache
def native_is_faster(dtype: torch.dtype, many: bool, threads: int) -> bool:
    """Returns whether the native kernels multiply one row, or many rows, faster than torch, timed in milliseconds."""
    if dtype not in native.NUMBERS:
        return False

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        made = native.linear(x, weight, None)
        assert made is not None
        return made

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        if not many and dtype is torch.float32 and pieces_are_faster(threads):
            return by_pieces(x, weight, pieces())
        with row_products(dtype, x.device, len(x)):
            return F.linear(x, weight)

    with torch.inference_mode():
        x = torch.ones(TIMED_MANY if many else 1, SHAPE[1], dtype=dtype)
        pool = [torch.ones(SHAPE, dtype=dtype) for _ in range(POOL)]
        return _seconds(x, pool, ours) < _seconds(x, pool, theirs)


@cache
def own_kernel_is_faster(dtype: torch.dtype, threads: int) -> bool:
    """Returns whether PyTorch's own product of one row beats oneDNN's on this machine, timed in some milliseconds."""
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


@cache
def pieces_are_faster(threads: int) -> bool:
    """Returns whether a float32 row is multiplied faster in pieces on this machine, timed in some milliseconds."""
    with torch.inference_mode():
        x, pool = torch.ones(1, SHAPE[1]), [torch.ones(SHAPE) for _ in range(POOL)]
        return _seconds(x, pool, lambda x, weight: by_pieces(x, weight, pieces())) < _seconds(x, pool)


def _seconds(x: Tensor, pool: list[Tensor], product: Callable[[Tensor, Tensor], Tensor] = F.linear) -> float:
    times = []
    for i in range(REPEATS):
        start = time.perf_counter()
        product(x, pool[i % POOL])
        times.append(time.perf_counter() - start)
    return statistics.median(times)

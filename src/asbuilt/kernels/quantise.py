"""Numbers as GGUF blocks, rounded to nearest: the inverse of `packed.expand`, a tile of numbers at a time.

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and MXFP4 are bit for bit what ggml's reference makes of the same float32 numbers. The K
formats have scales of their own search, by plain squared error: for each group some step sizes around the one that
spans it are tried, each followed by the least-squares step (and minimum) for the codes it gives; the best is rounded to
the format's small integer, and the codes are rounded once more to what that says.

Shapes: blocks n of 32 or 256 numbers, groups of a block g, numbers of a group w.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from asbuilt.dtypes import BLOCKS
from asbuilt.errors import InputError
from asbuilt.kernels.packed import expand

TILE = 1 << 17  # numbers that are encoded at once
# How many levels more or less than the format has the tried step sizes spread a group over.
TRIED = tuple(i / 10 for i in range(-9, 10))


def quantise(x: Tensor, format: str, what: str = "weight") -> Tensor:
    """Returns blocks (..., K) in uint8 of numbers (..., I), on the device of `x`.

    Raises InputError naming `what`: for NaN and infinities, numbers too large for the format's scales, rows that do not
    divide into blocks, and a format that is not encoded.
    """
    size, nbytes = _sizes(format)
    if x.ndim == 0 or x.shape[-1] % size:
        columns = x.shape[-1] if x.ndim else 1
        raise InputError(
            f"rows of {columns} numbers do not divide into {format} blocks",
            field=what,
            value=columns,
            allowed=f"a multiple of {size}",
        )
    flat = x.reshape(-1, size)
    made = torch.empty((len(flat), nbytes), dtype=torch.uint8, device=x.device)
    step = max(1, TILE // size)

    def encode(start: int) -> None:
        part = flat[start : start + step].float()
        _require_finite(part, what, "holds NaN or infinite numbers")
        blocks = made[start : start + step] = ENCODED[format](part)
        if format != "mxfp4":
            _require_finite(expand(blocks, format, torch.float32), what, f"holds numbers too large for {format} scales")

    _on_all(encode, range(0, len(flat), step), x.device)
    return made.reshape(*x.shape[:-1], x.shape[-1] // size * nbytes)


def _on_all(work: Callable[[int], None], starts: Sequence[int], device: torch.device) -> None:
    """Does the tiles, on a CPU each with one thread and as many at a time as torch has threads.

    Tiles are too short for torch's own threads: where others use the processor too, waiting for each other after every
    operation takes 10 times as long as the work.
    """
    n = torch.get_num_threads()
    if n == 1 or len(starts) == 1 or device.type != "cpu":
        for start in starts:
            work(start)
        return
    try:
        with ThreadPoolExecutor(n, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(work, starts):
                pass
    finally:
        torch.set_num_threads(n)


def _sizes(format: str) -> tuple[int, int]:
    if format not in ENCODED:
        raise InputError("cannot be written", field="format", value=format, allowed=", ".join(ENCODED))
    return BLOCKS[format]


def _require_finite(x: Tensor, what: str, problem: str) -> None:
    ok = x.isfinite()
    if not bool(ok.all()):
        raise InputError(problem, field=what, value=float(x[~ok][0]), allowed="finite numbers that the format spans")


# Fields of blocks, as in `packed`. Each encoder maps float32 numbers (n, size) to bytes (n, bytes).


def _half(x: Tensor) -> Tensor:
    """Returns the two bytes of each number in half precision: (n, k) to (n, 2k)."""
    return x.half().contiguous().view(torch.uint8)


def _inverse(step: Tensor) -> Tensor:
    """Returns 1 / step; 0 for a step of 0, and for one so small that its inverse is infinite."""
    inverse = step.reciprocal()
    return torch.where(inverse.isfinite(), inverse, 0.0)


def _nibbles(codes: Tensor) -> Tensor:
    """Returns bytes of codes, those of the first half of the last dimension in the lower halves."""
    first, second = codes.chunk(2, -1)
    return first & 15 | second << 4


def _bits(codes: Tensor) -> Tensor:
    """Returns bytes of the bits 0 or 1 in a last dimension of eight, the lowest first."""
    return (codes << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)


def _runs(codes: Tensor, width: int, bits: int) -> Tensor:
    """Returns bytes of which each holds one code of every one of 8 / bits runs of `width` codes, the first lowest."""
    runs = 8 // bits
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)[:, None]
    return (codes.unflatten(-1, (-1, runs, width)) << shifts).sum(-2, dtype=torch.uint8).flatten(-2)


def _around_zero(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Returns step and codes, the number of the largest size being -half steps, 0 the code `half`."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    step = largest / -half
    codes = x.mul(_inverse(step)).add_(half + 0.5).clamp_(0, 2 * half - 1)
    return step, codes.to(torch.uint8)


def _above_least(x: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns step, least number and codes from 0 to `most`, which span the numbers."""
    least, largest = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (largest - least) / most
    codes = (x - least).mul_(_inverse(step)).add_(0.5).clamp_(0, most)
    return step, least, codes.to(torch.uint8)


def _fifth_bits(codes: Tensor) -> Tensor:
    return _bits((codes >> 4).unflatten(-1, (4, 8)))


def _q4_0(x: Tensor) -> Tensor:
    step, codes = _around_zero(x, 8)
    return torch.cat((_half(step), _nibbles(codes)), -1)


def _q4_1(x: Tensor) -> Tensor:
    step, least, codes = _above_least(x, 15)
    return torch.cat((_half(step), _half(least), _nibbles(codes)), -1)


def _q5_0(x: Tensor) -> Tensor:
    step, codes = _around_zero(x, 16)
    return torch.cat((_half(step), _fifth_bits(codes), _nibbles(codes)), -1)


def _q5_1(x: Tensor) -> Tensor:
    step, least, codes = _above_least(x, 31)
    return torch.cat((_half(step), _half(least), _fifth_bits(codes), _nibbles(codes)), -1)


def _q8_0(x: Tensor) -> Tensor:
    step = x.abs().amax(-1, keepdim=True) / 127
    scaled = x * _inverse(step)
    size = scaled.abs()
    whole = size.floor()
    codes = (whole + (2 * (size - whole)).floor_()).clamp_(max=127) * scaled.sign()  # halves away from zero
    return torch.cat((_half(step), codes.to(torch.int8).view(torch.uint8)), -1)


# Halfway between neighbours of the eight sizes of a 4-bit float, doubled: 0 1 2 3 4 6 8 12.
MIDDLES = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)


def _mxfp4(x: Tensor) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True)
    power = torch.where(largest > 0, largest.log2().floor_() + 125, 0.0).clamp_(0, 254)
    size = x.abs().double() * (128 - power.double()).exp2()  # 2^128 is beyond float32
    codes = sum((size > middle).to(torch.uint8) for middle in MIDDLES)
    assert isinstance(codes, Tensor)
    codes |= ((x < 0) & (codes > 0)).to(torch.uint8) << 3
    return torch.cat((power.to(torch.uint8), _nibbles(codes)), -1)


# K formats: the search of scales.


def _rounded(x: Tensor, inverse: Tensor, low: int, high: int) -> Tensor:
    return x.mul(inverse).round_().clamp_(low, high)


def _step_and_least(x: Tensor, most: int, tried: Sequence[float] = TRIED) -> tuple[Tensor, Tensor]:
    """Returns step and b >= 0 of groups (n, g, w), so that x is about step * code - b with codes 0 to `most`.

    For given codes the least squares are a straight line: step = cov(x, code) / var(code), b = step * mean(code) -
    mean(x); where that b would be negative it is 0, and the line goes through the origin.
    """
    low, high = x.amin(-1, keepdim=True).clamp_(max=0), x.amax(-1, keepdim=True)
    span, shifted, mean = high - low, x - low, x.mean(-1)
    step, below = span[..., 0] / most, -low[..., 0]
    best = torch.full_like(step, torch.inf)
    for more in tried:
        codes = _rounded(shifted, (most + more) * _inverse(span), 0, most)
        of_code, both, square = codes.mean(-1), (codes * x).mean(-1), codes.square().mean(-1)
        slope = (both - mean * of_code) * _inverse(square - of_code.square())
        offset = slope * of_code - mean
        through = offset < 0
        slope, offset = torch.where(through, both * _inverse(square), slope), offset.clamp_(min=0)
        error = codes.mul_(slope[..., None]).sub_(offset[..., None]).sub_(x).square_().sum(-1)
        better = (error < best) & (slope > 0)
        best = torch.where(better, error, best)
        step, below = torch.where(better, slope, step), torch.where(better, offset, below)
    return step, below


def _signed_step(x: Tensor, half: int, tried: Sequence[float] = TRIED) -> Tensor:
    """Returns the step of groups (n, g, w), so that x is about step * code with codes -half to half - 1."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    step = (largest / -half)[..., 0]
    best = torch.full_like(step, -torch.inf)
    for more in tried:
        codes = _rounded(x, -(half + more) * _inverse(largest), -half, half - 1)
        both, inverse = (codes * x).sum(-1), _inverse(codes.square().sum(-1))
        explained = both.square() * inverse
        better = explained > best
        best, step = torch.where(better, explained, best), torch.where(better, both * inverse, step)
    return step


def _shared(steps: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Returns d (n, 1), as rounded to half precision, and codes 0 to `most`, so that d * code is about the steps."""
    d = (steps.amax(-1, keepdim=True) / most).half().float()
    return d, _rounded(steps, _inverse(d), 0, most)


def _signed_shared(steps: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """The same with codes -half to half - 1 for steps of either sign."""
    d = (steps.gather(-1, steps.abs().argmax(-1, keepdim=True)) / -half).half().float()
    return d, _rounded(steps, _inverse(d), -half, half - 1)


def _with_least(x: Tensor, groups: int, most: int, most_scale: int) -> tuple[Tensor, ...]:
    """Returns d, d of the minima, the groups' scales and minima, and the codes (n, size)."""
    grouped = x.unflatten(-1, (groups, -1))
    step, below = _step_and_least(grouped, most)
    (d, scales), (d_least, least) = _shared(step, most_scale), _shared(below, most_scale)
    shifted = grouped + (d_least * least)[..., None]
    codes = _rounded(shifted, _inverse(d * scales)[..., None], 0, most)
    return d, d_least, scales.to(torch.uint8), least.to(torch.uint8), codes.to(torch.uint8).flatten(1)


def _with_sign(x: Tensor, half: int, half_scale: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns d, the sixteen groups' scales as floats, and the codes plus `half` (n, size)."""
    grouped = x.unflatten(-1, (16, -1))
    d, scales = _signed_shared(_signed_step(grouped, half), half_scale)
    codes = _rounded(grouped, _inverse(d * scales)[..., None], -half, half - 1)
    return d, scales, (codes + half).to(torch.uint8).flatten(1)


def _six_bits(scales: Tensor, least: Tensor) -> Tensor:
    """Returns twelve bytes of eight scales and eight minima of six bits."""
    (first, later), (first_least, later_least) = scales.chunk(2, -1), least.chunk(2, -1)
    thirds = later & 15 | later_least << 4
    return torch.cat((first | later >> 4 << 6, first_least | later_least >> 4 << 6, thirds), -1)


def _q2_k(x: Tensor) -> Tensor:
    d, d_least, scales, least, codes = _with_least(x, 16, 3, 15)
    return torch.cat((scales | least << 4, _runs(codes, 32, 2), _half(d), _half(d_least)), -1)


def _q3_k(x: Tensor) -> Tensor:
    d, scales, codes = _with_sign(x, 4, 32)
    packed = (scales + 32).to(torch.uint8)
    sixes = torch.cat((_nibbles(packed), _runs(packed >> 4, 4, 2)), -1)
    return torch.cat((_runs(codes >> 2, 32, 1), _runs(codes & 3, 32, 2), sixes, _half(d)), -1)


def _q4_k(x: Tensor) -> Tensor:
    d, d_least, scales, least, codes = _with_least(x, 8, 15, 63)
    return torch.cat((_half(d), _half(d_least), _six_bits(scales, least), _runs(codes, 32, 4)), -1)


def _q5_k(x: Tensor) -> Tensor:
    d, d_least, scales, least, codes = _with_least(x, 8, 31, 63)
    high = _runs(codes >> 4, 32, 1)
    return torch.cat((_half(d), _half(d_least), _six_bits(scales, least), high, _runs(codes & 15, 32, 4)), -1)


def _q6_k(x: Tensor) -> Tensor:
    d, scales, codes = _with_sign(x, 32, 128)
    eight = scales.to(torch.int8).view(torch.uint8)
    return torch.cat((_runs(codes & 15, 64, 4), _runs(codes >> 4, 32, 2), eight, _half(d)), -1)


ENCODED: dict[str, Callable[[Tensor], Tensor]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "mxfp4": _mxfp4,
}

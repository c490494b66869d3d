"""Numbers as GGUF blocks, rounded to nearest: the inverse of `packed.expand`, a tile of numbers at a time.

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and MXFP4 are bit for bit what ggml's reference makes of the same float32 numbers. The K
formats have scales of their own search, by plain squared error: for each group some step sizes around the one that
spans it are tried, each followed by the least-squares step (and minimum) for the codes it gives; the best is rounded to
the format's small integer, and the codes are rounded once more to what that says.

With the importance of the columns, the mean square of the input that each is multiplied by, errors are weighed: what is
searched is the least error of the map's output, for inputs that are uncorrelated. All but Q8_0 and MXFP4 are then
searched so; the scales of a K block's groups share a step that is searched too.

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


def quantise(x: Tensor, format: str, what: str = "weight", importance: Tensor | None = None) -> Tensor:
    """Returns blocks (..., K) in uint8 of numbers (..., I), on the device of `x`.

    `importance`, of the columns (I) or of a shape that broadcasts to that of x, weighs squared errors. Raises
    InputError naming `what`: for NaN and infinities, numbers too large for the format's scales, rows that do not divide
    into blocks, an importance of another shape or below 0, and a format that is not encoded.
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
    flat, weighs = x.reshape(-1, size), _weighs(x, importance, size, what) if format in WEIGHED else None
    made = torch.empty((len(flat), nbytes), dtype=torch.uint8, device=x.device)
    step = max(1, TILE // size)

    def encode(start: int) -> None:
        part = flat[start : start + step].float()
        _require_finite(part, what, "holds NaN or infinite numbers")
        weight = None if weighs is None else _of_errors(weighs[start : start + step].float())
        blocks = made[start : start + step] = ENCODED[format](part) if weight is None else WEIGHED[format](part, weight)
        if format != "mxfp4":
            _require_finite(expand(blocks, format, torch.float32), what, f"holds numbers too large for {format} scales")

    _on_all(encode, range(0, len(flat), step), x.device)
    return made.reshape(*x.shape[:-1], x.shape[-1] // size * nbytes)


def _weighs(x: Tensor, importance: Tensor | None, size: int, what: str) -> Tensor | None:
    """Returns the importance of each number, (n, size), None where none differs from others."""
    if importance is None:
        return None
    try:
        wide = importance.to(x.device).expand(x.shape)
    except RuntimeError as error:
        shape, allowed = tuple(importance.shape), f"({x.shape[-1]},), or what broadcasts to {tuple(x.shape)}"
        raise InputError("importance of another shape", field=what, value=shape, allowed=allowed) from error
    _require_finite(importance, what, "has an importance that is NaN or infinite")
    if bool((importance < 0).any()):
        raise InputError("importance", field=what, value=float(importance.min()), allowed="numbers from 0")
    return wide.reshape(-1, size)


def _of_errors(importance: Tensor) -> Tensor:
    """Returns the weights of squared errors (n, size), as they compare within a block, none of them 0."""
    return (importance / importance.mean(-1, keepdim=True).clamp_(min=1e-30)).clamp_(min=1e-6)


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


def _around_zero(x: Tensor, half: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns step and codes, the number of the largest size being -half steps, 0 the code `half`.

    With weights the step is searched.
    """
    if weight is not None:
        step = signed_steps(x[:, None], half, weight[:, None]).half().float()
        return step, (_rounded(x, _inverse(step), -half, half - 1) + half).to(torch.uint8)
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    step = largest / -half
    codes = x.mul(_inverse(step)).add_(half + 0.5).clamp_(0, 2 * half - 1)
    return step, codes.to(torch.uint8)


def _above_least(x: Tensor, most: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns step, least number and codes from 0 to `most`, which span the numbers; searched with weights."""
    if weight is not None:
        step, below = _step_and_least(x[:, None], most, weight[:, None], below_zero=False)
        step, least = step.half().float(), (-below).half().float()
        return step, least, _rounded(x - least, _inverse(step), 0, most).to(torch.uint8)
    least, largest = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (largest - least) / most
    codes = (x - least).mul_(_inverse(step)).add_(0.5).clamp_(0, most)
    return step, least, codes.to(torch.uint8)


def _fifth_bits(codes: Tensor) -> Tensor:
    return _bits((codes >> 4).unflatten(-1, (4, 8)))


def _q4_0(x: Tensor, weight: Tensor | None = None) -> Tensor:
    step, codes = _around_zero(x, 8, weight)
    return torch.cat((_half(step), _nibbles(codes)), -1)


def _q4_1(x: Tensor, weight: Tensor | None = None) -> Tensor:
    step, least, codes = _above_least(x, 15, weight)
    return torch.cat((_half(step), _half(least), _nibbles(codes)), -1)


def _q5_0(x: Tensor, weight: Tensor | None = None) -> Tensor:
    step, codes = _around_zero(x, 16, weight)
    return torch.cat((_half(step), _fifth_bits(codes), _nibbles(codes)), -1)


def _q5_1(x: Tensor, weight: Tensor | None = None) -> Tensor:
    step, least, codes = _above_least(x, 31, weight)
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


def _step_and_least(
    x: Tensor, most: int, weight: Tensor | None = None, *, below_zero: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns step and b >= 0 of groups (n, g, w), so that x is about step * code - b with codes 0 to `most`.

    For given codes the least squares are a straight line: step = cov(x, code) / var(code), b = step * mean(code) -
    mean(x); where that b would be negative it is 0, and the line goes through the origin. Unless `below_zero` b may
    have either sign.
    """
    share = None if weight is None else weight / weight.sum(-1, keepdim=True)

    def average(values: Tensor) -> Tensor:
        return values.mean(-1) if share is None else (values * share).sum(-1)

    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    if below_zero:
        low = low.clamp_(max=0)
    span, shifted, mean = high - low, x - low, average(x)
    step, below = span[..., 0] / most, -low[..., 0]
    best = torch.full_like(step, torch.inf)
    for more in TRIED:
        codes = _rounded(shifted, (most + more) * _inverse(span), 0, most)
        of_code, both, square = average(codes), average(codes * x), average(codes.square())
        slope = (both - mean * of_code) * _inverse(square - of_code.square())
        offset = slope * of_code - mean
        if below_zero:
            through = offset < 0
            slope, offset = torch.where(through, both * _inverse(square), slope), offset.clamp_(min=0)
        squares = codes.mul_(slope[..., None]).sub_(offset[..., None]).sub_(x).square_()
        error = squares.sum(-1) if share is None else average(squares)
        better = (error < best) & (slope > 0)
        best = torch.where(better, error, best)
        step, below = torch.where(better, slope, step), torch.where(better, offset, below)
    return step, below


def signed_steps(x: Tensor, half: int, weight: Tensor | None = None) -> Tensor:
    """Returns the step of groups (n, g, w), so that x is about step * code with codes -half to half - 1."""

    def total(values: Tensor) -> Tensor:
        return values.sum(-1) if weight is None else (values * weight).sum(-1)

    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    step = (largest / -half)[..., 0]
    best = torch.full_like(step, -torch.inf)
    for more in TRIED:
        codes = _rounded(x, -(half + more) * _inverse(largest), -half, half - 1)
        both, inverse = total(codes * x), _inverse(total(codes.square()))
        explained = both.square() * inverse
        better = explained > best
        best, step = torch.where(better, explained, best), torch.where(better, both * inverse, step)
    return step


def _shared(steps: Tensor, most: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns d (n, 1), as rounded to half precision, and codes 0 to `most`, so that d * code is about the steps.

    `weight` (n, g) weighs the errors of the steps.
    """
    d = steps.amax(-1, keepdim=True) / most
    if weight is not None:
        d = _searched(steps, d, 0, most, weight)
    d = d.half().float()
    return d, _rounded(steps, _inverse(d), 0, most)


def _signed_shared(steps: Tensor, half: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same with codes -half to half - 1 for steps of either sign."""
    d = steps.gather(-1, steps.abs().argmax(-1, keepdim=True)) / -half
    if weight is not None:
        d = _searched(steps, d, -half, half - 1, weight)
    d = d.half().float()
    return d, _rounded(steps, _inverse(d), -half, half - 1)


def _searched(steps: Tensor, d: Tensor, low: int, high: int, weight: Tensor) -> Tensor:
    """Returns the d (n, 1) near the given one that has the least weighed error of d * code."""
    best, found, largest = torch.full_like(d, torch.inf), d, max(-low, high)
    for more in TRIED:
        codes = _rounded(steps, _inverse(d * (largest / (largest + more))), low, high)
        both = (codes * steps * weight).sum(-1, keepdim=True)
        here = both * _inverse((codes.square() * weight).sum(-1, keepdim=True))
        error = ((here * codes - steps).square() * weight).sum(-1, keepdim=True)
        found, best = torch.where(error < best, here, found), torch.minimum(error, best)
    return found


def _by_group(weight: Tensor | None, groups: int) -> tuple[Tensor | None, Tensor | None]:
    """Returns weights of numbers (n, g, w), and their sums (n, g)."""
    if weight is None:
        return None, None
    grouped = weight.unflatten(-1, (groups, -1))
    return grouped, grouped.sum(-1)


def _with_least(x: Tensor, groups: int, most: int, most_scale: int, weight: Tensor | None = None) -> tuple[Tensor, ...]:
    """Returns d, d of the minima, the groups' scales and minima, and the codes (n, size)."""
    grouped, (weight, whole) = x.unflatten(-1, (groups, -1)), _by_group(weight, groups)
    step, below = _step_and_least(grouped, most, weight)
    (d, scales), (d_least, least) = _shared(step, most_scale, whole), _shared(below, most_scale, whole)
    if weight is not None:
        d, d_least, scales, least = _neighbours(grouped, weight, most, most_scale, (d, d_least, scales, least))
    codes = _above(grouped, d * scales, d_least * least, most)
    return d, d_least, scales.to(torch.uint8), least.to(torch.uint8), codes.to(torch.uint8).flatten(1)


def _above(x: Tensor, step: Tensor, below: Tensor, most: int) -> Tensor:
    """Returns codes from 0 of groups (n, g, w), given step and b (n, g)."""
    return _rounded(x + below[..., None], _inverse(step)[..., None], 0, most)


def _neighbours(
    x: Tensor, weight: Tensor, most: int, most_scale: int, found: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns d, d of the minima, scales and minima of less weighed error than those `found`.

    A group's integers are rounded apart from each other, so their neighbours are tried too; then d and d of the minima
    are the least squares of the whole block, x about d * (scale * code) - d_least * least.
    """
    d, d_least, scales, least = found
    best, scales_of, least_of = torch.full_like(scales, torch.inf), scales, least
    for up in (0, -1, 1):
        for more in (0, -1, 1):
            scale, below = (scales + up).clamp(0, most_scale), (least + more).clamp(0, most_scale)
            codes = _above(x, d * scale, d_least * below, most)
            made = codes.mul_((d * scale)[..., None]).sub_((d_least * below)[..., None])
            error = made.sub_(x).square_().mul_(weight).sum(-1)
            better = error < best
            best = torch.where(better, error, best)
            scales_of, least_of = torch.where(better, scale, scales_of), torch.where(better, below, least_of)
    codes = _above(x, d * scales_of, d_least * least_of, most) * scales_of[..., None]
    ones = -least_of[..., None].expand_as(codes)

    def sums(a: Tensor, b: Tensor) -> Tensor:
        return (a * b * weight).sum((-2, -1))[:, None]

    uu, uv, vv, xu, xv = sums(codes, codes), sums(codes, ones), sums(ones, ones), sums(x, codes), sums(x, ones)
    inverse = _inverse(uu * vv - uv * uv)
    new, new_least = (xu * vv - xv * uv).mul(inverse), (xv * uu - xu * uv).mul(inverse)
    new, new_least = new.half().float(), new_least.half().float()
    made = _above(x, new * scales_of, new_least * least_of, most) * (new * scales_of)[..., None]
    error = (made - (new_least * least_of)[..., None] - x).square_().mul_(weight).sum((-2, -1))[:, None]
    better = (new > 0) & (new_least >= 0) & (error < best.sum(-1, keepdim=True))
    return torch.where(better, new, d), torch.where(better, new_least, d_least), scales_of, least_of


def _with_sign(x: Tensor, half: int, half_scale: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns d, the sixteen groups' scales as floats, and the codes plus `half` (n, size)."""
    grouped, (weight, whole) = x.unflatten(-1, (16, -1)), _by_group(weight, 16)
    d, scales = _signed_shared(signed_steps(grouped, half, weight), half_scale, whole)
    codes = _rounded(grouped, _inverse(d * scales)[..., None], -half, half - 1)
    return d, scales, (codes + half).to(torch.uint8).flatten(1)


def _six_bits(scales: Tensor, least: Tensor) -> Tensor:
    """Returns twelve bytes of eight scales and eight minima of six bits."""
    (first, later), (first_least, later_least) = scales.chunk(2, -1), least.chunk(2, -1)
    thirds = later & 15 | later_least << 4
    return torch.cat((first | later >> 4 << 6, first_least | later_least >> 4 << 6, thirds), -1)


def _q2_k(x: Tensor, weight: Tensor | None = None) -> Tensor:
    d, d_least, scales, least, codes = _with_least(x, 16, 3, 15, weight)
    return torch.cat((scales | least << 4, _runs(codes, 32, 2), _half(d), _half(d_least)), -1)


def _q3_k(x: Tensor, weight: Tensor | None = None) -> Tensor:
    d, scales, codes = _with_sign(x, 4, 32, weight)
    packed = (scales + 32).to(torch.uint8)
    sixes = torch.cat((_nibbles(packed), _runs(packed >> 4, 4, 2)), -1)
    return torch.cat((_runs(codes >> 2, 32, 1), _runs(codes & 3, 32, 2), sixes, _half(d)), -1)


def _q4_k(x: Tensor, weight: Tensor | None = None) -> Tensor:
    d, d_least, scales, least, codes = _with_least(x, 8, 15, 63, weight)
    return torch.cat((_half(d), _half(d_least), _six_bits(scales, least), _runs(codes, 32, 4)), -1)


def _q5_k(x: Tensor, weight: Tensor | None = None) -> Tensor:
    d, d_least, scales, least, codes = _with_least(x, 8, 31, 63, weight)
    high = _runs(codes >> 4, 32, 1)
    return torch.cat((_half(d), _half(d_least), _six_bits(scales, least), high, _runs(codes & 15, 32, 4)), -1)


def _q6_k(x: Tensor, weight: Tensor | None = None) -> Tensor:
    d, scales, codes = _with_sign(x, 32, 128, weight)
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
# Those whose errors can be weighed.
WEIGHED: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}

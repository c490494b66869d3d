"""Packed weights in GGUF's block formats: dequantised one tile of rows at a time.

A block is a number of consecutive values of a row with their scales: (..., blocks * bytes) as uint8. The layouts are
those of ggml-common.h; MXFP4 is the Open Compute Project's (Microscaling Formats v1.0, section 5). This is the
reference: a product dequantises what it multiplies, forward and backward, and saves none of it. The native kernels
multiply interleaved blocks as they are (kernels/native.py).

Shapes: rows N, inputs I, outputs O, bytes of a row of blocks K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.dtypes import BLOCKS, FP4
from asbuilt.kernels import native
from asbuilt.kernels import rows as plain
from asbuilt.kernels.memory.linear import tile_rows
from asbuilt.kernels.native import INTERLEAVED


def expand(blocks: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """Returns the values (..., I) of rows of blocks (..., K) in `dtype`, computed in float32.

    An interleaved matrix is expanded as a whole.
    """
    if format.endswith(INTERLEAVED):
        blocks, format = native.as_stored(blocks, format), format.removesuffix(INTERLEAVED)
    size, nbytes = BLOCKS[format]
    numbers = EXPANDED[format](blocks.reshape(-1, nbytes))
    return numbers.reshape(*blocks.shape[:-1], blocks.shape[-1] // nbytes * size).to(dtype)


def look_up(index: Tensor, weight: Tensor, format: str | None, dtype: torch.dtype) -> Tensor:
    """Returns rows of a table, (*index.shape, I); without a format the table is plain."""
    if format is None:
        return F.embedding(index, weight)
    if format.endswith(INTERLEAVED):
        return native.look_up(index, weight, format).to(dtype)
    return expand(weight[index], format, dtype)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, format: str | None = None, out: Tensor | None = None
) -> Tensor:
    """Returns x W^T + b, (..., O) from (..., I), W as blocks (O, K) of the format, or plain without one."""
    if format is None:
        return plain.linear(x, weight, bias, out)
    if format.endswith(INTERLEAVED):
        made = products(x, ((weight, format, bias),))
        if made is not None:
            return made[0] if out is None else out.copy_(made[0])
        weight, format = native.as_stored(weight, format), format.removesuffix(INTERLEAVED)
    made = _Product.apply(x, weight, format, bias)
    return made if out is None else out.copy_(made)


def products(x: Tensor, weights: Sequence[tuple[Tensor, str | None, Tensor | None]]) -> list[Tensor] | None:
    """Returns x W^T + b of interleaved matrices (blocks, format, b); None where the native kernels cannot compute."""
    if x.is_cuda or x.is_meta or (lib := native.ready()) is None:
        return None
    biases = (None if b is None else b.float() for _, _, b in weights)
    given = [(w, format, b) for (w, format, _), b in zip(weights, biases, strict=True)]
    return [y.to(x.dtype) for y in native.products(x.float(), given, lib)]


class _Product(torch.autograd.Function):
    """x W^T + b; W is dequantised again for the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Tensor, format: str, bias: Tensor | None) -> Tensor:  # noqa: ANN401  # torch's own
        """Returns (..., O)."""
        ctx.save_for_backward(blocks)
        ctx.format = format
        made = x.new_empty((*x.shape[:-1], len(blocks)))
        for part, matrix in tiles(blocks, format, x.dtype):
            made[..., part] = plain.linear(x, matrix, None if bias is None else bias[part])
            del matrix  # before the next one is dequantised
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, Tensor | None]:  # noqa: ANN401  # torch's own
        """Returns the gradients of x and b."""
        (blocks,), (grad,) = ctx.saved_tensors, grads
        made = None
        for part, matrix in tiles(blocks, ctx.format, grad.dtype):
            added = grad[..., part] @ matrix
            del matrix
            made = added if made is None else made.add_(added)
        assert made is not None
        return made, None, None, grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None


def tiles(blocks: Tensor, format: str, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yields ranges of rows and their values (n, I)."""
    n = tile_rows(blocks.shape[-1] // BLOCKS[format][1] * BLOCKS[format][0])
    for start in range(0, len(blocks), n):
        part = slice(start, start + n)
        yield part, expand(blocks[part], format, dtype)


# The fields of each block format. Each function maps blocks (n, bytes) to float32 values (n, size).


def _halves(raw: Tensor) -> Tensor:
    """Returns pairs of bytes as float16, converted to float32."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """Returns the lower nibbles of all bytes, then the upper ones."""
    return torch.cat((raw & 15, raw >> 4), -1)


def _bits(raw: Tensor) -> Tensor:
    """Returns the bits of the bytes, lowest first, as 0 or 1."""
    return ((raw[..., None] >> torch.arange(8, dtype=torch.uint8, device=raw.device)) & 1).flatten(-2)


def _q4_0(raw: Tensor) -> Tensor:
    return _nibbles(raw[:, 2:]).float().sub_(8).mul_(_halves(raw[:, :2]))


def _q4_1(raw: Tensor) -> Tensor:
    return _nibbles(raw[:, 4:]).float().mul_(_halves(raw[:, :2])).add_(_halves(raw[:, 2:4]))


def _q5_0(raw: Tensor) -> Tensor:
    codes = _nibbles(raw[:, 6:]) | _bits(raw[:, 2:6]) << 4
    return codes.float().sub_(16).mul_(_halves(raw[:, :2]))


def _q5_1(raw: Tensor) -> Tensor:
    codes = _nibbles(raw[:, 8:]) | _bits(raw[:, 4:8]) << 4
    return codes.float().mul_(_halves(raw[:, :2])).add_(_halves(raw[:, 2:4]))


def _q8_0(raw: Tensor) -> Tensor:
    return raw[:, 2:].view(torch.int8).float().mul_(_halves(raw[:, :2]))


def _pairs_of_bits(raw: Tensor, width: int) -> Tensor:
    """Returns two bits of each byte, lowest first: every `width` bytes yield four runs of as many values."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)[:, None]
    return ((raw.unflatten(-1, (-1, 1, width)) >> shifts) & 3).flatten(1)


def _q2_k(raw: Tensor) -> Tensor:
    scales, codes = raw[:, :16], _pairs_of_bits(raw[:, 16:80], 32).view(-1, 16, 16)
    scale = _halves(raw[:, 80:82]) * (scales & 15).float()
    least = _halves(raw[:, 82:84]) * (scales >> 4).float()
    return codes.float().mul_(scale[..., None]).sub_(least[..., None]).flatten(1)


def _q3_k(raw: Tensor) -> Tensor:
    high, low, packed = raw[:, :32], _pairs_of_bits(raw[:, 32:96], 32), raw[:, 96:108]
    scales = _nibbles(packed[:, :8]) | _pairs_of_bits(packed[:, 8:], 4) << 4
    bits = ((high[:, None] >> torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]) & 1).flatten(1)
    scale = _halves(raw[:, 108:110]) * (scales.float() - 32)
    return (low | bits << 2).float().sub_(4).view(-1, 16, 16).mul_(scale[..., None]).flatten(1)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns eight scales and eight minima of six bits from twelve bytes."""
    first, second, third = packed.split(4, -1)
    scales = torch.cat((first & 63, third & 15 | (first >> 6) << 4), -1)
    least = torch.cat((second & 63, third >> 4 | (second >> 6) << 4), -1)
    return scales.float(), least.float()


def _of_eight(raw: Tensor, codes: Tensor) -> Tensor:
    """Returns the values of eight groups of 32 codes, with a scale and a minimum each."""
    scales, least = _six_bits(raw[:, 4:16])
    scale, below = _halves(raw[:, :2]) * scales, _halves(raw[:, 2:4]) * least
    return codes.view(-1, 8, 32).float().mul_(scale[..., None]).sub_(below[..., None]).flatten(1)


def _q4_k(raw: Tensor) -> Tensor:
    return _of_eight(raw, _nibbles(raw[:, 16:].unflatten(-1, (4, 32))).flatten(1))


def _q5_k(raw: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]
    high = ((raw[:, None, 16:48] >> shifts) & 1).flatten(1)
    return _of_eight(raw, _nibbles(raw[:, 48:].unflatten(-1, (4, 32))).flatten(1) | high << 4)


def _q6_k(raw: Tensor) -> Tensor:
    low = _nibbles(raw[:, :128].unflatten(-1, (2, 64))).flatten(1)
    codes = low | _pairs_of_bits(raw[:, 128:192], 32) << 4
    scale = _halves(raw[:, 208:210]) * raw[:, 192:208].view(torch.int8).float()
    return codes.float().sub_(32).view(-1, 16, 16).mul_(scale[..., None]).flatten(1)


# The largest biased exponent (bias 127) whose power of two times six is finite in float32.
LARGEST_POWER = 252
# The offsets of a block's float16 scales and minima.
SCALES = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
}


def finite(blocks: Tensor, format: str) -> bool:
    """Returns whether all scales are finite, and with them all values of the blocks (..., K).

    A power of two of MXFP4 counts as finite if six times it is.
    """
    raw = blocks.reshape(-1, BLOCKS[format][1])
    if format == "mxfp4":
        return bool((raw[:, 0] <= LARGEST_POWER).all())
    return all(bool(_halves(raw[:, at : at + 2]).isfinite().all()) for at in SCALES[format])


# The sixteen 4-bit values times two, so that they are integers; the power of two is one lower.
DOUBLED_FP4 = tuple(int(2 * number) for number in FP4)


def _mxfp4(raw: Tensor) -> Tensor:
    numbers = torch.tensor(DOUBLED_FP4, dtype=torch.float32, device=raw.device)
    found = numbers.index_select(0, _nibbles(raw[:, 1:]).int().flatten()).view(len(raw), -1)
    return found.mul_(torch.ones_like(found[:, :1]).ldexp(raw[:, :1].int() - 128))


EXPANDED: dict[str, Callable[[Tensor], Tensor]] = {
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

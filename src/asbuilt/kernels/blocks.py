"""The block formats whose codes are numbers: what the bytes of a block mean.

The layouts are those of ggml-common.h; MXFP4 is the Open Compute Project's (Microscaling Formats v1.0, section 5). The
last three are asbuilt's own, for integers of checkpoint folders with a scale per group or row, which each 32 numbers
repeat: `int4_zero` is a float16 scale, a zero point and 16 bytes as in Q4_0, scale * (code - zero);
`int4_wide` and `int8_wide` have float32 scales, the latter signed bytes and no zero point. Each function maps blocks
(n, bytes) to float32 values (n, size).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asbuilt.dtypes import FP4


def aligned(raw: Tensor) -> Tensor:
    """Returns a copy that can be viewed as wider numbers: one row of an odd length is contiguous, and cannot."""
    return raw.clone(memory_format=torch.contiguous_format)


def halves(raw: Tensor) -> Tensor:
    """Returns pairs of bytes as float16, converted to float32."""
    return aligned(raw).view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """Returns the lower nibbles of all bytes, then the upper ones."""
    return torch.cat((raw & 15, raw >> 4), -1)


def _bits(raw: Tensor) -> Tensor:
    """Returns the bits of the bytes, lowest first, as 0 or 1."""
    return ((raw[..., None] >> torch.arange(8, dtype=torch.uint8, device=raw.device)) & 1).flatten(-2)


def _q4_0(raw: Tensor) -> Tensor:
    return _nibbles(raw[:, 2:]).float().sub_(8).mul_(halves(raw[:, :2]))


def _q4_1(raw: Tensor) -> Tensor:
    return _nibbles(raw[:, 4:]).float().mul_(halves(raw[:, :2])).add_(halves(raw[:, 2:4]))


def _q5_0(raw: Tensor) -> Tensor:
    codes = _nibbles(raw[:, 6:]) | _bits(raw[:, 2:6]) << 4
    return codes.float().sub_(16).mul_(halves(raw[:, :2]))


def _q5_1(raw: Tensor) -> Tensor:
    codes = _nibbles(raw[:, 8:]) | _bits(raw[:, 4:8]) << 4
    return codes.float().mul_(halves(raw[:, :2])).add_(halves(raw[:, 2:4]))


def _q8_0(raw: Tensor) -> Tensor:
    return raw[:, 2:].view(torch.int8).float().mul_(halves(raw[:, :2]))


def _pairs_of_bits(raw: Tensor, width: int) -> Tensor:
    """Returns two bits of each byte, lowest first: every `width` bytes yield four runs of as many values."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)[:, None]
    return ((raw.unflatten(-1, (-1, 1, width)) >> shifts) & 3).flatten(1)


def _q2_k(raw: Tensor) -> Tensor:
    scales, codes = raw[:, :16], _pairs_of_bits(raw[:, 16:80], 32).view(-1, 16, 16)
    scale = halves(raw[:, 80:82]) * (scales & 15).float()
    least = halves(raw[:, 82:84]) * (scales >> 4).float()
    return codes.float().mul_(scale[..., None]).sub_(least[..., None]).flatten(1)


def _q3_k(raw: Tensor) -> Tensor:
    high, low, packed = raw[:, :32], _pairs_of_bits(raw[:, 32:96], 32), raw[:, 96:108]
    scales = _nibbles(packed[:, :8]) | _pairs_of_bits(packed[:, 8:], 4) << 4
    bits = ((high[:, None] >> torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]) & 1).flatten(1)
    scale = halves(raw[:, 108:110]) * (scales.float() - 32)
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
    scale, below = halves(raw[:, :2]) * scales, halves(raw[:, 2:4]) * least
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
    scale = halves(raw[:, 208:210]) * raw[:, 192:208].view(torch.int8).float()
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
    "iq1_s": (0,),
    "iq2_xxs": (0,),
    "iq2_xs": (0,),
    "iq2_s": (0,),
    "iq3_xxs": (0,),
    "iq3_s": (0,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
    "tq1_0": (52,),
    "tq2_0": (64,),
    "nvfp4": (),
    "int4_zero": (0,),
}
# Formats whose blocks begin with a float32.
FLOAT32_SCALES = ("int4_wide", "int8_wide", "nvfp4_wide")


# The sixteen 4-bit values times two, so that they are integers; the power of two is one lower.
DOUBLED_FP4 = tuple(int(2 * number) for number in FP4)


def _mxfp4(raw: Tensor) -> Tensor:
    numbers = torch.tensor(DOUBLED_FP4, dtype=torch.float32, device=raw.device)
    found = numbers.index_select(0, _nibbles(raw[:, 1:]).int().flatten()).view(len(raw), -1)
    return found.mul_(torch.ones_like(found[:, :1]).ldexp(raw[:, :1].int() - 128))


def _int4_zero(raw: Tensor) -> Tensor:
    return _nibbles(raw[:, 3:]).float().sub_(raw[:, 2:3].float()).mul_(halves(raw[:, :2]))


def _wide(raw: Tensor) -> Tensor:
    return aligned(raw[:, :4]).view(torch.float32)


def _int4_wide(raw: Tensor) -> Tensor:
    return _nibbles(raw[:, 5:]).float().sub_(raw[:, 4:5].float()).mul_(_wide(raw))


def _int8_wide(raw: Tensor) -> Tensor:
    return raw[:, 4:].view(torch.int8).float().mul_(_wide(raw))


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
    "int4_zero": _int4_zero,
    "int4_wide": _int4_wide,
    "int8_wide": _int8_wide,
}

"""Keys and values as a cache holds them in fewer bits: one row of bytes for each vector, of one token and head.

A row is the vector's codes, after its scales where its format has them. Scales are bfloat16, which has float32's range:
they cost two bytes, and since codes are made with the scale as it is stored, its few bits add no error.
Shapes: batch B, key heads K, keys S, head width D, bytes of a row N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from asbuilt.dtypes import CACHE_SCALES, FORMATS, short_name
from asbuilt.errors import InputError, one_of

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
CASTS = ("fp64", "fp32", "bf16", "fp16", "fp8")
# What is nearest to a format that other programs have, with scales for 32 numbers.
NEAREST = {"q8_0": "int8:head", "q4_0": "int4:head", "q4_1": "int4:head"}
NAMES = (*CASTS, *CACHE_SCALES)


class Block(NamedTuple):
    """Codes (B, K, S, D) as floats, and what makes numbers of them: scale * code + low, each (B, K, S, 1) or None."""

    codes: Tensor
    scale: Tensor | None
    low: Tensor | None

    def numbers(self) -> Tensor:
        """Returns the numbers (B, K, S, D)."""
        if self.scale is None:
            return self.codes
        found = self.codes * self.scale
        return found if self.low is None else found.add_(self.low)


@dataclass(frozen=True)
class Code:
    """A format of rows: a cast to a narrower float, or codes of 8 or 4 bits with scales.

    8 bits: code = x / s, a whole number up to 127 or an e4m3 float up to 448, s = max|x| / that. 4 bits: code =
    (x - m) / s from 0 to 15, m = min x, s = (max x - m) / 15.
    """

    name: str

    @property
    def scales(self) -> int:
        """Bytes of a row before its codes."""
        return CACHE_SCALES.get(self.name, 0)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a row's elements: bytes, or the float that numbers are cast to."""
        wide = self.name in CASTS and self.name != "fp8"
        return getattr(torch, next(f.torch or "" for f in FORMATS if f.name == self.name)) if wide else torch.uint8

    def row_size(self, width: int) -> int:
        """Returns how many elements a row has for a vector of `width` numbers."""
        return self.scales + ((width + 1) // 2 if self.name == "int4:head" else width)

    def pack(self, x: Tensor) -> Tensor:
        """Returns the rows (..., N) of vectors (..., D)."""
        if self.dtype != torch.uint8:
            return x.to(self.dtype)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.name == "fp8":
            return x.clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8).view(torch.uint8)
        if self.name == "int4:head":
            return _packed_4(x)
        largest = LARGEST_FP8 if self.name == "fp8:head" else 127.0
        scale = (x.abs().amax(-1, keepdim=True) / largest).to(torch.bfloat16)
        codes = (x / _divisor(scale)).clamp_(-largest, largest)
        codes = codes.to(FP8) if self.name == "fp8:head" else codes.round_().to(torch.int8)
        return torch.cat((scale.view(torch.uint8), codes.view(torch.uint8)), -1)

    def block(self, rows: Tensor, width: int, dtype: torch.dtype) -> Block:
        """Returns the codes and scales of rows (B, K, S, N), in `dtype`."""
        if self.dtype != torch.uint8:
            return Block(rows.to(dtype), None, None)
        stored = rows[..., self.scales :]
        if self.name == "int4:head":
            codes = torch.cat((stored & 15, stored >> 4), -1)[..., :width].to(dtype)
        else:
            codes = stored.view(torch.int8 if self.name == "int8:head" else FP8).to(dtype)
        if not self.scales:
            return Block(codes, None, None)
        scales = rows[..., : self.scales].clone(memory_format=torch.contiguous_format)  # in places that are even
        scales = scales.view(torch.bfloat16).to(dtype)
        return Block(codes, scales[..., :1], scales[..., 1:] if scales.shape[-1] > 1 else None)


def _divisor(scale: Tensor) -> Tensor:
    """Returns a scale to divide by: 1 for vectors of zeros."""
    return torch.where(scale == 0, 1.0, scale)


def _packed_4(x: Tensor) -> Tensor:
    """Returns rows of scale, minimum and 4-bit codes, those of the vector's second half in the high bits."""
    least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    low = least.to(torch.bfloat16)
    # the minimum is rounded down, so that no number is below the range of codes
    low = torch.where(low > least, (least - least.abs() * 2**-8).to(torch.bfloat16), low)
    scale = ((most - low) / 15).to(torch.bfloat16)
    codes = ((x - low) / _divisor(scale)).round_().clamp_(0, 15).to(torch.uint8)
    half = (codes.shape[-1] + 1) // 2
    high = torch.nn.functional.pad(codes[..., half:], (0, 2 * half - codes.shape[-1]))
    return torch.cat((scale.view(torch.uint8), low.view(torch.uint8), codes[..., :half] | (high << 4)), -1)


def code(name: str, dtype: torch.dtype, field: str = "kv-dtype") -> Code | None:
    """Returns the format of this name, None if it is `dtype`, that of computing; raises InputError for any other."""
    key = short_name(name)
    if key not in NAMES:
        near = NEAREST.get(key, f"{key}:head")
        fix = f"{near} has a scale for each token and head" if near in CACHE_SCALES else ""
        raise InputError("not a format of our caches", field=field, value=name, allowed=one_of(NAMES), fix=fix)
    return None if key == short_name(dtype) else Code(key)


@dataclass(frozen=True)
class Coded:
    """Keys or values of a layer in rows (B, K, S, N), read in blocks; `width` numbers each, of which `used` count."""

    rows: Tensor
    code: Code
    width: int
    dtype: torch.dtype
    used: int | None = None

    @property
    def shape(self) -> Sequence[int]:
        """(B, K, S, D)."""
        return *self.rows.shape[:3], self.width if self.used is None else self.used

    def first(self, numbers: int) -> Coded:
        """Returns the first `numbers` of each vector."""
        return replace(self, used=numbers)

    def block(self, start: int, end: int, dtype: torch.dtype) -> Block:
        """Returns the codes of keys from `start` to `end`, in `dtype`."""
        found = self.code.block(self.rows[:, :, start:end], self.width, dtype)
        return found if self.used is None else found._replace(codes=found.codes[..., : self.used])

    def expanded(self) -> Tensor:
        """Returns all numbers (B, K, S, D)."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return self.block(0, self.rows.shape[2], wide).numbers().to(self.dtype)

    def gather(self, index_BKS: Tensor) -> Coded:
        """Returns the vectors at these places of each head."""
        return replace(self, rows=gathered(self.rows, index_BKS))


def expanded(x: Tensor | Coded) -> Tensor:
    """Returns the numbers."""
    return x.expanded() if isinstance(x, Coded) else x


def gathered(x_BKSD: Tensor, index_BKS: Tensor) -> Tensor:
    """Returns the vectors at these places of each head."""
    return x_BKSD.gather(2, index_BKS[..., None].expand(-1, -1, -1, x_BKSD.shape[-1]))

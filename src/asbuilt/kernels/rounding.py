"""Matrices rounded to the formats of quantised checkpoint folders: the inverse of `kernels/dequantise.py`.

Every function takes a float32 matrix (O, I) and returns the tensors as they are stored, by the end of their names in
compressed-tensors' spelling, and the numbers that they stand for. All are symmetric around 0.

Shapes: outputs O, inputs I, groups of a row G.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asbuilt.kernels import dequantise
from asbuilt.kernels.quantise import MIDDLES, signed_steps

LARGEST_FP8, LARGEST_FP4 = 448.0, 6.0
Rounded = tuple[dict[str, Tensor], Tensor]


def _step(largest: Tensor, most: float) -> Tensor:
    """Returns the size of a step, 1 where all numbers are 0."""
    return torch.where(largest > 0, largest / most, 1.0)


def int8(x: Tensor, dtype: torch.dtype = torch.float32) -> Rounded:
    """Returns codes (O, I) of -127 to 127 and a scale per row (O, 1) in `dtype`."""
    scale = _step(x.abs().amax(1, keepdim=True), 127).to(dtype)
    codes = (x / _above_zero(scale)).round_().clamp_(-127, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale.float()


def _above_zero(scale: Tensor) -> Tensor:
    """Returns scales as float32 to divide by: those that became 0 in their dtype as infinite, so that codes are 0."""
    return torch.where(scale == 0, torch.inf, scale.float())


def int4(x: Tensor, group: int, dtype: torch.dtype = torch.float32, importance: Tensor | None = None) -> Rounded:
    """Returns words of eight codes (O, I / 8), scales (O, G) in `dtype`, the shape; codes are -8 to 7, stored plus 8.

    The largest number of a group is -8 or 7 steps; with the importance of columns (I) the step of the least weighed
    error is searched.
    """
    grouped = x.unflatten(1, (-1, group))
    if importance is None:
        scale = _step(grouped.abs().amax(-1), 7.5)
    else:
        weight = importance.clamp(min=1e-6 * float(importance.mean()) + 1e-30).expand_as(x).unflatten(1, (-1, group))
        found = signed_steps(grouped, 8, weight)
        scale = torch.where(found == 0, 1.0, found)
    scale = scale.to(dtype)
    codes = (grouped / _above_zero(scale)[..., None]).round_().clamp_(-8, 7)
    nibbles = (codes.flatten(1) + 8).to(torch.uint8)
    words = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).contiguous().view(torch.int32)
    made = {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(tuple(x.shape))}
    return made, (codes * scale.float()[..., None]).flatten(1)


def fp8(x: Tensor, block: tuple[int, int]) -> Rounded:
    """Returns E4M3 numbers (O, I), and a scale for each block of rows and columns, as `weight_scale_inv`."""
    (down, across), (rows, columns) = block, x.shape
    grid = (math.ceil(rows / down), math.ceil(columns / across))
    padded = torch.nn.functional.pad(x, (0, grid[1] * across - columns, 0, grid[0] * down - rows))
    scale = _step(padded.abs().unflatten(0, (grid[0], down)).unflatten(2, (grid[1], across)).amax((1, 3)), LARGEST_FP8)
    wide = scale.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :columns]
    codes = (x / wide).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, dequantise.tiled(codes, scale, block)


def _fp4(x: Tensor) -> Tensor:
    """Returns bytes (..., I / 2) of the nearest 4-bit floats, the even code of two as near; the first number lowest."""
    size = 2 * x.abs()
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for below, middle in enumerate(MIDDLES):
        codes += ((size > middle) | ((size == middle) & bool(below % 2))).to(torch.uint8)
    codes |= x.signbit().to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4


def nvfp4(x: Tensor) -> Rounded:
    """Returns bytes (O, I / 2), E4M3 scales of 16 numbers (O, G), and what divides the scales of the whole, (1)."""
    grouped = x.unflatten(1, (-1, 16))
    largest = grouped.abs().amax(-1)
    whole = LARGEST_FP8 * LARGEST_FP4 / float(largest.max()) if bool(largest.any()) else 1.0
    whole = min(whole, torch.finfo(torch.float32).max)
    scale = (largest / LARGEST_FP4 * whole).clamp_(max=LARGEST_FP8).to(torch.float8_e4m3fn)
    step = scale.float() / whole
    scaled = torch.where(step[..., None] > 0, grouped / step[..., None], 0.0).clamp_(-LARGEST_FP4, LARGEST_FP4)
    packed = _fp4(scaled.flatten(1))
    made = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": torch.tensor([whole])}
    return made, dequantise.four_bit_floats(packed, scale, 16, 1 / float(made["weight_global_scale"]))


def mxfp4(x: Tensor) -> Rounded:
    """Returns bytes (O, I / 2), and scales of 32 numbers (O, G): powers of two, biased by 127 (OCP, section 6.3)."""
    grouped = x.unflatten(1, (-1, 32))
    largest = grouped.abs().amax(-1)
    power = torch.where(largest > 0, largest.log2().floor_() - 2, -127.0).clamp_(-127, 127)
    scaled = (grouped.double() * (-power.double()).exp2()[..., None]).clamp_(-LARGEST_FP4, LARGEST_FP4)
    packed, scale = _fp4(scaled.flatten(1)), (power + 127).to(torch.uint8)
    return {"weight_packed": packed, "weight_scale": scale}, dequantise.four_bit_floats(packed, scale, 32)

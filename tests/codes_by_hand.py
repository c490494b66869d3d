"""What vectors become in a cache of few bits, in NumPy, bit by bit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asbuilt.kernels.codes import NAMES

Array = NDArray[np.float64]
CODES = tuple(name for name in NAMES if name not in ("fp64", "fp32"))
E4M3 = np.array(
    [m * 2.0**-9 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)[:-1]


def bf16(x: Array, down: bool = False) -> Array:
    """Rounded to the nearest bfloat16, ties to even; `down`: one step of the last place below where that is above."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    near = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    if not down:
        return near
    lower = bf16((x.astype(np.float32) - np.abs(x.astype(np.float32)) * np.float32(2**-8)).astype(np.float64))
    return np.where(near > x, lower, near)


def e4m3(x: Array) -> Array:
    """Rounded to the nearest of the 127 numbers of e4m3 and their negatives, ties to an even code."""
    size = np.minimum(np.abs(x), 448.0)
    above = np.minimum(np.searchsorted(E4M3, size), len(E4M3) - 1)
    below = np.maximum(above - 1, 0)
    high, low = E4M3[above] - size, size - E4M3[below]
    nearest = np.where((low < high) | ((low == high) & (below % 2 == 0)), below, above)
    return np.copysign(E4M3[nearest], x)


def by_hand(x: Array, name: str) -> Array:
    """Vectors (..., D) as a cache gives them back, computed with nothing of ours."""
    if name == "bf16":
        return bf16(x)
    if name == "fp16":
        return x.astype(np.float16).astype(np.float64)
    if name == "fp8":
        return e4m3(x)
    if name == "int4:head":
        low = bf16(x.min(-1, keepdims=True), down=True)
        scale = bf16((x.max(-1, keepdims=True) - low) / 15)
        return np.clip(np.round((x - low) / np.where(scale == 0, 1, scale)), 0, 15) * scale + low
    most = {"int8:head": 127, "fp8:head": 448}[name]
    scale = bf16(np.abs(x).max(-1, keepdims=True) / most)
    codes = np.clip(x / np.where(scale == 0, 1, scale), -most, most)
    return (np.round(codes) if most == 127 else e4m3(codes)) * scale

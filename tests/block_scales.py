"""Blocks of drawn bits with scales that are given: what tests of packed weights are filled with."""

from __future__ import annotations

import torch
from torch import Tensor

from asbuilt.dtypes import BLOCKS
from asbuilt.kernels.blocks import FLOAT32_SCALES, SCALES


def set_scales(raw: Tensor, format: str, scale: Tensor) -> Tensor:
    """Sets the scales of blocks (..., bytes) in place to float32 (...), exponents and zero points to usual ones."""
    assert raw.shape == (*scale.shape, BLOCKS[format][1])
    halves = scale.half()[..., None].view(torch.uint8)
    for at in SCALES.get(format, ()):
        raw[..., at : at + 2] = halves
    if format in FLOAT32_SCALES:
        raw[..., :4] = scale.contiguous()[..., None].view(torch.uint8)
    if format.startswith("int4"):
        raw[..., 4 if format in FLOAT32_SCALES else 2] %= 16
    if format == "nvfp4_wide":
        raw[..., 4:8] %= 64
    if format == "mxfp4":
        raw[..., 0] = raw[..., 0] % 8 + 114
    if format == "nvfp4":
        raw[..., :4] %= 64
    if format == "iq1_m":  # four bits of it above each twelve of others
        low, high = halves[..., 0], halves[..., 1]
        for i, piece in enumerate((low & 15, low >> 4, high & 15, high >> 4)):
            raw[..., 49 + 2 * i] = raw[..., 49 + 2 * i] & 15 | piece << 4
    return raw


def drawn(format: str, rows: int, inputs: int, scale: float = 0.01) -> Tensor:
    """Blocks of any bits, with scales that are finite."""
    size, nbytes = BLOCKS[format]
    raw = torch.randint(0, 256, (rows, inputs // size * nbytes), dtype=torch.uint8)
    blocks = raw.view(-1, nbytes)
    set_scales(blocks, format, torch.randn(len(blocks)) * scale)
    if format == "mxfp4":
        blocks[:, 0] = torch.randint(100, 140, (len(blocks),), dtype=torch.uint8)
    if format == "nvfp4":
        blocks[:, :4] = torch.randint(0, 256, (len(blocks), 4), dtype=torch.uint8)
    return raw

"""Compressing blocks of tokens into entries.

Shapes: batch B, blocks N, tokens of a block J, width of kv and gate W, width of an entry D.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compress(kv_BNJW: Tensor, gate_BNJW: Tensor, bias_JW: Tensor, first_B: Tensor, overlap: bool) -> Tensor:
    """Returns the entries (B, N, D): sums over tokens of kv, weighted by the softmax of gate + bias over tokens.

    With `overlap` the blocks are one more than the entries: an entry is of the first half of the numbers of the block
    before, and of the second half of its own. Row b's first entry is its `first_B[b]`-th; entry 0 has no block before.
    """
    gate_BNJW = gate_BNJW + bias_JW
    if overlap:
        gate_BNJW = _both(gate_BNJW)
        start = first_B[:, None] + torch.arange(gate_BNJW.shape[1], device=first_B.device) == 0
        before = torch.arange(gate_BNJW.shape[2], device=first_B.device) < bias_JW.shape[0]
        gate_BNJW = gate_BNJW.masked_fill((start[:, :, None] & before)[..., None], -torch.inf)
        kv_BNJW = _both(kv_BNJW)
    wide = torch.promote_types(gate_BNJW.dtype, torch.float32)
    return (kv_BNJW * gate_BNJW.softmax(2, dtype=wide).to(kv_BNJW.dtype)).sum(2)


def _both(x_BNJW: Tensor) -> Tensor:
    """Returns (B, N - 1, 2 J, W / 2): the first half of each block's numbers beside the second half of the next's."""
    first, second = x_BNJW.chunk(2, -1)
    return torch.cat((first[:, :-1], second[:, 1:]), 2)


def by_definition(kv_TW: Tensor, gate_TW: Tensor, bias_JW: Tensor, overlap: bool) -> Tensor:
    """Returns the entries of one text, one number of one entry after the other."""
    ratio, width = bias_JW.shape
    d, made = width // 2 if overlap else width, []
    for block in range(len(kv_TW) // ratio):
        own = range(block * ratio, (block + 1) * ratio)
        terms = [(t, width - d) for t in own]
        terms += [(t - ratio, 0) for t in own if overlap and block]
        gates = torch.stack([gate_TW[t, at : at + d] + bias_JW[t % ratio, at : at + d] for t, at in terms])
        values = torch.stack([kv_TW[t, at : at + d] for t, at in terms])
        made.append((gates.softmax(0) * values).sum(0))
    return torch.stack(made) if made else kv_TW.new_zeros(0, d)

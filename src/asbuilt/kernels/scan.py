"""The diagonal linear recurrence h_t = a_t h_{t-1} + b_t: by blocks of tokens, and token by token as in its definition.

Shapes: batch B, tokens T, channels C; a, b (B, T, C) and a state (B, C). Only products of the a's are formed, never
their reciprocals, so nothing overflows for decays of at most 1, however long the text.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def by_tokens(a_BTC: Tensor, b_BTC: Tensor, state_BC: Tensor | None) -> Tensor:
    """Returns h (B, T, C), token by token."""
    h_BC = torch.zeros_like(b_BTC[:, 0]) if state_BC is None else state_BC
    made = []
    for a, b in zip(a_BTC.unbind(1), b_BTC.unbind(1), strict=True):
        h_BC = a * h_BC + b
        made.append(h_BC)
    return torch.stack(made, 1)


def by_blocks(a_BTC: Tensor, b_BTC: Tensor, state_BC: Tensor | None) -> Tensor:
    """Returns h (B, T, C) in about 2 sqrt(T) steps instead of T.

    All blocks of sqrt(T) tokens run at once from a state of zero, with the product of their decays beside them; then
    the state is handed from block to block, and multiplied by those products.
    """
    T = b_BTC.shape[1]
    size = math.isqrt(T)
    n_blocks = T // size
    h_BTC = b_BTC.clone(memory_format=torch.contiguous_format)
    if n_blocks > 1:
        a, h = (x[:, : n_blocks * size].unflatten(1, (n_blocks, size)) for x in (a_BTC, h_BTC))
        decay = a.clone(memory_format=torch.contiguous_format)
        for i in range(1, size):
            h[:, :, i].addcmul_(a[:, :, i], h[:, :, i - 1])
            decay[:, :, i].mul_(decay[:, :, i - 1])
        for i in range(n_blocks):
            if state_BC is not None:
                h[:, i].addcmul_(decay[:, i], state_BC[:, None])
            state_BC = h[:, i, -1]
    for t in range(n_blocks * size if n_blocks > 1 else 0, T):
        if state_BC is not None:
            h_BTC[:, t].addcmul_(a_BTC[:, t], state_BC)
        state_BC = h_BTC[:, t]
    return h_BTC


def gradients(a_BTC: Tensor, h_BTC: Tensor, state_BC: Tensor | None, dh_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a and b: the same recurrence backwards, db_t = dh_t + a_{t+1} db_{t+1}."""
    later = torch.cat((a_BTC[:, 1:], torch.zeros_like(a_BTC[:, :1])), 1)
    db = by_blocks(later.flip(1), dh_BTC.flip(1), None).flip(1)
    first = torch.zeros_like(h_BTC[:, :1]) if state_BC is None else state_BC[:, None]
    return db * torch.cat((first, h_BTC[:, :-1]), 1), db

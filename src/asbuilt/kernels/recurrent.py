"""Recurrent cells, token by token.

Shapes: batch B, tokens T, width of h H, of all gates G; what the input gives x (B, T, G), the hidden matrix w (G, H).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.spec.recurrent import Cell

State = tuple[Tensor, ...]  # h, and c of an LSTM, each (B, H), in float32 or wider


def unrolled(
    cell: Cell, x_BTG: Tensor, w_GH: Tensor, bias_G: Tensor | None, valid_BT: Tensor | None, state: State | None
) -> tuple[Tensor, State]:
    """Returns h (B, T, H) of each token in x's dtype, and the state after the last; padding leaves it as it is.

    Gates and states are computed in float32 or wider, the products with the hidden matrix in its own dtype.
    """
    wide = torch.promote_types(x_BTG.dtype, torch.float32)
    nothing = x_BTG.new_zeros(len(x_BTG), w_GH.shape[1], dtype=wide)
    fresh, made = state is None, []
    now = ((nothing, nothing) if cell == "lstm" else (nothing,)) if state is None else state
    for t, x_BG in enumerate(x_BTG.unbind(1)):
        if fresh and t == 0:
            hidden_BG = x_BG.new_zeros(()) if bias_G is None else bias_G
        else:
            hidden_BG = F.linear(now[0].to(w_GH.dtype), w_GH, bias_G)
        after = step(cell, x_BG.to(wide), hidden_BG.to(wide), now)
        if valid_BT is not None:
            after = tuple(torch.where(valid_BT[:, t, None], new, old) for new, old in zip(after, now, strict=True))
        now = after
        made.append(now[0].to(x_BTG.dtype))
    return torch.stack(made, 1), now


def step(cell: Cell, x_BG: Tensor, hidden_BG: Tensor, state: State) -> State:
    """Returns the state after one token, of what the input and the last h give."""
    if cell == "lstm":
        i, f, g, o = (x_BG + hidden_BG).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if cell == "gru":
        width = state[0].shape[-1]
        hidden_BG = hidden_BG.expand_as(x_BG)
        r, z = (x_BG[:, : 2 * width] + hidden_BG[:, : 2 * width]).sigmoid().chunk(2, -1)
        n = (x_BG[:, 2 * width :] + r * hidden_BG[:, 2 * width :]).tanh()
        return (torch.lerp(n, state[0], z),)
    both = x_BG + hidden_BG
    return (both.tanh() if cell == "tanh" else both.relu(),)

"""Causal linear attention: chunked, and token by token as in its definition.

Shapes: heads of all rows G, tokens T, head width D; features q, k (G, T, D), values with an appended one
(G, T, D + 1), a state (G, D, D + 1). Katharopoulos et al. 2020 (arXiv 2006.16236), equations 9 to 12.
"""

from __future__ import annotations

import torch
from torch import Tensor


def by_chunks(
    q_GTD: Tensor, k_GTD: Tensor, v_GTW: Tensor, state_GDW: Tensor | None, size: int, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns each token's output (G, T, D + 1), whose last number is the sum of weights, and the final state.

    Tokens within a chunk of `size` interact by masked products, and with earlier ones through the state, which is None
    at the start. Without `keep` the state after the last chunk is not computed.
    """
    made = []
    parts = list(zip(*(x.split(size, 1) for x in (q_GTD, k_GTD, v_GTW)), strict=True))
    for i, (q, k, v) in enumerate(parts):
        scores = torch.bmm(q, k.transpose(1, 2)).tril()
        y = torch.bmm(scores, v)
        made.append(y if state_GDW is None else y + torch.bmm(q, state_GDW))
        if keep or i < len(parts) - 1:
            update = torch.bmm(k.transpose(1, 2), v)
            state_GDW = update if state_GDW is None else state_GDW + update
    return made[0] if len(made) == 1 else torch.cat(made, 1), state_GDW


def by_tokens(q_GTD: Tensor, k_GTD: Tensor, v_GTW: Tensor, state_GDW: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the same, token by token: k v^T is added to the state, and the query reads it."""
    state = torch.zeros_like(k_GTD[:, 0, :, None] * v_GTW[:, 0, None, :]) if state_GDW is None else state_GDW
    made = []
    for q, k, v in zip(q_GTD.unbind(1), k_GTD.unbind(1), v_GTW.unbind(1), strict=True):
        state = state + k[:, :, None] * v[:, None, :]
        made.append((q[:, :, None] * state).sum(1))
    return torch.stack(made, 1), state

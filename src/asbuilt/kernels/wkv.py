"""RWKV-4's WKV recurrence: an average of the past values, weighted by exp(key) and by a constant decay per channel.

y_t = (n_{t-1} + e^(u + k_t) v_t) / (d_{t-1} + e^(u + k_t))
n_t = e^w n_{t-1} + e^k_t v_t, d_t = e^w d_{t-1} + e^k_t

with w < 0. n and d are kept divided by e^m, m the largest exponent in them, so that no exponential overflows. Shapes:
batch B, tokens T, channels C; k, v (B, T, C), w and u (C), a state of three (B, C): n, d, m. Peng et al. 2023
(arXiv 2305.13048), equations 16 and 22 to 27.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from asbuilt.spec.time_mixing import PIECE

State = tuple[Tensor, Tensor, Tensor]
NONE = -1e38  # the exponent of an empty sum: finite, since the difference of two infinities is no number


def wkv(k_BTC: Tensor, v_BTC: Tensor, w_C: Tensor, u_C: Tensor, state: State | None) -> tuple[Tensor, State]:
    """Returns y (B, T, C) and the final state, in float32 or wider; under autograd only the arguments are saved."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (k_BTC, v_BTC, w_C, u_C)):
        y, *after = Recomputed.apply(k_BTC, v_BTC, w_C, u_C, *(state or (None,) * 3))
        return y, tuple(after)
    return by_pieces(k_BTC, v_BTC, w_C, u_C, state)


def by_pieces(k_BTC: Tensor, v_BTC: Tensor, w_C: Tensor, u_C: Tensor, state: State | None) -> tuple[Tensor, State]:
    """Returns the same, PIECE tokens after the other, each by blocks."""
    made = []
    for k, v in zip(k_BTC.split(PIECE, 1), v_BTC.split(PIECE, 1), strict=True):
        y, state = by_blocks(k, v, w_C, u_C, state)
        made.append(y)
    assert state is not None
    return made[0] if len(made) == 1 else torch.cat(made, 1), state


def by_tokens(k_BTC: Tensor, v_BTC: Tensor, w_C: Tensor, u_C: Tensor, state: State | None) -> tuple[Tensor, State]:
    """Returns the same, token by token."""
    k_BTC, v_BTC, w_C, u_C, state = _wide(k_BTC, v_BTC, w_C, u_C, state)
    made = []
    for k, v in zip(k_BTC.unbind(1), v_BTC.unbind(1), strict=True):
        n, d, _ = _add(state, (v, torch.ones_like(v), k + u_C))
        made.append(n / d)
        state = _add((*state[:2], state[2] + w_C), (v, torch.ones_like(v), k))
    return torch.stack(made, 1), state


def by_blocks(k_BTC: Tensor, v_BTC: Tensor, w_C: Tensor, u_C: Tensor, state: State | None) -> tuple[Tensor, State]:
    """Returns the same in about 2 sqrt(T) steps: blocks run at once from nothing, then each gets what came before."""
    k, v, w, u, state = _wide(k_BTC, v_BTC, w_C, u_C, state)
    T = k.shape[1]
    size = math.isqrt(T)
    if T // size < 2:
        return by_tokens(k, v, w, u, state)
    used = T // size * size
    k_BNSC, v_BNSC = (x[:, :used].unflatten(1, (-1, size)) for x in (k, v))
    one = torch.ones_like(v_BNSC[:, :, 0])
    own = (torch.zeros_like(one), torch.zeros_like(one), torch.full_like(one, NONE))
    before = [own]  # what each token's block has before it, from the block's start
    for i in range(size):
        own = _add((*own[:2], own[2] + w), (v_BNSC[:, :, i], one, k_BNSC[:, :, i]))
        before.append(own)
    carried = []
    for j in range(k_BNSC.shape[1]):
        carried.append(state)
        state = _add((*state[:2], state[2] + size * w), (own[0][:, j], own[1][:, j], own[2][:, j]))
    steps = torch.arange(size, dtype=w.dtype, device=w.device)[:, None] * w
    whole = tuple(torch.stack(x, 1)[:, :, None] for x in zip(*carried, strict=True))
    inside = tuple(torch.stack(x, 2) for x in zip(*before[:-1], strict=True))
    del before
    past = _add((*whole[:2], whole[2] + steps), inside)  # type: ignore[arg-type]
    n, d, _ = _add(past, (v_BNSC, torch.ones_like(v_BNSC), k_BNSC + u))
    y = (n / d).flatten(1, 2)
    if used == T:
        return y, state
    rest, state = by_tokens(k[:, used:], v[:, used:], w, u, state)
    return torch.cat((y, rest), 1), state


def _add(one: State, other: State) -> State:
    """Returns the sum of two, each n e^m and d e^m, as such a one again."""
    m = torch.maximum(one[2], other[2])
    a, b = torch.exp(one[2] - m), torch.exp(other[2] - m)
    return a * one[0] + b * other[0], a * one[1] + b * other[1], m


def _wide(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, state: State | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, State]:
    """Returns all in float32 or wider, and an empty state for none."""
    wide = torch.promote_types(k.dtype, torch.float32)
    k, v, w, u = k.to(wide), v.to(wide), w.to(wide), u.to(wide)
    if state is None:
        nothing = torch.zeros_like(k[:, 0])
        return k, v, w, u, (nothing, nothing, torch.full_like(nothing, NONE))
    return k, v, w, u, (state[0].to(wide), state[1].to(wide), state[2].to(wide))


class Recomputed(torch.autograd.Function):
    """The recurrence, run again in the backward pass: a state for each token would be three times as much to keep."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, w: Tensor, u: Tensor, *state: Tensor | None) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Saves the arguments."""
        ctx.save_for_backward(k, v, w, u, *state)
        y, after = by_pieces(k, v, w, u, None if state[0] is None else state)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(*after)
        return (y, *after)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the gradients of k, v, w and u; a cache has none."""
        saved = ctx.saved_tensors  # unpacked once: checkpointing computes them again
        given, state = [x.detach().requires_grad_() for x in saved[:4]], saved[4:]
        with torch.enable_grad():
            y, _ = by_pieces(given[0], given[1], given[2], given[3], None if state[0] is None else state)
        return (*torch.autograd.grad(y, given, dy, materialize_grads=True), None, None, None)

"""The selective scan: by blocks of tokens that run side by side, and token by token as in its definition.

Shapes: batch B, tokens T, channels D, state width N, blocks n of L tokens; x and steps dt (B, T, D), A (D, N), b and c
(B, T, N), a state (B, D, N). Gu & Dao 2023 (arXiv 2312.00752), equation 2 and algorithm 2. Decays over several tokens
come from sums of their steps, so that nothing overflows however long a text is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens that the backward pass computes again at once.
SEGMENT = 256


def by_tokens(
    x_BTD: Tensor, dt_BTD: Tensor, a_DN: Tensor, b_BTN: Tensor, c_BTN: Tensor, state_BDN: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns c h (B, T, D), and the final state."""
    h_BDN = x_BTD.new_zeros(len(x_BTD), *a_DN.shape) if state_BDN is None else state_BDN
    made = []
    for x, dt, b, c in zip(*(one.unbind(1) for one in (x_BTD, dt_BTD, b_BTN, c_BTN)), strict=True):
        h_BDN = (dt[:, :, None] * a_DN).exp() * h_BDN + (dt * x)[:, :, None] * b[:, None]
        made.append((h_BDN * c[:, None]).sum(-1))
    return torch.stack(made, 1), h_BDN


def by_blocks(
    x_BTD: Tensor, dt_BTD: Tensor, a_DN: Tensor, b_BTN: Tensor, c_BTN: Tensor, state_BDN: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the same in about 2 sqrt(T) steps instead of T.

    All blocks run at once from a state of zero; then the state is handed from block to block, and each token adds what
    it reads of the state before its block.
    """
    T = x_BTD.shape[1]
    size = math.isqrt(T - 1) + 1
    drive, dt, b, c = (_blocks(one, size) for one in (dt_BTD * x_BTD, dt_BTD, b_BTN, c_BTN))
    h = drive[:, :, 0, :, None] * b[:, :, 0, None]
    made = [(h * c[:, :, 0, None]).sum(-1)]
    for i in range(1, size):
        decayed = (dt[:, :, i, :, None] * a_DN).exp() * h
        h = torch.addcmul(decayed, drive[:, :, i, :, None], b[:, :, i, None])
        made.append((h * c[:, :, i, None]).sum(-1))
    total = dt.cumsum(2)
    starts, state = _handed_on(h, total[:, :, -1], a_DN, state_BDN)
    del h
    if starts is not None:
        for i in range(size):
            made[i] = made[i] + ((total[:, :, i, :, None] * a_DN).exp() * starts * c[:, :, i, None]).sum(-1)
    return torch.stack(made, 2).flatten(1, 2)[:, :T], state


def _blocks(one_BTW: Tensor, size: int) -> Tensor:
    """Returns (B, n, size, W), padded with zeros, whose steps of 0 change no state."""
    T = one_BTW.shape[1]
    return F.pad(one_BTW, (0, 0, 0, -T % size)).unflatten(1, (-1, size))


def _handed_on(
    ends_BnDN: Tensor, steps_BnD: Tensor, a_DN: Tensor, state_BDN: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Returns the states before each block (B, n, D, N), None if all are zero, and the one after the last."""
    n = ends_BnDN.shape[1]
    if n == 1 and state_BDN is None:
        return None, ends_BnDN[:, 0]
    state = torch.zeros_like(ends_BnDN[:, 0]) if state_BDN is None else state_BDN
    starts = []
    for i in range(n):
        starts.append(state)
        state = torch.addcmul(ends_BnDN[:, i], (steps_BnD[:, i, :, None] * a_DN).exp(), state)
    return torch.stack(starts, 1), state


def scan(
    x_BTD: Tensor,
    dt_BTD: Tensor,
    a_DN: Tensor,
    b_BTN: Tensor,
    c_BTN: Tensor,
    d_D: Tensor,
    state_BDN: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns c h + d x in the dtype of the steps, and the final state; under autograd only the arguments are saved."""
    given = (x_BTD, dt_BTD, a_DN, b_BTN, c_BTN, d_D, state_BDN)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given):
        return ScanFunction.apply(*given)  # type: ignore[no-any-return]
    return whole(*given)


def whole(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the same by operations of the library, which autograd can follow."""
    x, b, c = (one.to(dt.dtype) for one in (x, b, c))
    y, state = by_blocks(x, dt, a, b, c, state)
    return torch.addcmul(y, x, d.to(dt.dtype)), state


class ScanFunction(torch.autograd.Function):
    """The selective scan, computed again in the backward pass, a segment of tokens after the other."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Saves the arguments."""
        ctx.save_for_backward(x, dt, a, b, c, d, state)
        return whole(x, dt, a, b, c, d, state)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the gradients of all but the state."""
        x, dt, a, b, c, d, state = ctx.saved_tensors
        pieces = list(zip(*(one.split(SEGMENT, 1) for one in (x, dt, b, c, dy)), strict=True))
        starts = [state]
        for x_, dt_, b_, c_, _ in pieces[:-1]:
            starts.append(whole(x_, dt_, a, b_, c_, d, starts[-1])[1])
        tokens: list[tuple[Tensor, ...]] = []
        da, dd = torch.zeros_like(a), torch.zeros_like(d)
        for (x_, dt_, b_, c_, dy_), start in zip(reversed(pieces), reversed(starts), strict=True):
            given = [one.detach().requires_grad_() for one in (x_, dt_, b_, c_, a, d)]
            before = None if start is None else start.detach().requires_grad_()
            with torch.enable_grad():
                made = whole(given[0], given[1], given[4], given[2], given[3], given[5], before)
            wanted = [*given, *(() if before is None else (before,))]
            found = torch.autograd.grad(made, wanted, (dy_, dstate), materialize_grads=True)
            tokens.append(found[:4])
            da, dd = da + found[4], dd + found[5]
            dstate = found[6] if before is not None else dstate
        dx, ddt, db, dc = (torch.cat(one[::-1], 1) for one in zip(*tokens, strict=True))
        return dx, ddt, da, db, dc, dd, None

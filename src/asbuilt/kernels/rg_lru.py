"""The gated recurrence of Griffin: decay and input of a diagonal recurrence follow from gates.

h_t = a_t h_{t-1} + b_t; a = exp(c r), c = -8 softplus(decay); b = sqrt(1 - a^2) i u, or i u for a text's first token.
Shapes: batch B, tokens T, channels C. De et al. 2024 (arXiv 2402.19427), section 2.4.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.scan import by_blocks, gradients

C_DECAY = -8.0


def recur(
    u_BTC: Tensor, r_BTC: Tensor, i_BTC: Tensor, decay_C: Tensor, first_BT: Tensor, state_BC: Tensor | None
) -> Tensor:
    """Returns h (B, T, C) in float32 or wider, after a state; `first_BT` marks the first token of each text.

    Under autograd, of what is computed here only h is saved.
    """
    given = (u_BTC, r_BTC, i_BTC, decay_C)
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return Recurrence.apply(*given, first_BT, state_BC)  # type: ignore[no-any-return]
    return by_blocks(*coefficients(*given, first_BT), state_BC)


def coefficients(
    u_BTC: Tensor, r_BTC: Tensor, i_BTC: Tensor, decay_C: Tensor, first_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns a and b (B, T, C), in float32 or wider."""
    wide = torch.promote_types(u_BTC.dtype, torch.float32)
    log_a = r_BTC.to(wide) * (C_DECAY * F.softplus(decay_C.to(wide)))
    scale = torch.sqrt(-torch.expm1(2 * log_a)).masked_fill(first_BT[..., None], 1)
    return log_a.exp(), scale * i_BTC * u_BTC


class Recurrence(torch.autograd.Function):
    """The recurrence; a and b are recomputed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        u: Tensor,
        r: Tensor,
        i: Tensor,
        decay: Tensor,
        first: Tensor,
        state: Tensor | None,
    ) -> Tensor:
        """Returns h (B, T, C)."""
        h_BTC = by_blocks(*coefficients(u, r, i, decay, first), state)
        ctx.save_for_backward(u, r, i, decay, first, h_BTC, state)
        return h_BTC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dh_BTC: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the gradients of u, r, i and the decay; a cache has none."""
        *saved, first, h_BTC, state = ctx.saved_tensors
        given = [x.detach().requires_grad_() for x in saved]
        with torch.enable_grad():
            a, b = coefficients(given[0], given[1], given[2], given[3], first)
        da, db = gradients(a.detach(), h_BTC, state, dh_BTC)
        return (*torch.autograd.grad((a, b), given, (da, db)), None, None)

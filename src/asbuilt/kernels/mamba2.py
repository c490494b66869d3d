"""The state space dual: chunk by chunk, token by token, and as one masked matrix; and its gated norm.

Shapes: groups of all rows G, heads of a group H, tokens T, head width P, state width N; steps times inputs x
(G, H, T, P), logarithms of decays a (G, H, T), b and c (G, T, N), states (G, N, H*P). Dao & Gu 2024
(arXiv 2405.21060), sections 3 and 6. Decays between two tokens come from differences of sums within a chunk, which are
at most 0, so that nothing overflows however long a text is; what rounding the sums takes from the differences is added.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.rotary import widest


def by_chunks(
    x_GHTP: Tensor, a_GHT: Tensor, b_GTN: Tensor, c_GTN: Tensor, state_GNW: Tensor | None, size: int, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns c_t^T S_t of each token (G, H, T, P), and the final state.

    Tokens within a chunk of `size` interact by masked products, and with earlier ones through the state, which is None
    at the start. Without `keep` the state after the last chunk is not computed.
    """
    G, H, T, P = x_GHTP.shape
    made, longest = [], min(size, T)
    future = torch.ones(longest, longest, dtype=torch.bool, device=x_GHTP.device).triu_(1)
    split = zip(x_GHTP.split(size, 2), a_GHT.split(size, 2), b_GTN.split(size, 1), c_GTN.split(size, 1), strict=True)
    for i, (x, a, b, c) in enumerate(split):
        L = x.shape[2]
        total_GHL, rest_GHL = _sums(a)
        mixing = _mixing(total_GHL, rest_GHL, b, c, future[:L, :L]).flatten(0, 1)
        y = torch.bmm(mixing, x.flatten(0, 1)).view(G, H, L, P)
        del mixing
        if state_GNW is not None:
            read = torch.bmm(c, state_GNW).view(G, L, H, P).transpose(1, 2)
            y = torch.addcmul(y, read, total_GHL.exp()[..., None])
        made.append(y)
        if keep or (i + 1) * size < T:
            to_end = total_GHL[..., -1:] - total_GHL
            to_end = (to_end if rest_GHL is None else to_end + (rest_GHL[..., -1:] - rest_GHL)).exp()
            moved = (x * to_end[..., None]).transpose(1, 2).reshape(G, L, H * P)
            update = torch.bmm(b.transpose(1, 2), moved)
            state_GNW = update if state_GNW is None else _decayed(state_GNW, total_GHL[..., -1]) + update
    return made[0] if len(made) == 1 else torch.cat(made, 2), state_GNW


def _sums(a_GHL: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the sums of a up to each token, and what rounding took from them, None where nothing is subtracted.

    Sums reach hundreds, where float32 is precise to 1e-5; those of neighbours, which weigh most, differ by little.
    """
    total = a_GHL.cumsum(-1)
    if a_GHL.shape[-1] == 1:
        return total, None
    exact = a_GHL.detach().cumsum(-1, dtype=widest(a_GHL.device))
    return total, exact.sub_(total.detach()).to(a_GHL.dtype)


def _mixing(total_GHL: Tensor, rest_GHL: Tensor | None, b_GLN: Tensor, c_GLN: Tensor, future_LL: Tensor) -> Tensor:
    """Returns (G, H, L, L): c_t b_s times the decay from s to t, for s up to t."""
    scores = torch.bmm(c_GLN, b_GLN.transpose(1, 2))[:, None]
    decays = total_GHL[..., :, None] - total_GHL[..., None, :]
    if rest_GHL is not None:
        decays.add_(rest_GHL[..., :, None]).sub_(rest_GHL[..., None, :])
    decays.masked_fill_(future_LL, -torch.inf).exp_()
    return decays * scores if torch.is_grad_enabled() else decays.mul_(scores)


def _decayed(state_GNW: Tensor, a_GH: Tensor) -> Tensor:
    """Returns the state times the decay of each head."""
    G, H = a_GH.shape
    return (state_GNW.view(G, -1, H, state_GNW.shape[2] // H) * a_GH.exp()[:, None, :, None]).flatten(2)


def by_tokens(
    x_GHTP: Tensor, a_GHT: Tensor, b_GTN: Tensor, c_GTN: Tensor, state_GNW: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the same, token by token: the state decays, b x^T is added, and c reads it."""
    G, H, T, P = x_GHTP.shape
    state = x_GHTP.new_zeros(G, b_GTN.shape[2], H, P) if state_GNW is None else state_GNW.view(G, -1, H, P)
    made = []
    for t in range(T):
        new = b_GTN[:, t, :, None, None] * x_GHTP[:, None, :, t]
        state = state * a_GHT[:, None, :, t, None].exp() + new
        made.append((c_GTN[:, t, :, None, None] * state).sum(1))
    return torch.stack(made, 2), state.flatten(2)


def as_matrix(x_GHTP: Tensor, a_GHT: Tensor, b_GTN: Tensor, c_GTN: Tensor) -> Tensor:
    """Returns the same outputs as one product of each head: all pairs of tokens at once, without a state."""
    T = x_GHTP.shape[2]
    future = torch.ones(T, T, dtype=torch.bool, device=x_GHTP.device).triu_(1)
    return _mixing(*_sums(a_GHT), b_GTN, c_GTN, future) @ x_GHTP


def gated_norm(y: Tensor, z: Tensor, gain: Tensor | None, eps: float, groups: int, *, first: bool) -> Tensor:
    """Returns y gated by silu(z) and normalised over each of `groups` parts of the last dimension, in z's dtype.

    The norm comes before the gate if `first`; without a gain there is none. Computed in float32 or wider. Under
    autograd only y and z are saved.
    """
    if torch.is_grad_enabled() and (y.requires_grad or z.requires_grad):
        return GatedNormFunction.apply(y, z, gain, eps, groups, first)  # type: ignore[no-any-return]
    return gated_in_place(y, z, gain, eps, groups, first)


def gated_in_place(y: Tensor, z: Tensor, gain: Tensor | None, eps: float, groups: int, first: bool) -> Tensor:
    """Returns the same, overwriting y, which nothing else may need."""
    open_ = F.silu(z) if z.dtype is y.dtype else F.silu(z.to(y.dtype), inplace=True)
    if gain is None:
        return y.mul_(open_).to(z.dtype)
    parts = (y if first else y.mul_(open_)).unflatten(-1, (groups, -1))
    length = torch.linalg.vector_norm(parts, dim=-1, keepdim=True)
    parts.mul_(torch.rsqrt(length.square() / parts.shape[-1] + eps))
    y.mul_(gain)
    return (y.mul_(open_) if first else y).to(z.dtype)


def gated(y: Tensor, z: Tensor, gain: Tensor | None, eps: float, groups: int, first: bool) -> Tensor:
    """Returns the same by operations of the library, which autograd can follow."""
    open_ = F.silu(z.to(y.dtype))
    if gain is None:
        return (y * open_).to(z.dtype)
    y = y if first else y * open_
    parts = y.unflatten(-1, (groups, -1))
    normal = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2) * gain.to(y.dtype)
    return (normal * open_ if first else normal).to(z.dtype)


class GatedNormFunction(torch.autograd.Function):
    """The gated norm, computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        y: Tensor,
        z: Tensor,
        gain: Tensor | None,
        eps: float,
        groups: int,
        first: bool,
    ) -> Tensor:
        """Saves y, z and the gain."""
        ctx.save_for_backward(y, z, gain)
        ctx.how = (eps, groups, first)
        return gated_in_place(y.clone(), z, gain, eps, groups, first)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the gradients of y, z and the gain."""
        given = [None if one is None else one.detach().requires_grad_() for one in ctx.saved_tensors]
        with torch.enable_grad():
            made = gated(*given, *ctx.how)  # type: ignore[arg-type]
        wanted = [one for one in given if one is not None]
        found = iter(torch.autograd.grad(made, wanted, dy))
        return (*(None if one is None else next(found) for one in given), None, None, None)

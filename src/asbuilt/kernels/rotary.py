"""RoPE: the tables of cos and sin, and their application to heads."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from asbuilt.kernels import native_gradients
from asbuilt.spec.positions import Centres, Plane, Rotary, Sections


class RopeTables(NamedTuple):
    """cos and signed sin, each (B or 1, T, 1, d_rotary), in the order of the pairing."""

    cos: Tensor
    sin: Tensor


def tables(
    rotary: Rotary,
    positions_BT: Tensor,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    coordinates_3BT: Tensor | None = None,
    inverse: Tensor | None = None,
) -> RopeTables:
    """Returns the tables for tokens at `positions_BT`, in sequences of `lengths` tokens each (for dynamic scaling).

    With axes, pairs are rotated by `coordinates_3BT` of a token, if given. `inverse` are the frequencies of these
    lengths, if they are at hand.

    Angles are computed in float64, whatever the model's dtype: in float32 cos and sin are off by up to 2e-4 within 4k
    positions and 9e-3 within 128k, since a frequency's rounding error is multiplied by the position. Published code
    uses float32, with differently rounded frequencies: float32 here would differ from transformers as much (2e-4 and
    8e-3, theta 10^6 and width 128) as the exact values do, so parity loses nothing. The sine includes the sign of its
    place, so that a rotation is x*cos + swap(x)*sin.
    """
    asked = _asked(rotary, lengths)
    factors = [rotary.factor_at(length) for length in asked]
    inverse = frequencies(rotary, lengths, positions_BT.device) if inverse is None else inverse
    places = positions_BT[:, :, None]
    if rotary.grid is not None:
        places = _on_grid(rotary.grid, positions_BT, inverse.shape[-1])
    elif isinstance(rotary.axes, Centres):
        places = _centres(rotary.axes, positions_BT, inverse)
    elif rotary.axes is not None and coordinates_3BT is not None:
        places = _by_axis(rotary, coordinates_3BT)
    angle = places.to(inverse.dtype) * inverse[:, None, :]
    factor = factors[0] if len(set(factors)) == 1 else inverse.new_tensor(factors)[:, None, None]
    cos, sin = angle.cos() * factor, angle.sin() * factor
    if rotary.pairing == "halves":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    else:
        cos, sin = torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
    return RopeTables(cos.to(dtype).unsqueeze(2), sin.to(dtype).unsqueeze(2))


def frequencies(rotary: Rotary, lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the radians per token of each pair (1 or B, n_pairs), in sequences of these lengths."""
    rows = [rotary.inverse_frequencies(length) for length in _asked(rotary, lengths)]
    return torch.tensor(rows, dtype=widest(device), device=device)


def _asked(rotary: Rotary, lengths: tuple[int, ...]) -> tuple[int, ...]:
    return lengths if rotary.depends_on_length and len(set(lengths)) > 1 else lengths[:1]


def widest(device: torch.device) -> torch.dtype:
    """Returns the dtype for angles: float64, or float32 on Apple's GPUs, which lack it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _on_grid(side: int, positions_BT: Tensor, n_pairs: int) -> Tensor:
    """Returns the 2-D positions, (B or 1, T, n_pairs): the column from 1, then the row; 0 after the grid."""
    places = torch.stack((positions_BT % side, positions_BT // side), -1) + 1
    return places.masked_fill((positions_BT >= side**2)[..., None], 0).repeat_interleave(n_pairs // 2, -1)


def _centres(axes: Centres, positions_BT: Tensor, like: Tensor) -> Tensor:
    """Returns the centres of patches, (B or 1, T, n_pairs), row then column from -1 to 1; 0 of tokens around them."""
    patches = positions_BT - axes.n_before
    whole = torch.stack((patches // axes.n_side, patches % axes.n_side), -1).to(like.dtype)
    around = (patches < 0) | (patches >= axes.n_side**2)
    centres = ((2 * whole + 1) / axes.n_side - 1).masked_fill(around[..., None], 0)
    return centres.repeat_interleave(like.shape[-1] // 2, -1)


def _by_axis(rotary: Rotary, coordinates_3BT: Tensor) -> Tensor:
    """Returns the coordinate that rotates each pair, (B or 1, T, n_pairs)."""
    assert isinstance(rotary.axes, Sections | Plane)
    axes = rotary.axes.axes if isinstance(rotary.axes, Sections) else rotary.axes.axes(rotary.d_rotary // 2)
    return coordinates_3BT[torch.tensor(axes, device=coordinates_3BT.device)].movedim(0, -1)


def rotate(x_BTHD: Tensor, turn: RopeTables, pairing: Literal["halves", "adjacent"]) -> Tensor:
    """Returns x with RoPE applied to its first d_rotary numbers and the rest unchanged."""
    d = turn.cos.shape[-1]
    if d == x_BTHD.shape[-1]:
        return _rotate(x_BTHD, turn, pairing)
    return torch.cat((_rotate(x_BTHD[..., :d], turn, pairing), x_BTHD[..., d:]), -1)


def rotate_tail(x_BTHD: Tensor, turn: RopeTables, pairing: Literal["halves", "adjacent"]) -> Tensor:
    """Returns x with RoPE applied to its last d_rotary numbers and the rest unchanged."""
    d = turn.cos.shape[-1]
    if d == x_BTHD.shape[-1]:
        return _rotate(x_BTHD, turn, pairing)
    return torch.cat((x_BTHD[..., :-d], _rotate(x_BTHD[..., -d:], turn, pairing)), -1)


def rotate_joined(
    heads_BTHD: Tensor, counts: tuple[int, int, int], turn: RopeTables, pairing: Literal["halves", "adjacent"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v of so many heads each, which lie side by side, q and k with RoPE applied."""
    differentiated = torch.is_grad_enabled() and heads_BTHD.requires_grad
    if differentiated and pairing == "halves" and native_gradients.turns(heads_BTHD, turn.cos, turn.sin):
        return JoinedRotation.apply(heads_BTHD, counts, turn.cos, turn.sin)  # type: ignore[no-any-return]
    n_q, n_k, n_v = counts
    qk, v = heads_BTHD.split((n_q + n_k, n_v), 2)
    q, k = rotate(qk, turn, pairing).split((n_q, n_k), 2)
    # else the gradient of v would keep q and k before RoPE too
    return q, k, v.clone(memory_format=torch.contiguous_format) if torch.is_grad_enabled() else v


def _rotate(x: Tensor, turn: RopeTables, pairing: str) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return Rotation.apply(x, turn.cos, turn.sin, pairing)  # type: ignore[no-any-return]
    return _rotated(x, turn.cos, turn.sin, pairing)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, pairing: str, sign: float = 1.0) -> Tensor:
    d = x.shape[-1]
    swapped = x.roll(d // 2, -1) if pairing == "halves" else x.unflatten(-1, (d // 2, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin, value=sign)


class Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: nothing but the tables is kept, and no pass is made twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:  # noqa: ANN401, D102
        ctx.save_for_backward(cos, sin)
        ctx.pairing = pairing
        return _rotated(x, cos, sin, pairing)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401, D102  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _rotated(dy, cos, sin, ctx.pairing, -1.0), None, None, None


class JoinedRotation(torch.autograd.Function):
    """q and k of heads that lie side by side rotated, v copied, and the gradients joined, each in one native pass."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,  # noqa: ANN401
        heads_BTHD: Tensor,
        counts: tuple[int, int, int],
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return native_gradients.turned_apart(heads_BTHD, counts, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401, D102  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        joined = native_gradients.joined_back(dq, dk, dv, cos, sin)
        if joined is None:
            joined = torch.cat((*(_rotated(x, cos, sin, "halves", -1.0) for x in (dq, dk)), dv), 2)
        return joined, None, None, None

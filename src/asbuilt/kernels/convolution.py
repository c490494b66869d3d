"""The short causal depthwise convolution, a sum of shifted inputs, and the full one by the library's kernel.

Shapes: batch B, tokens T, channels C, taps K; x (B, T, C), w (C, K), the inputs before x (B, C, K - 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels import native


def convolve(x_BTC: Tensor, w_CK: Tensor, bias: Tensor | None, before: Tensor | None, *, silu: bool) -> Tensor:
    """Returns y_t = sum over i of w_i x_(t - K + 1 + i) + bias (B, T, C), with SiLU if asked; None before is zeros.

    Sums are in float32 or wider. Under autograd only x is saved.
    """
    if torch.is_grad_enabled() and (x_BTC.requires_grad or w_CK.requires_grad):
        return ConvolutionFunction.apply(x_BTC, w_CK, bias, before, silu)  # type: ignore[no-any-return]
    made = native.convolve(x_BTC, w_CK, bias, before, silu=silu)
    if made is not None:
        return made
    y = shifted(x_BTC, w_CK, bias, before)
    return (F.silu(y, inplace=True) if silu else y).to(x_BTC.dtype)


def reference(x_BTC: Tensor, w_CK: Tensor, bias: Tensor | None, before: Tensor | None, *, silu: bool) -> Tensor:
    """Returns the same by PyTorch's convolution."""
    B, _, C = x_BTC.shape
    K = w_CK.shape[1]
    past = x_BTC.new_zeros(B, C, K - 1) if before is None else before
    y = F.conv1d(torch.cat((past, x_BTC.transpose(1, 2)), -1), w_CK[:, None], bias, groups=C).transpose(1, 2)
    return F.silu(y) if silu else y


def shifted(x_BTC: Tensor, w_CK: Tensor, bias: Tensor | None, before: Tensor | None) -> Tensor:
    """Returns the sums (B, T, C) in float32 or wider, adding one tap after the other to all tokens."""
    wide = torch.promote_types(x_BTC.dtype, torch.float32)
    x, w_KC = x_BTC.to(wide), w_CK.to(wide).t().contiguous()
    T, K = x.shape[1], len(w_KC)
    y = x * w_KC[-1] if bias is None else torch.addcmul(bias.to(wide), x, w_KC[-1])
    for back in range(1, K):
        tap, late = w_KC[K - 1 - back], min(back, T)
        if back < T:
            y[:, back:].addcmul_(x[:, :-back], tap)
        if before is not None:
            y[:, :late].addcmul_(before[:, :, K - 1 - back :][:, :, :late].transpose(1, 2).to(wide), tap)
    return y


class ConvolutionFunction(torch.autograd.Function):
    """dx_t = sum over i of w_i da_(t + K - 1 - i), dw_i = sum over t of x_(t - K + 1 + i) da_t; a is recomputed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, before: Tensor | None, silu: bool) -> Tensor:  # noqa: ANN401
        """Saves x and the weights."""
        ctx.save_for_backward(x, w, bias, before)
        ctx.silu = silu
        y = shifted(x, w, bias, before)
        return (F.silu(y, inplace=True) if silu else y).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the gradients of x, w and the bias; a cache has none."""
        x, w, bias, before = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        da = dy.to(wide)
        if ctx.silu:
            da = torch.ops.aten.silu_backward(da, shifted(x, w, bias, before))
        K, T, values = w.shape[1], x.shape[1], x.to(wide)
        dx, dw = da * w[:, -1].to(wide), torch.zeros_like(w, dtype=wide)
        dw[:, -1] = (da * values).sum((0, 1))
        for back in range(1, K):
            place, late = K - 1 - back, min(back, T)
            if back < T:
                dx[:, :-back].addcmul_(da[:, back:], w[:, place].to(wide))
                dw[:, place] = (da[:, back:] * values[:, :-back]).sum((0, 1))
            if before is not None:
                dw[:, place] += (da[:, :late] * before[:, :, place:][:, :, :late].transpose(1, 2)).sum((0, 1))
        db = None if bias is None else da.sum((0, 1)).to(bias.dtype)
        return dx.to(x.dtype), dw.to(w.dtype), db, None, None


def step(x_BC: Tensor, w_CK: Tensor, bias: Tensor | None, before: Tensor, *, silu: bool) -> tuple[Tensor, Tensor]:
    """Returns (y (B, C), the inputs before the next token) of one token after `before` (B, C, K - 1)."""
    window = torch.cat((before.to(x_BC.dtype), x_BC[:, :, None]), -1)
    y = (window * w_CK).sum(-1)
    y = y if bias is None else y + bias
    return F.silu(y) if silu else y, window[:, :, 1:]


def last_inputs(x_BTC: Tensor, before: Tensor | None, lengths_B1: Tensor | None, count: int) -> Tensor:
    """Returns each row's last `count` inputs (B, C, count), of `before` and its first `lengths` tokens of x, or all."""
    B, T, C = x_BTC.shape
    if lengths_B1 is None and count <= T:
        return x_BTC[:, T - count :].transpose(1, 2)
    past = x_BTC.new_zeros(B, C, count) if before is None else before.to(x_BTC.dtype)
    every = torch.cat((past, x_BTC.transpose(1, 2)), -1)
    if lengths_B1 is None:
        return every[:, :, T:]
    places = lengths_B1 + torch.arange(count, device=x_BTC.device)
    return every.gather(2, places[:, None].expand(-1, C, -1))


def full(x_BTC: Tensor, w_CCK: Tensor, bias: Tensor | None, before: Tensor | None, dilation: int) -> Tensor:
    """Returns the causal convolution over all channels (B, T, C) after the inputs before x, zeros for None.

    Under autograd only x is saved: the zeros before it are put there again.
    """
    if before is None and torch.is_grad_enabled() and (x_BTC.requires_grad or w_CCK.requires_grad):
        return FullFunction.apply(x_BTC, w_CCK, bias, dilation)  # type: ignore[no-any-return]
    return F.conv1d(padded(x_BTC, w_CCK, before, dilation), w_CCK, bias, dilation=dilation).transpose(1, 2)


def padded(x_BTC: Tensor, w_CCK: Tensor, before: Tensor | None, dilation: int) -> Tensor:
    """Returns x after the inputs before it (B, C, reach + T)."""
    reach = dilation * (w_CCK.shape[2] - 1)
    past = x_BTC.new_zeros(len(x_BTC), x_BTC.shape[2], reach) if before is None else before
    return torch.cat((past, x_BTC.transpose(1, 2)), -1)


class FullFunction(torch.autograd.Function):
    """The library's convolution and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, dilation: int) -> Tensor:  # noqa: ANN401
        """Saves x and the matrices."""
        ctx.save_for_backward(x, w)
        ctx.dilation, ctx.biased = dilation, bias is not None
        return F.conv1d(padded(x, w, None, dilation), w, bias, dilation=dilation).transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the gradients of x, the matrices and the bias."""
        x, w = ctx.saved_tensors
        wide, sizes = padded(x, w, None, ctx.dilation), [len(w)] if ctx.biased else None
        found = torch.ops.aten.convolution_backward(
            dy.transpose(1, 2), wide, w, sizes, [1], [0], [ctx.dilation], False, [0], 1, [True, True, ctx.biased]
        )
        return found[0][:, :, wide.shape[2] - x.shape[1] :].transpose(1, 2), found[1], found[2], None


def activated(sums: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the activation of the sums, which alone are saved under autograd, never the result."""
    if torch.is_grad_enabled() and sums.requires_grad:
        return ActivationFunction.apply(sums, activation)  # type: ignore[no-any-return]
    return activation(sums)


class ActivationFunction(torch.autograd.Function):
    """The activation, computed again for its gradient."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ANN401
        """Saves the sums."""
        ctx.save_for_backward(sums)
        ctx.activation = activation
        return activation(sums)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the gradient of the sums."""
        (sums,) = ctx.saved_tensors
        with torch.enable_grad():
            again = sums.detach().requires_grad_()
            return torch.autograd.grad(ctx.activation(again), again, dy)[0], None

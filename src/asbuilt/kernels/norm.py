"""RMSNorm: the library's composite as reference, and a path that saves only its input and one number per row."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels import native, native_gradients
from asbuilt.kernels.compiler import records


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, offset: bool = False) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * gain over the last dimension, the mean in float32 or wider.

    The gain is `weight`, or 1 + `weight` with `offset`, or 1 without a weight.
    """
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        return RMSNormFunction.apply(x, weight, eps, offset)  # type: ignore[no-any-return]
    # meta: a trace of memory must have the calls that a CPU makes
    if x.numel() == x.shape[-1] and x.device.type in ("cpu", "meta") and not records():
        return one_row(x, weight, eps, offset)
    made = native.gated_norm(x, None, weight, eps, offset=offset)
    if made is not None:
        return made
    return normalise(x, weight, eps, offset)[0]


def reference(x: Tensor, weight: Tensor | None, eps: float, offset: bool = False) -> Tensor:
    """Returns the library's RMSNorm, which under autograd saves two more tensors of x's size."""
    return F.rms_norm(x, (x.shape[-1],), _gain(weight, offset), eps)


def one_row(x: Tensor, weight: Tensor | None, eps: float, offset: bool = False) -> Tensor:
    """Returns one normalised vector in three calls, since calls dominate the cost of a norm in a decode step."""
    length = _number(torch.linalg.vector_norm(x, dtype=_wide(x)))
    rstd = (length * length / x.numel() + eps) ** -0.5
    gain = _gain(weight, offset)
    return x * rstd if gain is None else torch.addcmul(_zero(x.dtype, x.device), x, gain, value=rstd)


def _number(x: Tensor) -> float:
    return 1.0 if x.is_meta else x.item()


@cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def normalise(x: Tensor, weight: Tensor | None, eps: float, offset: bool = False) -> tuple[Tensor, Tensor]:
    """Returns (normalised x, reciprocal root mean square per row) in few passes over memory.

    Works in place and therefore not under autograd; `RMSNormFunction` calls it outside of autograd.
    """
    wide = _widen(x)
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    rstd = torch.rsqrt(length.square() / x.shape[-1] + eps)
    normal = wide * rstd if wide is x else wide.mul_(rstd).to(x.dtype)
    gain = _gain(weight, offset)
    return normal if gain is None else normal.mul_(gain), rstd


def _gain(weight: Tensor | None, offset: bool) -> Tensor | None:
    return weight + 1 if offset and weight is not None else weight


def _whole_gain(x: Tensor, weight: Tensor | None, offset: bool) -> Tensor:
    gain = _gain(weight, offset)
    return x.new_ones(x.shape[-1]) if gain is None else gain


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def _widen(x: Tensor) -> Tensor:
    return x.to(_wide(x))


class RMSNormFunction(torch.autograd.Function):
    """dx = r dy * gain - x r^3 sum(dy * x * gain) / M and dgain = sum over rows of r dy * x, with r as it was saved.

    Both sums are products of one tensor, dy * x, with a vector, and called so: they are not counted as products of
    matrices, which no part declares.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: bool) -> Tensor:  # noqa: ANN401
        """Saves x, the weight and one number per row."""
        made = native_gradients.norm(x, _whole_gain(x, weight, offset), eps)
        y, rstd = normalise(x, weight, eps, offset) if made is None else made
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the gradients of x and weight."""
        x, weight, rstd = ctx.saved_tensors
        found = native_gradients.norm_gradient(x, _whole_gain(x, weight, ctx.offset), rstd, dy)
        if found is not None:
            return found[0], None if weight is None else found[1], None, None
        gain, wide_x, wide_dy = _gain(weight, ctx.offset), _widen(x), _widen(dy)
        both, d = wide_dy * wide_x, x.shape[-1]
        wide_gain = both.new_ones(d) if gain is None else gain.to(both.dtype)
        rows = both.flatten(0, -2)
        along = torch.mv(rows, wide_gain).view_as(rstd)
        dx = (wide_dy * rstd if gain is None else (wide_dy * wide_gain).mul_(rstd)).addcmul_(
            wide_x, along * rstd**3, value=-1 / d
        )
        dw = None if weight is None else torch.mv(rows.t(), rstd.flatten()).to(weight.dtype)
        return dx.to(x.dtype), dw, None, None

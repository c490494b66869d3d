"""Smooth activations under autograd: nothing is saved but what they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels import native, native_gradients

# Activations that are differentiated by their input: their values, and their gradients from that of the result.
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": lambda dy, x: torch.ops.aten.gelu_backward(dy, x, approximate="tanh"),
    "silu": torch.ops.aten.silu_backward,
}


def activated(x: Tensor, name: str) -> Tensor:
    """Returns the smooth activation of that name of x, by the native kernels where they differentiate it."""
    known = name in native.ACTIVATIONS and x.device.type == "cpu" and x.dtype in native_gradients.NUMBERS
    if known and torch.is_grad_enabled() and x.requires_grad and not torch.compiler.is_compiling():
        return Activated.apply(x, name)  # type: ignore[no-any-return]
    return VALUES[name](x)


class Activated(torch.autograd.Function):
    """An activation that saves its input, as the library's own do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:  # noqa: ANN401, D102
        ctx.save_for_backward(x)
        ctx.named = name
        made = native_gradients.activated(x, name)
        return VALUES[name](x) if made is None else made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401, D102  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        found = native_gradients.activated_gradient(x, dy, ctx.named)
        return GRADIENTS[ctx.named](dy, x) if found is None else found, None

"""A function of which autograd saves only the inputs: the backward pass computes it again.

Chen et al. 2016 (arXiv 1604.06174), for kernels that make many more tensors than they read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def recomputed(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Returns function(*tensors), a tensor; `tensors` are all that it reads and that may need a gradient."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return RecomputeFunction.apply(function, *tensors)  # type: ignore[no-any-return]
    return function(*tensors)


class RecomputeFunction(torch.autograd.Function):
    """Gradients by autograd, of a second forward pass in the backward pass."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:  # noqa: ANN401
        """Saves the inputs."""
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the gradients of the inputs that need one."""
        needed = ctx.needs_input_grad[1:]
        inputs = [
            t if t is None else t.detach().requires_grad_(n) for t, n in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            y = ctx.function(*inputs)
        wanted = [t for t, n in zip(inputs, needed, strict=True) if t is not None and n]
        # what has no influence, as the decay of a single token, has a gradient of zeros
        found = iter(torch.autograd.grad(y, wanted, dy, allow_unused=True, materialize_grads=True))
        return None, *(next(found) if n else None for n in needed)

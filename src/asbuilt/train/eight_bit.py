"""AdamW whose moments are held in 8 bits, block by block (Dettmers et al. 2021, arXiv 2110.02861).

Every 256 numbers of a moment are divided by the largest magnitude among them, and each is held as the nearest of 256
values that are dense near 0; tensors of fewer than 4,096 numbers stay in float32. A step expands one tensor's moments
at a time, and holds them again. The bytes are those that `plan train` bills: 2.03 a parameter instead of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from asbuilt.plan.train.optimizers import EIGHT_BIT_BLOCK, EIGHT_BIT_LEAST

DECADES = 7  # each has twice as many values as the one below


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with decoupled weight decay, its two moments in blocks of 8 bits."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad.float(), group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        state["step"] = step = state.get("step", 0) + 1
        first = self._moment(parameter, "first", signed=True).lerp_(gradient, 1 - beta1)
        second = self._moment(parameter, "second", signed=False).mul_(beta2)
        second.addcmul_(gradient, gradient, value=1 - beta2)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        root = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        parameter.addcdiv_(first, root, value=-group["lr"] / (1 - beta1**step))
        self._hold(parameter, "first", first, signed=True)
        self._hold(parameter, "second", second, signed=False)

    def _moment(self, parameter: Tensor, name: str, *, signed: bool) -> Tensor:
        """Returns a moment in float32, 0 at first."""
        state = self.state[parameter]
        if name in state:
            return state[name]
        if f"{name} codes" not in state:
            return torch.zeros_like(parameter, dtype=torch.float32)
        return expanded(state[f"{name} codes"], state[f"{name} scales"], signed=signed)

    def _hold(self, parameter: Tensor, name: str, moment: Tensor, *, signed: bool) -> None:
        state = self.state[parameter]
        if parameter.numel() < EIGHT_BIT_LEAST:
            state[name] = moment
        else:
            state[f"{name} codes"], state[f"{name} scales"] = coded(moment, signed=signed)


@cache
def values(signed: bool) -> tuple[float, ...]:
    """Returns the 256 values in ascending order: 0, 1, and between powers of ten, each decade twice as many.

    Signed ones have 127 on either side of 0, others 254 above it.
    """
    found = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2 ** (decade + (not signed))
        top = 10.0 ** (decade - DECADES + 1)
        middles = [top * (0.1 + 0.9 * (i + 0.5) / count) for i in range(count)]
        found += middles + ([-middle for middle in middles] if signed else [])
    return tuple(sorted(found))


def coded(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Returns the codes (in x's shape) of the nearest values, and the scale of each block of 256 numbers."""
    table = torch.tensor(values(signed), device=x.device)
    flat = x.flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % EIGHT_BIT_BLOCK)).view(-1, EIGHT_BIT_BLOCK)
    scales = padded.abs().amax(-1)
    relative = padded / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(relative, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8)
    return codes.flatten()[: len(flat)].clone().view(x.shape), scales


def expanded(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Returns the numbers, in float32, that codes and their blocks' scales stand for."""
    table = torch.tensor(values(signed), device=codes.device)
    each = scales.repeat_interleave(EIGHT_BIT_BLOCK)[: codes.numel()]
    return (table[codes.flatten().int()] * each).view(codes.shape)

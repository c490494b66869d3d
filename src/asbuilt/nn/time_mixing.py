"""RWKV-4's mixers, with a sequence's states in the cache.

Shapes: batch B, new tokens T, model width M, channels C.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.convolution import last_inputs
from asbuilt.kernels.wkv import NONE, State, wkv
from asbuilt.nn.cache import StateCache
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes, module
from asbuilt.nn.step import Step
from asbuilt.spec import time_mixing as spec


@computes(spec.TokenShift)
class TokenShift(PartModule):
    """Each token mixed with the one before it."""

    def __init__(self, part: spec.TokenShift, path: str) -> None:
        super().__init__(part, path)
        self.part = part

    def forward(self, x_BTM: Tensor, step: Step) -> tuple[Tensor, ...]:
        """Returns one (B, T, M) for each target."""
        ends = self.before(x_BTM, step), x_BTM
        of_0, of_1 = reversed(ends) if self.part.of_past else ends
        return tuple(torch.lerp(of_0, of_1, self.get_parameter(name)) for name in self.part.targets)

    def before(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns each token's predecessor (B, T, M), and stores the last valid token of each row."""
        layer = None if step.cache is None else step.cache.layer(self.path, StateCache)
        past_BM = None if layer is None or not any(step.past) else layer.read()[0].to(x_BTM.dtype)
        first_B1M = x_BTM.new_zeros(x_BTM[:, :1].shape) if past_BM is None else past_BM[:, None]
        before_BTM = torch.cat((first_B1M, x_BTM[:, :-1]), 1)
        if step.valid_BT is not None:  # the first valid token of a row follows the past, wherever it is
            begins = step.valid_BT & (step.valid_BT.cumsum(1) == 1)
            before_BTM = torch.where(begins[..., None], first_B1M, before_BTM)
        if layer is not None:
            layer.write((self.last(x_BTM, past_BM, step.valid_BT),))
        return before_BTM

    def last(self, x_BTM: Tensor, past_BM: Tensor | None, valid_BT: Tensor | None) -> Tensor:
        """Returns each row's last valid token (B, M), the past one where a row has none."""
        if valid_BT is None:
            return x_BTM[:, -1]
        order = (~valid_BT).int().argsort(dim=1, stable=True)
        together = x_BTM.gather(1, order[:, :, None].expand_as(x_BTM))
        before = None if past_BM is None else past_BM[:, :, None]
        return last_inputs(together, before, valid_BT.sum(1, keepdim=True), 1)[:, :, 0]


@computes(spec.TimeMixing)
class TimeMixing(PartModule):
    """o(sigmoid(r) * wkv(k, v))."""

    k: Linear
    v: Linear
    r: Linear
    o: Linear
    decay: Tensor
    first: Tensor

    def __init__(self, part: spec.TimeMixing, path: str) -> None:
        super().__init__(part, path)
        self.shift = module(part.shift, f"{path}.shift")

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        k_BTM, v_BTM, r_BTM = self.shift(x_BTM, step)
        k_BTC, v_BTC, r_BTC = self.k(k_BTM), self.v(v_BTM), torch.sigmoid(self.r(r_BTM))
        return self.o(r_BTC * self.average(k_BTC, v_BTC, step).to(x_BTM.dtype))

    def average(self, k_BTC: Tensor, v_BTC: Tensor, step: Step) -> Tensor:
        """Returns wkv (B, T, C), and stores the state after the last valid token of each row."""
        wide = torch.promote_types(k_BTC.dtype, torch.float32)
        w_C = -torch.exp(self.decay.to(wide))
        layer = None if step.cache is None else step.cache.layer(self.path, StateCache)
        state = self.read(layer) if layer is not None and any(step.past) else None
        if step.valid_BT is None:
            y_BTC, state = wkv(k_BTC, v_BTC, w_C, self.first, state)
        else:
            y_BTC, state = self.ragged(k_BTC, v_BTC, w_C, state, step.valid_BT)
        if layer is not None:
            layer.write(state)
        return y_BTC

    def read(self, layer: StateCache) -> State:
        """Returns the state; a row that has none yet, zeros in the cache, has an empty one."""
        numerator, denominator, exponent = layer.read()
        return numerator, denominator, torch.where(denominator == 0, NONE, exponent)

    def ragged(
        self, k_BTC: Tensor, v_BTC: Tensor, w_C: Tensor, state: State | None, valid_BT: Tensor
    ) -> tuple[Tensor, State]:
        """Returns the same row by row, of each row's valid tokens."""
        y_BTC = torch.zeros(k_BTC.shape, dtype=w_C.dtype, device=k_BTC.device)
        after: list[State] = []
        for row, valid_T in enumerate(valid_BT):
            own: State | None = None if state is None else tuple(x[row : row + 1] for x in state)  # type: ignore[assignment]
            if valid_T.any():
                k, v = k_BTC[row, valid_T][None], v_BTC[row, valid_T][None]
                y, own = wkv(k, v, w_C, self.first, own)
                y_BTC[row, valid_T] = y[0]
            elif own is None:
                nothing = w_C.new_zeros(1, len(w_C))
                own = (nothing, nothing, nothing)
            assert own is not None
            after.append(own)
        numerator, denominator, exponent = (torch.cat(x) for x in zip(*after, strict=True))
        return y_BTC, (numerator, denominator, exponent)


@computes(spec.ChannelMixing)
class ChannelMixing(PartModule):
    """sigmoid(r) * down(relu(up)^2), or without the first factor."""

    up: Linear
    r: Linear
    down: Linear

    def __init__(self, part: spec.ChannelMixing, path: str) -> None:
        super().__init__(part, path)
        self.shift = module(part.shift, f"{path}.shift")

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        up_BTM, *r_BTM = self.shift(x_BTM, step)
        made = self.down(F.relu(self.up(up_BTM)).square())
        return torch.sigmoid(self.r(r_BTM[0])) * made if r_BTM else made

"""The real-gated linear recurrent unit, with a sequence's state in the cache.

Shapes: batch B, new tokens T, model width M, channels C, heads H, width of a head's block D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asbuilt.kernels.rg_lru import recur
from asbuilt.nn.cache import StateCache
from asbuilt.nn.convolution import ShortConvolution
from asbuilt.nn.feedforward import ACTIVATIONS
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes, module
from asbuilt.nn.step import Step
from asbuilt.spec import rg_lru as spec


@computes(spec.RGLRU)
class RGLRU(PartModule):
    """o(activation(y(x)) * h), with h the gated recurrence."""

    y: Linear
    x: Linear
    o: Linear
    conv: ShortConvolution
    input_gate: Tensor
    recurrent_gate: Tensor
    input_gate_bias: Tensor
    recurrent_gate_bias: Tensor
    decay: Tensor

    def __init__(self, part: spec.RGLRU, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.conv = module(part.conv, f"{path}.conv")  # type: ignore[assignment]
        self.yx = self.fused(self.y, self.x)
        self.activation = ACTIVATIONS[part.activation]

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        y_BTC, u_BTC = self.yx(x_BTM)
        h_BTC = self.recur(self.conv(u_BTC, step), step)
        return self.o(self.activation(y_BTC) * h_BTC.to(x_BTM.dtype))

    def recur(self, u_BTC: Tensor, step: Step) -> Tensor:
        """Returns h (B, T, C), and stores the last of each row."""
        r_BTC = self.gate(u_BTC, self.recurrent_gate, self.recurrent_gate_bias)
        i_BTC = self.gate(u_BTC, self.input_gate, self.input_gate_bias)
        first_BT = step.positions_BT == 0
        if step.valid_BT is not None:  # padding has a decay of 1 and adds nothing, so it leaves the state as it is
            r_BTC, u_BTC = (x * step.valid_BT[..., None] for x in (r_BTC, u_BTC))
        layer = None if step.cache is None else step.cache.layer(self.path, StateCache)
        before = None if layer is None or not any(step.past) else layer.read()[0]
        h_BTC = recur(u_BTC, r_BTC, i_BTC, self.decay, first_BT, before)
        if layer is not None:
            layer.write((h_BTC[:, -1],))
        return h_BTC

    def gate(self, u_BTC: Tensor, block_HDD: Tensor, bias_HD: Tensor) -> Tensor:
        """Returns a sigmoid (B, T, C) of each head's channels times its block."""
        u_HND = u_BTC.flatten(0, 1).unflatten(1, bias_HD.shape).transpose(0, 1)
        made = torch.baddbmm(bias_HD[:, None], u_HND, block_HDD)
        return made.transpose(0, 1).reshape(u_BTC.shape).sigmoid()

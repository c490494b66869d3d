"""Feed-forwards: the plain one of two maps and the gated one of three.

Shapes: batch B, new tokens T, model width M.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import feedforward as spec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "quick_gelu": lambda x: F.silu(1.702 * x) / 1.702,
}


@computes(spec.MLP)
class MLP(PartModule):
    """down(activation(up(x)))."""

    up: Linear
    down: Linear

    def __init__(self, part: spec.MLP, path: str) -> None:
        super().__init__(part, path)
        self.activation = ACTIVATIONS[part.activation]

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        return self.down(self.activation(self.up(x_BTM)))


@computes(spec.GatedMLP)
class GatedMLP(PartModule):
    """down(activation(gate(x)) * up(x))."""

    gate: Linear
    up: Linear
    down: Linear

    def __init__(self, part: spec.GatedMLP, path: str) -> None:
        super().__init__(part, path)
        self.activation = ACTIVATIONS[part.activation]
        self.gate_up = self.fused(self.gate, self.up)

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        gate, up = self.gate_up(x_BTM)
        hidden = self.activation(gate)
        # autograd saves the factors; without it the product can be in place
        return self.down(hidden * up if torch.is_grad_enabled() else hidden.mul_(up))

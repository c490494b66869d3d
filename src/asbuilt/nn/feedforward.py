"""Feed-forwards: the plain one of two maps and the gated one of three.

Shapes: batch B, new tokens T, model width M.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels import gates, native
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import feedforward as spec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": partial(gates.activated, name="gelu"),
    "gelu_tanh": partial(gates.activated, name="gelu_tanh"),
    "silu": partial(gates.activated, name="silu"),
    "quick_gelu": lambda x: F.silu(1.702 * x) / 1.702,
    "relu2": lambda x: _squared(F.relu(x)),
}


def _squared(x: Tensor) -> Tensor:
    """Returns x^2, in place where autograd does not need x."""
    return x.square() if torch.is_grad_enabled() else x.mul_(x)


@computes(spec.XIELU)
class XIELU(PartModule):
    """a_p x^2 + beta x for x > 0, else a_n (e^min(x, eps) - 1 - x) + beta x."""

    alpha_p: Tensor
    alpha_n: Tensor
    beta: Tensor
    eps: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Returns x transformed elementwise."""
        beta, eps = self.beta.to(x.dtype), self.eps.to(x.dtype)
        above = x.square() * F.softplus(self.alpha_p)
        below = torch.expm1(torch.minimum(x, eps)) - x
        below = below * (beta + F.softplus(self.alpha_n))
        return torch.where(x > 0, above, below) + beta * x


@computes(spec.MLP)
class MLP(PartModule):
    """down(activation(up(x)))."""

    up: Linear
    down: Linear

    def __init__(self, part: spec.MLP, path: str) -> None:
        super().__init__(part, path)
        own = part.activation
        self.activation = XIELU(own, f"{path}.activation") if isinstance(own, spec.XIELU) else ACTIVATIONS[own]

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        return self.down(self.activation(self.up(x_BTM)))


@computes(spec.GatedMLP)
class GatedMLP(PartModule):
    """down(activation(c gate(x)) * up(x))."""

    gate: Linear
    up: Linear
    down: Linear

    def __init__(self, part: spec.GatedMLP, path: str) -> None:
        super().__init__(part, path)
        self.named, self.activation = part.activation, ACTIVATIONS[part.activation]
        self.clamp, self.gate_scale = part.clamp, part.gate_scale
        self.deviations = None if part.sparsity is None else NormalDist().inv_cdf(part.sparsity)
        self.gate_up = self.fused(self.gate, self.up)

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        return self.combined(*self.gate_up(x_BTM))

    def combined(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns (B, T, M) of what the gate and up maps give."""
        if self.clamp is not None:
            return self.down(clamped(gate, up, self.clamp))
        if self.deviations is not None:
            gate = above(gate, self.deviations)
        if self.gate_scale == 1.0 and gate.numel() > gate.shape[-1]:  # of one row, calls cost more than the numbers
            made = native.gated_product(gate, up, self.named)
            if made is not None:
                return self.down(made)
        hidden = self.activation(gate if self.gate_scale == 1.0 else gate * self.gate_scale)
        # autograd saves the factors; without it the product can be in place
        return self.down(hidden * up if torch.is_grad_enabled() else hidden.mul_(up))


def above(x: Tensor, deviations: float) -> Tensor:
    """Returns what each number of the last dimension has above mean + `deviations` standard deviations, 0 at least."""
    std, mean = torch.std_mean(x, -1, correction=0, keepdim=True)
    return F.relu(x - (mean + std * deviations))


def clamped(gate: Tensor, up: Tensor, part: spec.ClampedGate) -> Tensor:
    """Returns (up + 1) * gate * sigmoid(alpha gate), with the gate clamped above the limit, up on both sides.

    Without `shift` up is not increased; with `activated` the gate's activation is clamped, not the gate.
    """
    if part.activated:
        opened = (F.silu(gate * part.alpha) / part.alpha).clamp(max=part.limit)
    else:
        opened = F.silu(gate.clamp(max=part.limit) * part.alpha) / part.alpha
    cut = up.clamp(-part.limit, part.limit)
    if part.shift:
        cut = cut + 1
    return cut * opened

"""Recurrent networks, with a sequence's state in the cache.

Shapes: batch B, new tokens T, model width M, width of h H, of all gates G.
"""

from __future__ import annotations

from torch import Tensor

from asbuilt.kernels.recompute import recomputed
from asbuilt.kernels.recurrent import unrolled
from asbuilt.nn.cache import StateCache
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import recurrent as spec


@computes(spec.Recurrent)
class Recurrent(PartModule):
    """o(h), with h of one token after the other."""

    x: Linear
    o: Linear
    hidden: Tensor
    hidden_bias: Tensor | None

    def __init__(self, part: spec.Recurrent, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        if not part.bias:
            self.register_parameter("hidden_bias", None)

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        given = (self.x(x_BTM), self.hidden, self.hidden_bias, step.valid_BT)
        if step.cache is None:
            return self.o(recomputed(self.alone, *given))
        layer = step.cache.layer(self.path, StateCache)
        h_BTH, state = unrolled(self.part.cell, *given, tuple(layer.read()) if any(step.past) else None)
        layer.write(state)
        return self.o(h_BTH)

    def alone(self, x_BTG: Tensor, w_GH: Tensor, bias_G: Tensor | None, valid_BT: Tensor | None) -> Tensor:
        """Returns h (B, T, H) of a text from its beginning."""
        return unrolled(self.part.cell, x_BTG, w_GH, bias_G, valid_BT, None)[0]

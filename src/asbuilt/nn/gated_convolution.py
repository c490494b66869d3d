"""The gated short convolution. Shapes: batch B, new tokens T, model width M, channels C."""

from __future__ import annotations

from torch import Tensor

from asbuilt.nn.convolution import ShortConvolution
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes, module
from asbuilt.nn.step import Step
from asbuilt.spec import gated_convolution as spec


@computes(spec.GatedConvolution)
class GatedConvolution(PartModule):
    """o(c * conv(b * x))."""

    b: Linear
    c: Linear
    x: Linear
    o: Linear
    conv: ShortConvolution

    def __init__(self, part: spec.GatedConvolution, path: str) -> None:
        super().__init__(part, path)
        self.conv = module(part.conv, f"{path}.conv")  # type: ignore[assignment]
        self.bcx = self.fused(self.b, self.c, self.x)

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        b_BTC, c_BTC, x_BTC = self.bcx(x_BTM)
        return self.o(c_BTC * self.conv(b_BTC * x_BTC, step))

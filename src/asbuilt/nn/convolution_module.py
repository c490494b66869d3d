"""The convolution module of conformers. Shapes: batch B, new tokens T, model width M, channels C."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from asbuilt.nn.convolution import ShortConvolution
from asbuilt.nn.feedforward import ACTIVATIONS
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes, module, optional
from asbuilt.nn.step import Step
from asbuilt.spec import convolution_module as spec


@computes(spec.ConvolutionModule)
class ConvolutionModule(PartModule):
    """o(activation(norm(conv(a * sigmoid(b)))))."""

    x: Linear
    o: Linear
    conv: ShortConvolution

    def __init__(self, part: spec.ConvolutionModule, path: str) -> None:
        super().__init__(part, path)
        self.conv = module(part.conv, f"{path}.conv")  # type: ignore[assignment]
        self.norm = optional(part.norm, f"{path}.norm")
        self.activation = ACTIVATIONS[part.activation]

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        y_BTC = self.conv(F.glu(self.x(x_BTM), -1), step)
        return self.o(self.activation(y_BTC if self.norm is None else self.norm(y_BTC)))

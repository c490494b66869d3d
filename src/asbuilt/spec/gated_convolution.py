"""The gated short convolution: a depthwise convolution between two gates, all three read from the token.

Liquid AI 2025 (LFM2, arXiv 2511.23404), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.attention import output_map
from asbuilt.spec.convolution import ShortConvolution
from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.part import Pass, Product, divided, require, require_flags, require_sizes


@dataclass(frozen=True, kw_only=True)
class GatedConvolution(Mixer):
    """o(c * conv(b * x)), with the gates b, c and the input x maps of the stream.

    All that is remembered is the convolution's: its last inputs.
    """

    kind = "ssm"
    d_model: int
    """Width of the residual stream."""
    conv: ShortConvolution
    """The convolution, whose channels are the width of the gates."""
    bias: bool = False
    """Whether b, c, x and o have biases."""
    b: Map | None = None
    """Replaces the plain map to the gate before the convolution."""
    c: Map | None = None
    """Replaces the plain map to the gate after it."""
    x: Map | None = None
    """Replaces the plain map to the convolution."""
    o: Map | None = None
    """Replaces the plain map back to the stream."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model")
        require_flags(self, "bias")
        require(self, "conv", isinstance(self.conv, ShortConvolution), "a ShortConvolution")
        self.require_maps()

    def plain_maps(self) -> dict[str, Linear]:
        """b, c and x (d_model to the channels), o (the channels to d_model)."""
        width = self.conv.channels
        into = Linear(d_in=self.d_model, d_out=width, bias=self.bias, split="out", belongs="ssm")
        out = replace(output_map(width, self.d_model, self.bias), belongs="ssm")
        return {"b": into, "c": into, "x": into, "o": out}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds channels / tensor of the channels; o's bias is replicated."""
        return self.resized(conv=replace(self.conv, channels=divided(self.conv, "channels", tensor)))

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Each map once; the convolution counts its own."""
        return self.map_products(run, *self.maps)

"""The convolution module of conformers: a gated linear unit, a depthwise convolution over tokens, a norm.

Gulati et al. 2020 (Conformer, arXiv 2005.08100), section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.attention import output_map
from asbuilt.spec.convolution import ShortConvolution
from asbuilt.spec.feedforward import ACTIVATIONS, Activation
from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.norms import LayerNorm, Norm, RMSNorm
from asbuilt.spec.part import Pass, Product, divided, require, require_choice, require_flags, require_sizes


@dataclass(frozen=True, kw_only=True)
class ConvolutionModule(Mixer):
    """o(activation(norm(conv(a * sigmoid(b))))), where a and b are the halves of one map of the stream.

    All that is remembered is the convolution's: its last inputs, if it caches them.
    """

    kind = "ssm"
    d_model: int
    """Width of the residual stream."""
    conv: ShortConvolution
    """The convolution, whose channels are the width of a and of b; it has no activation."""
    norm: Norm | None = None
    """Norm of what the convolution gives."""
    activation: Activation = "silu"
    """Activation after the norm."""
    bias: bool = False
    """Whether the maps have biases."""
    x: Map | None = None
    """Replaces the plain map to a and b."""
    o: Map | None = None
    """Replaces the plain map back to the stream."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model")
        require_flags(self, "bias")
        require_choice(self, "activation", ACTIVATIONS)
        plain = isinstance(self.conv, ShortConvolution) and self.conv.activation is None
        require(self, "conv", plain, "a ShortConvolution without an activation")
        normed = self.norm is None or isinstance(self.norm, RMSNorm | LayerNorm)
        fits = normed and (self.norm is None or self.norm.d == self.conv.channels)
        require(self, "norm", fits, f"a norm over the {self.conv.channels} channels")
        self.require_maps()

    @property
    def decodes(self) -> bool:
        """True if the convolution's last inputs are cached."""
        return self.conv.cached

    def plain_maps(self) -> dict[str, Linear]:
        """x (d_model to twice the channels), o (the channels to d_model)."""
        width = self.conv.channels
        into = Linear(d_in=self.d_model, d_out=2 * width, bias=self.bias, split="out", belongs="ssm")
        return {"x": into, "o": replace(output_map(width, self.d_model, self.bias), belongs="ssm")}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds channels / tensor of the channels, of a, b and the norm; o's bias is replicated."""
        channels = divided(self.conv, "channels", tensor)
        norm = None if self.norm is None else replace(self.norm, d=channels)
        return self.resized(conv=replace(self.conv, channels=channels), norm=norm)

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Each map once; the convolution counts its own."""
        return self.map_products(run, *self.maps)

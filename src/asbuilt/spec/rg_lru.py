"""The real-gated linear recurrent unit: a diagonal recurrence whose decay and input are gated by the token itself.

De et al. 2024 (Griffin, arXiv 2402.19427), section 2.4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.attention import output_map
from asbuilt.spec.convolution import ShortConvolution
from asbuilt.spec.feedforward import ACTIVATIONS, Activation
from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.part import (
    Pass,
    Product,
    Remembered,
    Weight,
    divided,
    require,
    require_choice,
    require_flags,
    require_sizes,
)


@dataclass(frozen=True, kw_only=True)
class RGLRU(Mixer):
    """o(activation(y(x)) * h), h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t u_t, where u = conv(x(x)).

    a = exp(-8 softplus(decay) r), and the gates r and i are sigmoids of u times a block of W per head, plus a bias.
    The first token of a text is not scaled: h_1 = i_1 u_1. The state is h, always float32.
    """

    kind = "ssm"
    d_model: int
    """Width of the residual stream."""
    d_rnn: int
    """Width of the recurrence."""
    n_heads: int
    """Blocks of the gates' block-diagonal matrices."""
    conv: ShortConvolution
    """The convolution before the recurrence."""
    activation: Activation
    """Activation of the branch that multiplies the recurrence."""
    bias: bool = False
    """Whether x, y and o have biases."""
    y: Map | None = None
    """Replaces the plain map to the multiplied branch."""
    x: Map | None = None
    """Replaces the plain map to the recurrence."""
    o: Map | None = None
    """Replaces the plain map back to the stream."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_rnn", "n_heads")
        require_choice(self, "activation", ACTIVATIONS)
        require_flags(self, "bias")
        require(self, "n_heads", self.d_rnn % self.n_heads == 0, f"a divisor of d_rnn = {self.d_rnn}")
        require(self, "conv", self.conv.channels == self.d_rnn, f"a convolution of d_rnn = {self.d_rnn} channels")
        self.require_maps()

    @property
    def d_block(self) -> int:
        """Width of a block of the gates."""
        return self.d_rnn // self.n_heads

    def plain_maps(self) -> dict[str, Linear]:
        """y and x (d_model to d_rnn), o (d_rnn to d_model)."""
        into = Linear(d_in=self.d_model, d_out=self.d_rnn, bias=self.bias, split="out", belongs="ssm")
        out = replace(output_map(self.d_rnn, self.d_model, self.bias), belongs="ssm")
        return {"y": into, "x": into, "o": out}

    def holds(self) -> dict[str, Weight]:
        """A block (d_block, d_block) and a bias (d_block) of each gate per head, and the decay (d_rnn)."""
        block = Weight(shape=(self.n_heads, self.d_block, self.d_block), role="matrix", split="out")
        bias = Weight(shape=(self.n_heads, self.d_block), role="bias", split="out")
        decay = Weight(shape=(self.d_rnn,), role="bias", split="out")
        return {
            "input_gate": block,
            "recurrent_gate": block,
            "input_gate_bias": bias,
            "recurrent_gate_bias": bias,
            "decay": decay,
        }

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_heads / tensor heads with their channels; o's bias is replicated."""
        heads = divided(self, "n_heads", tensor)
        width = heads * self.d_block
        return self.resized(n_heads=heads, d_rnn=width, conv=replace(self.conv, channels=width))

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The maps, and per head a block of each gate; the recurrence itself is elementwise."""
        gates = (
            Product(name=name, a=run.rows, b=self.d_block, c=self.d_block, n=self.n_heads, weight=name)
            for name in ("input_gate", "recurrent_gate")
        )
        return (*self.map_products(run, "y", "x"), *gates, *self.map_products(run, "o"))

    def remembers(self) -> tuple[Remembered, ...]:
        """The state: d_rnn float32 numbers for a sequence."""
        return (Remembered(name="state", shape=(self.d_rnn,), per="sequence", dtype="float32"),)

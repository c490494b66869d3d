"""Recurrent networks: the plain one, gated recurrent units, and long short-term memory.

Elman 1990 (Cognitive Science 14); Cho et al. 2014 (arXiv 1406.1078); Hochreiter & Schmidhuber 1997 (Neural Computation
9), with the forget gate of Gers et al. 2000. As in `torch.nn`, whose weights and gates these are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.part import Pass, Product, Remembered, Weight, require_choice, require_flags, require_sizes

Cell = Literal["tanh", "relu", "gru", "lstm"]
CELLS: tuple[Cell, ...] = ("tanh", "relu", "gru", "lstm")


@dataclass(frozen=True, kw_only=True)
class Recurrent(Mixer):
    """o(h), h_t = cell(x(x_t), hidden h_(t-1)): tokens one after the other, each a product with the hidden matrix.

    `tanh` and `relu`: h_t = activation(x + Wh). `gru`: r and z are sigmoids of their shares of x + Wh, n = tanh(x + r *
    Wh), h_t = (1 - z) n + z h_(t-1). `lstm`: i, f and o are sigmoids, g = tanh, c_t = f c_(t-1) + i g, h_t = o
    tanh(c_t). Gates are in the order r, z, n, and i, f, g, o. The first token of a text has no product: h_0 is 0. h and
    c are the state, in float32; a device holds all of it, since every product needs all of h.
    """

    kind = "ssm"
    d_model: int
    """Width of the residual stream."""
    d_hidden: int
    """Width of h."""
    cell: Cell = "lstm"
    """What becomes of x and h."""
    bias: bool = True
    """Whether x and the hidden matrix each have a bias."""
    output_bias: bool = False
    """Whether o has a bias."""
    x: Map | None = None
    """Replaces the plain map to all gates."""
    o: Map | None = None
    """Replaces the plain map back to the stream."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_hidden")
        require_choice(self, "cell", CELLS)
        require_flags(self, "bias", "output_bias")
        self.require_maps()

    @property
    def d_gates(self) -> int:
        """Width of all gates together: h's own for a plain cell, three times that of a GRU, four of an LSTM."""
        return {"gru": 3, "lstm": 4}.get(self.cell, 1) * self.d_hidden

    def plain_maps(self) -> dict[str, Linear]:
        """x (d_model to all gates), o (d_hidden to d_model)."""
        x = Linear(d_in=self.d_model, d_out=self.d_gates, bias=self.bias, belongs="ssm")
        o = Linear(d_in=self.d_hidden, d_out=self.d_model, bias=self.output_bias, to_stream=True, belongs="ssm")
        return {"x": x, "o": o}

    def holds(self) -> dict[str, Weight]:
        """The hidden matrix (d_gates, d_hidden) and, if enabled, its bias (d_gates)."""
        matrix = {"hidden": Weight(shape=(self.d_gates, self.d_hidden), role="matrix")}
        return matrix | ({"hidden_bias": Weight(shape=(self.d_gates,), role="bias")} if self.bias else {})

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Each map once, and one product with the hidden matrix after another, none for the first token of a text."""
        steps = run.tokens if run.past else run.tokens - 1
        hidden = Product(
            name="hidden", a=run.batch, b=self.d_hidden, c=self.d_gates, n=steps, weight="hidden", recomputed=True
        )
        return (*self.map_products(run, "x"), *((hidden,) if steps else ()), *self.map_products(run, "o"))

    def remembers(self) -> tuple[Remembered, ...]:
        """h, and for an LSTM c: d_hidden float32 numbers each for a sequence."""
        names = ("h", "c") if self.cell == "lstm" else ("h",)
        return tuple(Remembered(name=name, shape=(self.d_hidden,), per="sequence", dtype="float32") for name in names)

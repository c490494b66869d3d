"""Mamba: a selective state space, each channel of which has a state of its own and steps that depend on the input.

Gu & Dao 2023 (arXiv 2312.00752), sections 3.1 to 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.convolution import ShortConvolution
from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import Pass, Product, Remembered, Weight, divided, require, require_flags, require_sizes


@dataclass(frozen=True, kw_only=True)
class Mamba(Mixer):
    """h_t = e^(dt_t A) h_(t-1) + dt_t b_t x_t, y_t = c_t h_t + d x_t, for each channel; A = -e^a_log, d learned.

    The input map gives x, which passes a short convolution, and a gate z; a map of x gives b, c (d_state each) and,
    through a narrow vector, the steps dt = softplus(...) of all channels. The output map reads y * silu(z). The sums
    over d_state are elementwise, so like those of norms they are no products. h is (d_inner, d_state), in float32.
    """

    kind = "ssm"
    d_model: int
    """Width of the residual stream."""
    d_inner: int
    """Number of channels."""
    d_state: int
    """Numbers of a channel's state."""
    dt_rank: int
    """Width of the vector that steps are computed from."""
    conv: ShortConvolution
    """Convolution of x, d_inner channels."""
    bias: bool = False
    """Whether the input and output maps have biases."""
    dt_norm: Norm | None = None
    """Norm of the vector that steps are computed from."""
    b_norm: Norm | None = None
    """Norm of b."""
    c_norm: Norm | None = None
    """Norm of c."""
    into: Map | None = None
    """Replaces the plain input map."""
    select: Map | None = None
    """Replaces the plain map to steps, b and c."""
    dt: Map | None = None
    """Replaces the plain map to steps."""
    out: Map | None = None
    """Replaces the plain output map."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_inner", "d_state", "dt_rank")
        require_flags(self, "bias")
        require(self, "conv", self.conv.channels == self.d_inner, f"a convolution of d_inner = {self.d_inner} channels")
        widths = {"dt_norm": self.dt_rank, "b_norm": self.d_state, "c_norm": self.d_state}
        for name, width in widths.items():
            norm = getattr(self, name)
            require(self, name, norm is None or norm.d == width, f"a norm over {width} numbers")
        self.require_maps()

    @property
    def selected(self) -> tuple[int, int, int]:
        """Widths of what the map of x gives: the steps' vector, b and c."""
        return self.dt_rank, self.d_state, self.d_state

    def plain_maps(self) -> dict[str, Linear]:
        """into (d_model to x and z), select (d_inner to the steps' vector, b and c), dt to d_inner, out to d_model."""
        into = Linear(d_in=self.d_model, d_out=2 * self.d_inner, bias=self.bias, split="out", belongs="ssm")
        select = Linear(d_in=self.d_inner, d_out=sum(self.selected), split="in", belongs="ssm")
        dt = Linear(d_in=self.dt_rank, d_out=self.d_inner, bias=True, split="out", belongs="ssm")
        out = replace(into, d_in=self.d_inner, d_out=self.d_model, split="in", to_stream=True)
        return {"into": into, "select": select, "dt": dt, "out": out}

    def holds(self) -> dict[str, Weight]:
        """a_log (d_inner, d_state) and d (d_inner)."""
        return {
            "a_log": Weight(shape=(self.d_inner, self.d_state), role="gain", init="zeros", split="out"),
            "d": Weight(shape=(self.d_inner,), role="gain", split="out"),
        }

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds d_inner / tensor channels and their states."""
        channels = divided(self, "d_inner", tensor)
        return self.resized(d_inner=channels, conv=replace(self.conv, channels=channels))

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Each map once."""
        return self.map_products(run, *self.maps)

    def remembers(self) -> tuple[Remembered, ...]:
        """The states: d_inner * d_state numbers of a sequence, in float32."""
        shape = (self.d_inner, self.d_state)
        return (Remembered(name="state", shape=shape, per="sequence", dtype="float32"),)

"""Feed-forward parts: the two-matrix MLP and the gated three-matrix one (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.part import Pass, Product, divided, require_choice, require_flags, require_sizes

# quick_gelu is x * sigmoid(1.702 x), which CLIP was trained with
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "quick_gelu"]
ACTIVATIONS: tuple[Activation, ...] = ("relu", "gelu", "gelu_tanh", "silu", "quick_gelu")


@dataclass(frozen=True, kw_only=True)
class _FeedForward(Mapped):
    """What both kinds share: a width inside, and what stands in the place of a map."""

    kind = "ffn"
    d_model: int
    """Width of the residual stream."""
    d_ff: int
    """Width inside."""
    activation: Activation
    """The function between the maps."""
    bias: bool = False
    """Whether the maps have biases."""
    up: Map | None = None
    """What stands in place of the plain map up."""
    down: Map | None = None
    """What stands in place of the plain map down."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_ff")
        require_choice(self, "activation", ACTIVATIONS)
        require_flags(self, "bias")
        self.require_maps()

    def _inward(self) -> Linear:
        return Linear(d_in=self.d_model, d_out=self.d_ff, bias=self.bias, split="out", belongs="ffn")

    def _outward(self) -> Linear:
        return Linear(d_in=self.d_ff, d_out=self.d_model, bias=self.bias, split="in", to_stream=True, belongs="ffn")

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds d_ff / tensor hidden numbers; the bias of down is whole."""
        return self.resized(d_ff=divided(self, "d_ff", tensor))

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Each map once."""
        return self.map_products(run, *self.maps)


@dataclass(frozen=True, kw_only=True)
class MLP(_FeedForward):
    """down(activation(up(x))), two maps."""

    def plain_maps(self) -> dict[str, Linear]:
        """up (d_model to d_ff) and down (d_ff to d_model)."""
        return {"up": self._inward(), "down": self._outward()}


@dataclass(frozen=True, kw_only=True)
class GatedMLP(_FeedForward):
    """down(activation(gate(x)) * up(x)), three maps; with silu it is SwiGLU."""

    gate: Map | None = None
    """What stands in place of the plain map to the gate."""

    def plain_maps(self) -> dict[str, Linear]:
        """gate and up (d_model to d_ff), down (d_ff to d_model)."""
        return {"gate": self._inward(), "up": self._inward(), "down": self._outward()}

"""Feed-forwards: the plain MLP of two maps and the gated one of three (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.part import (
    Part,
    Pass,
    Product,
    Weight,
    divided,
    require,
    require_choice,
    require_flags,
    require_number,
    require_sizes,
)

# quick_gelu is x * sigmoid(1.702 x), used by CLIP; relu2 is relu(x)^2 (So et al. 2021, arXiv 2109.08668)
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "quick_gelu", "relu2"]
ACTIVATIONS: tuple[Activation, ...] = ("relu", "gelu", "gelu_tanh", "silu", "quick_gelu", "relu2")


@dataclass(frozen=True, kw_only=True)
class XIELU(Part):
    """a_p x^2 + beta x for x > 0, else a_n (e^min(x, eps) - 1 - x) + beta x, with two learned numbers.

    a_p = softplus(alpha_p) and a_n = beta + softplus(alpha_n), so that the slopes meet at zero. Huang and Schlag 2024
    (arXiv 2411.13010), section 3; beta and eps are stored, but not trained.
    """

    kind = "ffn"

    def holds(self) -> dict[str, Weight]:
        """alpha_p and alpha_n, one number each."""
        return dict.fromkeys(("alpha_p", "alpha_n"), Weight(shape=(1,), role="bias"))

    def buffers(self) -> dict[str, Weight]:
        """beta and eps."""
        return {"beta": Weight(shape=(), role="bias", fill=0.5), "eps": Weight(shape=(), role="bias", fill=-1e-6)}


@dataclass(frozen=True, kw_only=True)
class _FeedForward(Mapped):
    """The common fields of both kinds."""

    kind = "ffn"
    d_model: int
    """Width of the residual stream."""
    d_ff: int
    """Hidden width."""
    activation: Activation | XIELU
    """Activation between the maps."""
    bias: bool = False
    """Whether the maps have biases."""
    up: Map | None = None
    """Replaces the plain up map, if given."""
    down: Map | None = None
    """Replaces the plain down map, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_ff")
        if not isinstance(self.activation, XIELU) or not isinstance(self, MLP):
            require_choice(self, "activation", ACTIVATIONS)
        require_flags(self, "bias")
        self.require_maps()

    def _inward(self) -> Linear:
        return Linear(d_in=self.d_model, d_out=self.d_ff, bias=self.bias, split="out", belongs="ffn")

    def _outward(self) -> Linear:
        return Linear(d_in=self.d_ff, d_out=self.d_model, bias=self.bias, split="in", to_stream=True, belongs="ffn")

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds d_ff / tensor of the hidden width; the bias of down is replicated."""
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
class ClampedGate(Part):
    """(u + 1) * g * sigmoid(alpha g), where g is the gate clamped above at `limit` and u is up clamped to +-limit.

    As in gpt-oss (arXiv 2508.10925). Without `shift` u is not increased by 1: SwiGLU with clamps, if alpha is 1. If it
    is `activated`, the clamp above is that of g * sigmoid(alpha g), and the gate itself is not clamped.
    """

    alpha: float
    """Factor on the gate in the sigmoid."""
    limit: float
    """Clamp of gate and up."""
    shift: bool = True
    """Whether 1 is added to u."""
    activated: bool = False
    """Whether the gate is clamped after its activation rather than before."""

    def __post_init__(self) -> None:
        require_number(self, "alpha")
        require_number(self, "limit")
        require_flags(self, "shift", "activated")


@dataclass(frozen=True, kw_only=True)
class GatedMLP(_FeedForward):
    """down(activation(c gate(x)) * up(x)), three maps; with silu it is SwiGLU. A clamp replaces activation and product.

    See ClampedGate. With a `sparsity` of s, relu(g - (mean(g) + z std(g))) stands in the place of the gate g, z being
    where the normal distribution function is s: of numbers distributed so, a share s is cut (Gemma 3n's published
    code).
    """

    activation: Activation
    """Activation of the gate."""
    clamp: ClampedGate | None = None
    """Clamps gate and up, if given."""
    gate_scale: float = 1.0
    """Factor on the gate before the activation, c."""
    sparsity: float | None = None
    """Share of the gate's numbers that are cut, were they distributed normally; None for none."""
    gate: Map | None = None
    """Replaces the plain gate map, if given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "clamp", self.clamp is None or isinstance(self.clamp, ClampedGate), "a ClampedGate or none")
        silu = self.clamp is None or self.activation == "silu"
        require(self, "activation", silu, "silu, which a clamped gate generalises by alpha")
        require_number(self, "gate_scale")
        require(self, "gate_scale", self.clamp is None or self.gate_scale == 1.0, "1 with a clamp")
        if self.sparsity is not None:
            require_number(self, "sparsity")
            plain = self.clamp is None and self.gate_scale == 1.0
            require(self, "sparsity", self.sparsity < 1 and plain, "below 1, and none with a clamp or a scaled gate")

    def plain_maps(self) -> dict[str, Linear]:
        """gate and up (d_model to d_ff), down (d_ff to d_model)."""
        return {"gate": self._inward(), "up": self._inward(), "down": self._outward()}

"""Feed-forward parts: the two-matrix MLP and the gated three-matrix one (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from asbuilt.spec.part import (
    Part,
    Pass,
    Product,
    Saved,
    Weight,
    divided,
    require_choice,
    require_flags,
    require_sizes,
)

# quick_gelu is x * sigmoid(1.702 x), which CLIP was trained with
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "quick_gelu"]
ACTIVATIONS: tuple[Activation, ...] = ("relu", "gelu", "gelu_tanh", "silu", "quick_gelu")


def linear(out: int, inside: int, bias: bool, name: str, *, stream: bool = False) -> dict[str, Weight]:
    """Returns the weights of one linear map: `name.weight` (out, in) and, if asked, `name.bias` (out)."""
    role = "stream_matrix" if stream else "matrix"
    matrix = {f"{name}.weight": Weight(shape=(out, inside), role=role)}
    return matrix | {f"{name}.bias": Weight(shape=(out,), role="bias")} if bias else matrix


@dataclass(frozen=True, kw_only=True)
class MLP(Part):
    """down(activation(up(x))), two matrices."""

    kind = "ffn"
    d_model: int
    d_ff: int
    activation: Activation
    bias: bool = False

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_ff")
        require_choice(self, "activation", ACTIVATIONS)
        require_flags(self, "bias")

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds d_ff / tensor hidden numbers; the bias of down is whole."""
        return replace(self, d_ff=divided(self, "d_ff", tensor))

    def holds(self) -> dict[str, Weight]:
        """up (d_ff, d_model), down (d_model, d_ff), and their biases."""
        up = linear(self.d_ff, self.d_model, self.bias, "up")
        return up | linear(self.d_model, self.d_ff, self.bias, "down", stream=True)

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Two products."""
        return (
            Product(name="up", a=run.rows, b=self.d_model, c=self.d_ff, weight="up.weight"),
            Product(name="down", a=run.rows, b=self.d_ff, c=self.d_model, weight="down.weight"),
        )

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, the activation's input (relu keeps its output instead) and down's input."""
        wide = run.rows * self.d_ff
        before = () if self.activation == "relu" else (Saved(name="up", size=wide),)
        return (Saved(name="input", size=run.rows * self.d_model), *before, Saved(name="hidden", size=wide))

    def recomputes(self) -> tuple[str, ...]:
        """Down's input, from the activation's; not where relu kept only its output."""
        return () if self.activation == "relu" else ("hidden",)

    def peak_bytes(self, run: Pass) -> int:
        """The activation's input and output, quick_gelu's multiplied input too; or its output and the result."""
        between = self.d_ff if self.activation == "quick_gelu" else 0
        return run.rows * run.width * (self.d_ff + max(self.d_ff + between, self.d_model))


@dataclass(frozen=True, kw_only=True)
class GatedMLP(Part):
    """down(activation(gate(x)) * up(x)), three matrices; with silu it is SwiGLU."""

    kind = "ffn"
    d_model: int
    d_ff: int
    activation: Activation
    bias: bool = False

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_ff")
        require_choice(self, "activation", ACTIVATIONS)
        require_flags(self, "bias")

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds d_ff / tensor hidden numbers; the bias of down is whole."""
        return replace(self, d_ff=divided(self, "d_ff", tensor))

    def holds(self) -> dict[str, Weight]:
        """gate and up (d_ff, d_model), down (d_model, d_ff), and their biases."""
        gate = linear(self.d_ff, self.d_model, self.bias, "gate")
        up = linear(self.d_ff, self.d_model, self.bias, "up")
        return gate | up | linear(self.d_model, self.d_ff, self.bias, "down", stream=True)

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Three products."""
        return (
            Product(name="gate", a=run.rows, b=self.d_model, c=self.d_ff, weight="gate.weight"),
            Product(name="up", a=run.rows, b=self.d_model, c=self.d_ff, weight="up.weight"),
            Product(name="down", a=run.rows, b=self.d_ff, c=self.d_model, weight="down.weight"),
        )

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, the activation's input (relu keeps its output instead), both factors and down's input."""
        wide = run.rows * self.d_ff
        before = () if self.activation == "relu" else (Saved(name="gate", size=wide),)
        return (
            Saved(name="input", size=run.rows * self.d_model),
            *before,
            Saved(name="activated", size=wide),
            Saved(name="up", size=wide),
            Saved(name="hidden", size=wide),
        )

    def recomputes(self) -> tuple[str, ...]:
        """Down's input, and the activated gate unless it is all that relu keeps."""
        return ("hidden",) if self.activation == "relu" else ("activated", "hidden")

    def peak_bytes(self, run: Pass) -> int:
        """gate and up, their product and the result."""
        return run.rows * run.width * (3 * self.d_ff + self.d_model)

"""Per-layer embeddings: besides the stream, each block reads a narrow vector of its own for every token.

Gemma 3n and Gemma 4 (their published code): the table is looked up, not multiplied, so it may lie in slow memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.feedforward import ACTIVATIONS, Activation
from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import (
    Pass,
    Product,
    Weight,
    divided_vocabulary,
    require,
    require_choice,
    require_format,
    require_number,
    require_sizes,
)


@dataclass(frozen=True, kw_only=True)
class PerLayerEmbedding(Mapped):
    """sum_scale * (norm(project_scale * project(x)) + scale * row): for a token one vector of width `d` per block.

    x is the stream before the first block, and the row that of the token in a table of n_layers * d numbers; a token
    beyond the table has row 0. The norm is over each block's d numbers.
    """

    kind = "embedding"
    n_vocab: int
    """Rows of the table."""
    n_layers: int
    """Blocks of the stack."""
    d: int
    """Width of a block's vector."""
    d_model: int
    """Width of the residual stream."""
    norm: Norm
    """Norm of each block's part of the projected stream."""
    scale: float = 1.0
    """Factor on the looked-up rows."""
    project_scale: float = 1.0
    """Factor on the projected stream."""
    sum_scale: float = 1.0
    """Factor on the sum of both."""
    project: Map | None = None
    """Replaces the plain map from the stream, if given."""
    format: str | None = None
    """Block format of the table; None for plain numbers."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_vocab", "n_layers", "d", "d_model")
        for name in ("scale", "project_scale", "sum_scale"):
            require_number(self, name)
        require(self, "norm", self.norm.d == self.d, f"a norm over d = {self.d}")
        require_format(self, "format", self.width)
        self.require_maps()

    @property
    def width(self) -> int:
        """Width of a row of the table."""
        return self.n_layers * self.d

    def plain_maps(self) -> dict[str, Linear]:
        """From d_model to n_layers * d."""
        return {"project": Linear(d_in=self.d_model, d_out=self.width, belongs="embedding")}

    def holds(self) -> dict[str, Weight]:
        """The table (n_vocab, n_layers * d)."""
        shape, packed = (self.n_vocab, self.width), self.format is not None
        return {"weight": Weight(shape=shape, role="table", split="out", format=self.format, frozen=packed)}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_vocab / tensor of the rows, padded if that is not whole; the map is replicated."""
        return replace(self, n_vocab=divided_vocabulary(self.n_vocab, tensor))

    def child_run(self, name: str, run: Pass) -> Pass:
        """The norm has one row per token and block."""
        return replace(run, tokens=run.tokens * self.n_layers) if name == "norm" else run

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The map."""
        return self.map_products(run, "project")


@dataclass(frozen=True, kw_only=True)
class PerLayerInput(Mapped):
    """down(activation(gate(x)) * e), where e is the token's vector for this block, of the stack's PerLayerEmbedding."""

    kind = "ffn"
    d_model: int
    """Width of the residual stream."""
    d: int
    """Width of a block's vector."""
    activation: Activation
    """Activation of the gate."""
    gate: Map | None = None
    """Replaces the plain gate, if given."""
    down: Map | None = None
    """Replaces the plain down map, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d")
        require_choice(self, "activation", ACTIVATIONS)
        self.require_maps()

    def plain_maps(self) -> dict[str, Linear]:
        """gate (d_model to d) and down (d to d_model), which are replicated: every device has the whole vectors."""
        gate = Linear(d_in=self.d_model, d_out=self.d, belongs="ffn")
        return {"gate": gate, "down": Linear(d_in=self.d, d_out=self.d_model, to_stream=True, belongs="ffn")}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Both maps."""
        return self.map_products(run, *self.maps)

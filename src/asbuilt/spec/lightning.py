"""Lightning attention: linear attention without a normaliser, whose heads forget at fixed rates.

MiniMax 2025 (arXiv 2501.08313), section 2.2; Qin et al. 2024 (arXiv 2401.04658).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.attention import output_map
from asbuilt.spec.feedforward import ACTIVATIONS, Activation
from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mamba2 import chunk_products
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import (
    Part,
    Pass,
    Product,
    Remembered,
    divided,
    require,
    require_choice,
    require_flags,
    require_number,
    require_sizes,
)


@dataclass(frozen=True, kw_only=True)
class LightningAttention(Mixer):
    """y_t = S_t^T q_t, S_t = e^-slope S_(t-1) + k_t v_t^T for each head; o(sigmoid(gate x) * norm(y)).

    q, k and v pass an activation. Head h of n_heads has the slope decay * 2^(-8 h / n_heads), h from 1 on, as ALiBi's
    heads have; nothing of it is learned. The norm is over all heads together. S is (d_head, d_head) per head, in
    float32 or wider.
    """

    d_model: int
    """Width of the residual stream."""
    n_heads: int
    """Heads, each with its own state and slope."""
    d_head: int
    """Width of a head."""
    decay: float
    """Factor on the slopes: the larger, the sooner the heads forget."""
    norm: Norm
    """Norm of what all heads read, before the gate."""
    activation: Activation = "silu"
    """Activation of q, k and v."""
    bias: bool = False
    """Whether q, k, v and the gate have biases."""
    output_bias: bool = False
    """Whether o has a bias."""
    q: Map | None = None
    """Replaces the plain map q."""
    k: Map | None = None
    """Replaces the plain map k."""
    v: Map | None = None
    """Replaces the plain map v."""
    gate: Map | None = None
    """Replaces the plain map to the output's gate."""
    o: Map | None = None
    """Replaces the plain map o."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_heads", "d_head")
        require_number(self, "decay")
        require_choice(self, "activation", ACTIVATIONS)
        require_flags(self, "bias", "output_bias")
        require(self, "norm", self.norm.d == self.d_query, f"a norm over n_heads * d_head = {self.d_query}")
        self.require_maps()

    @property
    def d_query(self) -> int:
        """Width of all heads together."""
        return self.n_heads * self.d_head

    @property
    def billed(self) -> LightningAttention:
        """The same with a decay of 1: layers that forget sooner or later cost the same."""
        return replace(self, decay=1.0)

    def plain_maps(self) -> dict[str, Linear]:
        """q, k, v and gate (d_model to n_heads*d_head), o (n_heads*d_head to d_model)."""
        into = Linear(d_in=self.d_model, d_out=self.d_query, bias=self.bias, split="out", belongs="attention")
        maps = dict.fromkeys(("q", "k", "v", "gate"), into)
        return maps | {"o": output_map(self.d_query, self.d_model, self.output_bias)}

    def children(self) -> Iterator[tuple[str, Part]]:
        """In order of computation: the output's map after the norm."""
        return iter(sorted(super().children(), key=lambda child: child[0] == "o"))

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_heads / tensor heads and their states; o's bias is replicated."""
        heads = divided(self, "n_heads", tensor)
        return self.resized(n_heads=heads, norm=replace(self.norm, d=heads * self.d_head))

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Maps; scores and weighted sums within chunks; reading the state, and updating it per chunk."""
        within = chunk_products(run, self.n_heads, self.n_heads, self.d_head, self.d_head, recomputed=True)
        return (*self.map_products(run, "q", "k", "v", "gate"), *within, *self.map_products(run, "o"))

    def remembers(self) -> tuple[Remembered, ...]:
        """The state: n_heads * d_head * d_head numbers for a sequence, in float32."""
        shape = (self.n_heads, self.d_head, self.d_head)
        return (Remembered(name="state", shape=shape, per="sequence", dtype="float32"),)

"""Attention pooling: one vector of all tokens, by attention from a learned vector.

Lee et al. 2018 (arXiv 1810.00825), section 3.2; as the head of image encoders, Zhai et al. 2021 (arXiv 2106.04560).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from asbuilt.spec.feedforward import MLP
from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import Gives, Pass, Product, Weight, divided, require, require_flags, require_sizes


@dataclass(frozen=True, kw_only=True)
class AttentionPooling(Mapped):
    """y + ffn(norm(y)) with y = o(softmax(q k^T / sqrt(d_head)) v), q of a learned probe, k and v of every token."""

    kind = "projector"
    gives: ClassVar[Gives] = "vector"
    per_token: ClassVar[bool] = True  # it reads every token
    n_scores: ClassVar[int] = 0
    d_model: int
    """Width of the residual stream, and of the vector."""
    n_heads: int
    """Heads."""
    d_head: int
    """Width of a head."""
    bias: bool = False
    """Whether the maps have biases."""
    norm: Norm
    """Norm of the feed-forward's input."""
    ffn: MLP
    """The feed-forward."""
    q: Map | None = None
    """Replaces the plain map from the probe to queries, if given."""
    k: Map | None = None
    """Replaces the plain map to keys, if given."""
    v: Map | None = None
    """Replaces the plain map to values, if given."""
    o: Map | None = None
    """Replaces the plain map of the heads' results, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_heads", "d_head")
        require_flags(self, "bias")
        require(self, "norm", self.norm.d == self.d_model, f"a norm over d_model = {self.d_model}")
        require(self, "ffn", self.ffn.d_model == self.d_model, f"one of d_model = {self.d_model}")
        self.require_maps()

    @property
    def d_out(self) -> int:
        """Width of the vector."""
        return self.d_model

    @property
    def d_query(self) -> int:
        """Width of all heads together."""
        return self.n_heads * self.d_head

    def plain_maps(self) -> dict[str, Linear]:
        """q, k, v (d_model to n_heads*d_head) and o (n_heads*d_head to d_model)."""
        q = Linear(d_in=self.d_model, d_out=self.d_query, bias=self.bias, split="out", belongs="projector")
        return {"q": q, "k": q, "v": q, "o": replace(q, d_in=self.d_query, d_out=self.d_model, split="in")}

    def holds(self) -> dict[str, Weight]:
        """The probe (d_model)."""
        return {"probe": Weight(shape=(self.d_model,), role="bias", init="normal")}

    def child_run(self, name: str, run: Pass) -> Pass:
        """Keys and values are of every token, all else of one."""
        return run if name in ("k", "v") else replace(run, tokens=1)

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_heads / tensor heads; the probe and o's bias are replicated."""
        return self.resized(n_heads=divided(self, "n_heads", tensor))

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The maps, and attention of one query per head."""
        heads = run.batch * self.n_heads
        return (
            *self.map_products(run, "q", "k", "v"),
            Product(name="scores", a=1, b=self.d_head, c=run.tokens, n=heads),
            Product(name="mix", a=1, b=run.tokens, c=self.d_head, n=heads),
            *self.map_products(run, "o"),
        )

"""Cross-attention: queries from the stream, keys and values from an encoder's output.

Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.attention import output_map
from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.part import (
    Pass,
    Product,
    Remembered,
    divided,
    require,
    require_flags,
    require_number,
    require_sizes,
)


@dataclass(frozen=True, kw_only=True)
class CrossAttention(Mixer):
    """softmax(scale * q k^T) v with q from the stream, k and v from the source (S tokens of width `d_source`).

    Keys and values are computed once, in the first pass over a sequence, and then cached; `scale` None means
    d_head^-0.5.
    """

    d_model: int
    """Width of the residual stream."""
    d_source: int
    """Width of the source, the encoder's output."""
    n_heads: int
    """Heads."""
    d_head: int
    """Width of a head."""
    bias: bool = False
    """Whether q, k and v have biases."""
    output_bias: bool = False
    """Whether o has a bias."""
    key_bias: bool = True
    """Whether k has a bias where q and v have one."""
    n_source: int | None = None
    """Tokens of the source, if all sources have as many."""
    scale: float | None = None
    """Factor on the scores; None means d_head^-0.5."""
    q: Map | None = None
    """Replaces the plain map to queries, if given."""
    k: Map | None = None
    """Replaces the plain map from the source to keys, if given."""
    v: Map | None = None
    """Replaces the plain map from the source to values, if given."""
    o: Map | None = None
    """Replaces the plain map back to the stream, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_source", "n_heads", "d_head")
        require_flags(self, "bias", "output_bias", "key_bias")
        require(self, "key_bias", self.bias or self.key_bias, "true unless q and v have biases")
        if self.n_source is not None:
            require_sizes(self, "n_source")
        if self.scale is not None:
            require_number(self, "scale")
        self.require_maps()

    @property
    def source_width(self) -> int:
        """d_source."""
        return self.d_source

    @property
    def sees_images(self) -> bool:
        """True, since it attends to no token of the text."""
        return True

    @property
    def d_query(self) -> int:
        """Width of all heads together."""
        return self.n_heads * self.d_head

    def plain_maps(self) -> dict[str, Linear]:
        """q (d_model to n_heads*d_head), k and v (d_source to n_heads*d_head), o (n_heads*d_head to d_model)."""
        q = Linear(d_in=self.d_model, d_out=self.d_query, bias=self.bias, split="out", belongs="attention")
        v = replace(q, d_in=self.d_source)
        k = replace(v, bias=self.bias and self.key_bias)
        return {"q": q, "k": k, "v": v, "o": output_map(self.d_query, self.d_model, self.output_bias)}

    def child_run(self, name: str, run: Pass) -> Pass | None:
        """Keys and values are computed from the source, only in the first pass."""
        if name not in ("k", "v"):
            return run
        return None if run.past or not run.source_tokens else replace(run, tokens=run.source_tokens)

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_heads / tensor heads; o's bias is replicated."""
        return self.resized(n_heads=divided(self, "n_heads", tensor))

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """q and o for every token, k and v for the source's tokens in the first pass, and attention per head."""
        heads, source = run.batch * self.n_heads, run.source_tokens
        read = ("k", "v") if self.map_rows("k", run) else ()
        return (
            *self.map_products(run, "q", *read),
            Product(name="scores", a=run.tokens, b=self.d_head, c=source, n=heads),
            Product(name="mix", a=run.tokens, b=source, c=self.d_head, n=heads),
            *self.map_products(run, "o"),
        )

    def remembers(self) -> tuple[Remembered, ...]:
        """Keys and values: n_heads * d_head numbers each per token of the source."""
        shape, n = (self.n_heads, self.d_head), self.n_source
        return tuple(Remembered(name=name, shape=shape, of="source", n_source=n) for name in ("k", "v"))

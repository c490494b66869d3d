"""Cross-attention: queries from the stream, keys and values from an encoder's output.

Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.attention import output_map
from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import (
    Pass,
    Product,
    Remembered,
    divided,
    is_size,
    require,
    require_flags,
    require_number,
    require_sizes,
)


@dataclass(frozen=True, kw_only=True)
class CrossAttention(Mixer):
    """softmax(scale * q k^T) v with q from the stream, k and v from the source (S tokens of width `d_source`).

    Keys and values are computed once, in the first pass over a sequence, and then cached; `scale` None means
    d_head^-0.5. Query heads may share key heads, and queries and keys may be normed per head, as in `Attention`.
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
    n_kv_heads: int | None = None
    """Key heads, and value heads; None for as many as heads."""
    q_norm: Norm | None = None
    """Norm of each query head."""
    k_norm: Norm | None = None
    """Norm of each key head."""
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
        if self.n_kv_heads is not None:
            whole = is_size(self.n_kv_heads) and self.n_heads % self.n_kv_heads == 0
            require(self, "n_kv_heads", whole, f"a divisor of n_heads = {self.n_heads}")
        for name in ("q_norm", "k_norm"):
            norm = getattr(self, name)
            require(self, name, norm is None or norm.d == self.d_head, f"a norm over d_head = {self.d_head}")
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

    @property
    def kv_heads(self) -> int:
        """Number of key heads, and of value heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def queries_per_key(self) -> int:
        """n_heads / n_kv_heads."""
        return self.n_heads // self.kv_heads

    @property
    def d_kv(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.d_head

    def plain_maps(self) -> dict[str, Linear]:
        """q (d_model to n_heads*d_head), k and v (d_source to n_kv_heads*d_head), o (n_heads*d_head to d_model)."""
        q = Linear(d_in=self.d_model, d_out=self.d_query, bias=self.bias, split="out", belongs="attention")
        v = replace(q, d_in=self.d_source, d_out=self.d_kv)
        k = replace(v, bias=self.bias and self.key_bias)
        return {"q": q, "k": k, "v": v, "o": output_map(self.d_query, self.d_model, self.output_bias)}

    def child_run(self, name: str, run: Pass) -> Pass | None:
        """Keys and values are computed from the source, only in the first pass; a norm has one row per head."""
        if name == "q_norm":
            return replace(run, tokens=run.tokens * self.n_heads)
        if name not in ("k", "v", "k_norm"):
            return run
        heads = self.kv_heads if name == "k_norm" else 1
        return None if run.past or not run.source_tokens else replace(run, tokens=run.source_tokens * heads)

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_heads / tensor heads and their key heads, at least one; o's bias is replicated."""
        heads = divided(self, "n_heads", tensor)
        if self.n_kv_heads is None:
            return self.resized(n_heads=heads)
        if self.n_kv_heads % tensor and tensor % self.n_kv_heads:
            divided(self, "n_kv_heads", tensor)
        return self.resized(n_heads=heads, n_kv_heads=max(1, self.n_kv_heads // tensor))

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
        """Keys and values: n_kv_heads * d_head numbers each per token of the source."""
        shape, n = (self.kv_heads, self.d_head), self.n_source
        return tuple(Remembered(name=name, shape=shape, of="source", n_source=n) for name in ("k", "v"))

"""Cross-attention: queries from the stream, keys and values from what an encoder made of its source.

Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

from asbuilt.spec.feedforward import linear
from asbuilt.spec.part import (
    Part,
    Pass,
    Product,
    Remembered,
    Saved,
    Weight,
    divided,
    require_flags,
    require_number,
    require_sizes,
)


@dataclass(frozen=True, kw_only=True)
class CrossAttention(Part):
    """softmax(scale * q k^T) v with q from the stream, k and v from the source (S tokens of width `d_source`).

    Keys and values are computed once, in the first pass over a sequence, and then remembered; `scale` None means
    d_head^-0.5.
    """

    kind = "attention"
    d_model: int
    d_source: int
    n_heads: int
    d_head: int
    bias: bool = False
    output_bias: bool = False
    scale: float | None = None

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_source", "n_heads", "d_head")
        require_flags(self, "bias", "output_bias")
        if self.scale is not None:
            require_number(self, "scale")

    @property
    def d_query(self) -> int:
        """Width of all heads together."""
        return self.n_heads * self.d_head

    def holds(self) -> dict[str, Weight]:
        """q (n_heads*d_head, d_model), k and v (n_heads*d_head, d_source), o (d_model, n_heads*d_head), biases."""
        q = linear(self.d_query, self.d_model, self.bias, "q")
        k = linear(self.d_query, self.d_source, self.bias, "k")
        v = linear(self.d_query, self.d_source, self.bias, "v")
        return q | k | v | linear(self.d_model, self.d_query, self.output_bias, "o", stream=True)

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_heads / tensor heads; o's bias is whole."""
        return replace(self, n_heads=divided(self, "n_heads", tensor))

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """q and o for every token, k and v for the source's tokens in the first pass, scores and mixing per head."""
        rows, heads, source = run.rows, run.batch * self.n_heads, run.source_tokens
        read = 0 if run.past else run.batch * source
        kv = (
            Product(name="k", a=read, b=self.d_source, c=self.d_query, weight="k.weight"),
            Product(name="v", a=read, b=self.d_source, c=self.d_query, weight="v.weight"),
        )
        return (
            Product(name="q", a=rows, b=self.d_model, c=self.d_query, weight="q.weight"),
            *(kv if read else ()),
            Product(name="scores", a=run.tokens, b=self.d_head, c=source, n=heads),
            Product(name="mix", a=run.tokens, b=source, c=self.d_head, n=heads),
            Product(name="o", a=rows, b=self.d_query, c=self.d_model, weight="o.weight"),
        )

    def share(self, name: str, run: Pass) -> Fraction:
        """Keys and values are read in the first pass alone."""
        return Fraction(0 if run.past and name.split(".")[0] in ("k", "v") else 1)

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, the source, q, k and v, the mixed values, and what the kernel keeps of the scores."""
        query, source = run.rows * self.d_query, run.batch * run.source_tokens
        common = (
            Saved(name="input", size=run.rows * self.d_model),
            Saved(name="source", size=source * self.d_source, shared=True),
            Saved(name="q", size=query),
            Saved(name="k", size=source * self.d_query),
            Saved(name="v", size=source * self.d_query),
            Saved(name="mixed", size=query),
        )
        if run.kernel != "reference":
            return (*common, Saved(name="logsumexp", size=run.rows * self.n_heads, width="wide"))
        size = run.rows * self.n_heads * run.source_tokens
        cast = (Saved(name="probabilities cast", size=size),) if run.width < 4 else ()
        return (*common, Saved(name="probabilities", size=size, width="wide"), *cast)

    def peak_bytes(self, run: Pass) -> int:
        """q, k and v beside the scores, or beside the mixed values and the result."""
        query, source = run.rows * self.d_query * run.width, run.batch * run.source_tokens
        projected = query + 2 * source * self.d_query * run.width
        size = run.rows * self.n_heads * run.source_tokens
        scores = size * (2 * run.width + (8 if run.width < 4 else 0)) if run.kernel == "reference" else 0
        return projected + max(scores, query) + run.rows * self.d_model * run.width

    def remembers(self) -> tuple[Remembered, ...]:
        """Keys and values: n_heads * d_head numbers each per token of the source."""
        shape = (self.n_heads, self.d_head)
        return (Remembered(name="k", shape=shape, of="source"), Remembered(name="v", shape=shape, of="source"))

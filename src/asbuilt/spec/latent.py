"""Multi-head latent attention: keys and values of all heads are expanded from one narrow vector per token, the latent.

DeepSeek-V2 (arXiv 2405.04434), section 2.1. RoPE cannot be applied through the latent, so each query has a separate
part for it, and all heads share one key of that width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.attention import output_map
from asbuilt.spec.indexer import Chooser, Indexer, causal_pairs
from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.norms import Norm
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
from asbuilt.spec.positions import Rotary, YaRN


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Mixer):
    """Causal attention with q = q_up(q_norm(q_down x)), c = kv_norm(kv_down x), k = [k_up c, k_rope x], v = v_up c.

    Each head's query and key have `d_nope` numbers without position and `d_rope` with RoPE; the RoPE key is shared by
    all heads. Without `q_rank`, queries are computed directly from x. `bias` is for the down maps, `output_bias` for o.
    The softmax scale is (d_nope + d_rope)^-0.5, under YaRN with `mscale` m times (0.1 m ln(factor) + 1)^2.

    A single new token after cached ones is computed *absorbed*: q^T (k_up c) = (k_up^T q)^T c, so the query is mapped
    to the latent space, the attention output is mapped back by v_up, and no cached token is expanded. All other passes
    are *expanded*. The cache holds c and the RoPE key: kv_rank + d_rope numbers per token, for all heads together.

    With an `indexer` a token attends only to the keys that it chooses, the same for all heads: an absorbed pass gathers
    them, in an expanded one the others are masked.
    """

    d_model: int
    """Width of the residual stream."""
    n_heads: int
    """Heads."""
    q_rank: int | None = None
    """Width of the queries' latent; None if queries are computed directly from the stream."""
    kv_rank: int
    """Width of the cached latent from which keys and values are expanded."""
    d_nope: int
    """Width of each head's query and key without position."""
    d_rope: int
    """Width of each head's query and key with RoPE."""
    d_value: int
    """Width of each head's value."""
    q_norm: Norm | None = None
    """Norm of the queries' latent."""
    kv_norm: Norm | None = None
    """Norm of the latent of keys and values."""
    positions: Rotary | None = None
    """RoPE of the d_rope numbers."""
    mscale: float | None = None
    """m, by which YaRN changes the softmax scale."""
    bias: bool = False
    """Whether the maps to the latents have biases."""
    output_bias: bool = False
    """Whether o has a bias."""
    indexer: Chooser | None = None
    """Chooses the keys that a token attends to, or reuses the last choice; None for all of them."""
    q: Map | None = None
    """Replaces the plain map to queries without a latent, if given."""
    q_down: Map | None = None
    """Replaces the plain map to the queries' latent, if given."""
    q_up: Map | None = None
    """Replaces the plain map from that latent to queries, if given."""
    kv_down: Map | None = None
    """Replaces the plain map to the latent, if given."""
    k_rope: Map | None = None
    """Replaces the plain map to the shared RoPE key, if given."""
    k_up: Map | None = None
    """Replaces the plain map from the latent to keys, if given."""
    v_up: Map | None = None
    """Replaces the plain map from the latent to values, if given."""
    o: Map | None = None
    """Replaces the plain map back to the stream, if given."""

    def __post_init__(self) -> None:
        ranks = ("kv_rank",) if self.q_rank is None else ("q_rank", "kv_rank")
        require_sizes(self, "d_model", "n_heads", *ranks, "d_nope", "d_rope", "d_value")
        require_flags(self, "bias", "output_bias")
        ranked = self.q_norm is None or (self.q_rank is not None and self.q_norm.d == self.q_rank)
        require(self, "q_norm", ranked, "none without q_rank" if self.q_rank is None else f"a norm over {self.q_rank}")
        fits = self.kv_norm is None or self.kv_norm.d == self.kv_rank
        require(self, "kv_norm", fits, f"a norm over kv_rank = {self.kv_rank}")
        whole = self.positions is None or self.positions.d_rotary == self.d_rope
        require(self, "positions", whole, f"RoPE of d_rope = {self.d_rope} numbers")
        if self.mscale is not None:
            require_number(self, "mscale")
            yarn = self.positions is not None and isinstance(self.positions.scaling, YaRN)
            require(self, "mscale", yarn, "none without YaRN")
        if isinstance(self.indexer, Indexer):
            same = (self.indexer.d_model, self.indexer.q_rank) == (self.d_model, self.q_rank)
            require(self, "indexer", same, f"one of d_model = {self.d_model} and q_rank = {self.q_rank}")
        self.require_maps()
        for name in ("k_up", "v_up"):
            plain = not self.maps[name].plain.clipped
            require(self, name, plain, "a map without clamps, since a step multiplies by its matrix alone")

    @property
    def choice(self) -> tuple[bool, int] | None:
        """That of its indexer."""
        return None if self.indexer is None else (isinstance(self.indexer, Indexer), self.indexer.top_k)

    @property
    def most_keys(self) -> int | None:
        """Keys that a token attends to at most; None for all."""
        return None if self.indexer is None else self.indexer.top_k

    def chooses(self, run: Pass) -> bool:
        """Returns whether a token of the pass attends only to chosen keys."""
        return self.most_keys is not None and run.past + run.tokens > self.most_keys

    @property
    def d_head(self) -> int:
        """Width of one head's query or key."""
        return self.d_nope + self.d_rope

    @property
    def d_latent(self) -> int:
        """Numbers cached per token."""
        return self.kv_rank + self.d_rope

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        scaling = None if self.positions is None else self.positions.scaling
        stretched = isinstance(scaling, YaRN) and self.mscale is not None and scaling.factor > 1
        mscale = 0.1 * self.mscale * math.log(scaling.factor) + 1.0 if stretched else 1.0  # type: ignore[union-attr]
        return self.d_head**-0.5 * mscale * mscale

    def plain_maps(self) -> dict[str, Linear]:
        """q, or q_down and q_up; kv_down (d_model to kv_rank), k_rope (d_model to d_rope), k_up, v_up and o."""
        down = Linear(d_in=self.d_model, d_out=self.kv_rank, bias=self.bias, belongs="attention")
        query = Linear(d_in=self.d_model, d_out=self.n_heads * self.d_head, split="out", belongs="attention")
        up = Linear(d_in=self.kv_rank, d_out=self.n_heads * self.d_nope, split="out", belongs="attention")
        if self.q_rank is None:
            q = {"q": query}
        else:
            q = {"q_down": replace(down, d_out=self.q_rank), "q_up": replace(query, d_in=self.q_rank)}
        return {
            **q,
            "kv_down": down,
            "k_rope": replace(down, d_out=self.d_rope),
            "k_up": up,
            "v_up": replace(up, d_out=self.n_heads * self.d_value),
            "o": output_map(self.n_heads * self.d_value, self.d_model, self.output_bias),
        }

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_heads / tensor heads; the down maps, and with them the cached latents, are replicated."""
        return self.resized(n_heads=divided(self, "n_heads", tensor))

    def absorbs(self, run: Pass) -> bool:
        """Returns whether the pass is absorbed: a single token after others."""
        return run.tokens == 1 and run.past > 0

    def pairs(self, run: Pass) -> int:
        """Returns the unmasked (query, key) pairs of one sequence and head."""
        return causal_pairs(run, self.most_keys)

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Queries and latents of the new tokens, then keys and values of all tokens; or the absorbed products."""
        first = ("q",) if self.q_rank is None else ("q_down", "q_up")
        return (
            *self.map_products(run, *first, "kv_down", "k_rope"),
            *(self._absorbed(run) if self.absorbs(run) else self._expanded(run)),
            *self.map_products(run, "o"),
        )

    def child_run(self, name: str, run: Pass) -> Pass:
        """Every cached token is expanded again; keys are chosen without gradients."""
        if name == "indexer":
            return replace(run, gradients=False)
        expanded = name in ("k_up", "v_up") and not self.absorbs(run)
        return replace(run, tokens=run.past + run.tokens, past=0) if expanded else run

    def _expanded(self, run: Pass) -> tuple[Product, ...]:
        keys, heads = run.past + run.tokens, run.batch * self.n_heads
        score, value = (2 * heads * width * self.pairs(run) for width in (self.d_head, self.d_value))
        return (
            *self.map_products(run, "k_up", "v_up"),
            Product(name="scores", a=run.tokens, b=self.d_head, c=keys, n=heads, needed=score),
            Product(name="mix", a=run.tokens, b=keys, c=self.d_value, n=heads, needed=value),
        )

    def _absorbed(self, run: Pass) -> tuple[Product, ...]:
        """k_up is transposed, and scores and weighted sums have the width of the latent.

        An adapter of either map is merged into its matrix first.
        """
        keys, heads = self.gathered(run), run.batch * self.n_heads
        return (
            *(p for name in ("k_up", "v_up") for p in self.maps[name].merging(name)),
            Product(name="k_up", a=run.batch, b=self.d_nope, c=self.kv_rank, n=self.n_heads, weight="k_up.weight"),
            Product(name="scores", a=1, b=self.d_latent, c=keys, n=heads),
            Product(name="mix", a=1, b=keys, c=self.kv_rank, n=heads),
            Product(name="v_up", a=run.batch, b=self.kv_rank, c=self.d_value, n=self.n_heads, weight="v_up.weight"),
        )

    def gathered(self, run: Pass) -> int:
        """Returns how many keys the query of an absorbed pass is multiplied with."""
        return min(run.past + 1, self.most_keys or run.past + 1)

    def remembers(self) -> tuple[Remembered, ...]:
        """The latent and the RoPE key in one tensor: kv_rank + d_rope numbers per token; chosen ones are read."""
        expanded = self.n_heads * (self.d_head + self.d_value)
        shape = (1, self.d_latent)
        return (Remembered(name="latent", shape=shape, stands_for=expanded, reads=self.most_keys),)

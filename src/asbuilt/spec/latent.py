"""Multi-head latent attention: keys and values of all heads are read out of one narrow vector per token, the latent.

DeepSeek-V2 (arXiv 2405.04434), section 2.1. Positions cannot pass through the latent, so each query has a part of its
own for them, and all heads share one key of that width.
"""

from __future__ import annotations

import math
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
    Saved,
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

    Each head's query and key are `d_nope` numbers without position and `d_rope` turned ones; the turned key is the same
    for all heads. Without `q_rank` queries come straight from x. `bias` is of the maps down, `output_bias` of o. The
    softmax scale is (d_nope + d_rope)^-0.5, under YaRN with `mscale` m times (0.1 m ln(factor) + 1)^2.

    One new token after cached ones is attended *absorbed*: q^T (k_up c) = (k_up^T q)^T c, so the query is taken into
    the latent's space, the mixed latents are brought back by v_up, and no cached token is expanded. All else is
    *expanded*. The cache holds c and the turned key: kv_rank + d_rope numbers per token, for all heads together.
    """

    d_model: int
    """Width of the residual stream."""
    n_heads: int
    """Heads."""
    q_rank: int | None = None
    """Width of the queries' latent; None where queries come straight from the stream."""
    kv_rank: int
    """Width of the latent that keys and values are read out of, and that is cached."""
    d_nope: int
    """Numbers of each head's query and key that have no position."""
    d_rope: int
    """Numbers of each head's query and key to which RoPE is applied."""
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
    q: Map | None = None
    """What stands in place of the plain map to queries, where they have no latent."""
    q_down: Map | None = None
    """What stands in place of the plain map to the queries' latent."""
    q_up: Map | None = None
    """What stands in place of the plain map from that latent to queries."""
    kv_down: Map | None = None
    """What stands in place of the plain map to the latent."""
    k_rope: Map | None = None
    """What stands in place of the plain map to the shared key with positions."""
    k_up: Map | None = None
    """What stands in place of the plain map from the latent to keys."""
    v_up: Map | None = None
    """What stands in place of the plain map from the latent to values."""
    o: Map | None = None
    """What stands in place of the plain map back to the stream."""

    def __post_init__(self) -> None:
        ranks = ("kv_rank",) if self.q_rank is None else ("q_rank", "kv_rank")
        require_sizes(self, "d_model", "n_heads", *ranks, "d_nope", "d_rope", "d_value")
        require_flags(self, "bias", "output_bias")
        ranked = self.q_norm is None or (self.q_rank is not None and self.q_norm.d == self.q_rank)
        require(self, "q_norm", ranked, "none without q_rank" if self.q_rank is None else f"a norm over {self.q_rank}")
        fits = self.kv_norm is None or self.kv_norm.d == self.kv_rank
        require(self, "kv_norm", fits, f"a norm over kv_rank = {self.kv_rank}")
        whole = self.positions is None or self.positions.d_rotary == self.d_rope
        require(self, "positions", whole, f"d_rope = {self.d_rope} turned numbers")
        if self.mscale is not None:
            require_number(self, "mscale")
            yarn = self.positions is not None and isinstance(self.positions.scaling, YaRN)
            require(self, "mscale", yarn, "none without YaRN")
        self.require_maps()

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
        """What scores are multiplied by before the softmax."""
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
        """Each device holds n_heads / tensor heads; the maps down, and so the cached latents, are whole on each."""
        return self.resized(n_heads=divided(self, "n_heads", tensor))

    def absorbs(self, run: Pass) -> bool:
        """Whether the run is computed in the latent's space: a single token after others."""
        return run.tokens == 1 and run.past > 0

    def pairs(self, run: Pass) -> int:
        """(query, key) pairs of one sequence and head that the mask leaves."""
        return run.tokens * run.past + run.tokens * (run.tokens + 1) // 2

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Queries and latents of the new tokens, then keys and values of all tokens; or the absorbed products."""
        first = ("q",) if self.q_rank is None else ("q_down", "q_up")
        return (
            *self.map_products(run, *first, "kv_down", "k_rope"),
            *(self._absorbed(run) if self.absorbs(run) else self._expanded(run)),
            *self.map_products(run, "o"),
        )

    def child_run(self, name: str, run: Pass) -> Pass:
        """Every cached token is expanded anew."""
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
        """k_up is multiplied from its other side, and scores and mixing are as wide as the latent.

        What is around one of the two maps is first added up into its matrix.
        """
        keys, heads = run.past + run.tokens, run.batch * self.n_heads
        return (
            *(p for name in ("k_up", "v_up") for p in self.maps[name].merging(name)),
            Product(name="k_up", a=run.batch, b=self.d_nope, c=self.kv_rank, n=self.n_heads, weight="k_up.weight"),
            Product(name="scores", a=1, b=self.d_latent, c=keys, n=heads),
            Product(name="mix", a=1, b=keys, c=self.kv_rank, n=heads),
            Product(name="v_up", a=run.batch, b=self.kv_rank, c=self.d_value, n=self.n_heads, weight="v_up.weight"),
        )

    @property
    def _width(self) -> int:
        """The fused kernel knows one width, so queries and keys or values are filled up with zeros."""
        return max(self.d_head, self.d_value)

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """What the maps read, and expanded q, k, v and mixed values as wide as the kernel takes them.

        Of the scores the fused kernel keeps one log-sum-exp per query; the reference the mask, and the probabilities.
        """
        heads = run.rows * self.n_heads
        q_latent = () if self.q_rank is None else (Saved(name="q latent", size=run.rows * self.q_rank),)
        common = (
            Saved(name="input", size=run.rows * self.d_model),
            *q_latent,
            Saved(name="latent", size=run.rows * self.kv_rank),
            Saved(name="mixed", size=heads * self.d_value),
            *self.maps_keep(run),
        )
        if run.kernel == "reference":
            return common + self._saves_reference(run)
        widths: dict[str, int] = dict.fromkeys(("q", "k", "v"), self._width)
        if self._width > self.d_value:
            widths["mixed and zeros"] = self._width
        kept = (Saved(name=name, size=heads * width) for name, width in widths.items())
        return (*common, *kept, Saved(name="logsumexp", size=heads, width="wide"))

    def _saves_reference(self, run: Pass) -> tuple[Saved, ...]:
        pairs, heads = run.tokens * run.tokens, run.rows * self.n_heads
        size = run.batch * self.n_heads * pairs
        widths = {"q": self.d_head, "k": self.d_head, "v": self.d_value}
        mask = (Saved(name="mask", size=pairs, width="bool"),) if run.tokens > 1 else ()
        cast = (Saved(name="probabilities cast", size=size),) if run.width < 4 else ()
        kept = (Saved(name=name, size=heads * width) for name, width in widths.items())
        return (*kept, *mask, Saved(name="probabilities", size=size, width="wide"), *cast)

    def recomputes(self) -> tuple[str, ...]:
        """Whatever is as large as the scores, where a kernel keeps it; k and v would take products with weights."""
        return ("mask", "probabilities", "probabilities cast")

    def peak_bytes(self, run: Pass) -> int:
        """The busiest of making queries, expanding keys and values, attending, and the result, latents being kept.

        What maps down give is one tensor, which stays as long as latents or keys are views of it.
        """
        down, query = self.d_latent + (self.q_rank or 0), self.n_heads * self.d_head
        turned = 0 if self.positions is None else self.n_heads * self.d_rope
        normed = 0 if self.q_norm is None else self.q_norm.d
        making = run.rows * (down + query + max(normed, 3 * turned, query + turned if turned else 0)) * run.width
        norming = run.rows * down * run.width + (0 if self.q_norm is None else self.q_norm.peak_bytes(run))
        result = run.rows * (self.n_heads * self.d_value + self.d_model) * run.width
        of_down = down if self.kv_norm is None or self.positions is None else 0
        latents = of_down + (0 if self.kv_norm is None else self.kv_rank) + (self.d_rope if turned else 0)
        kept = run.rows * (query + latents) * run.width
        return max(making, norming, kept + max(self._attending(run), result)) + self.peak_beside(run)

    def _attending(self, run: Pass) -> int:
        """Bytes of keys and values, what is filled up with zeros, what comes out, and scores where they are kept."""
        heads, seen = run.batch * self.n_heads, run.batch * (run.past + run.tokens) * self.n_heads
        pairs, out = heads * run.tokens * (run.past + run.tokens), run.rows * self.n_heads
        softmax = pairs * (run.width + max(run.width, 2 * 4 if run.width < 4 else 0))
        if self.absorbs(run):
            return out * (2 * self.d_latent + self.kv_rank) * run.width + softmax
        made = seen * (self.d_head + self.d_value)
        if run.kernel == "reference":
            expanding = seen * (self.d_head + self.d_nope)
            masking = 2 * pairs * run.width + 2 * (pairs // heads)
            mixing = (2 * pairs + out * self.d_value) * run.width
            return max(expanding * run.width, made * run.width + max(softmax, masking, mixing))
        zeros = 0
        if self.d_value < self._width:
            zeros = seen * self._width
        elif self.d_head < self._width:
            zeros = (seen + out) * self._width
        return (made + zeros + out * self._width) * run.width + out * max(4, run.width)

    def remembers(self) -> tuple[Remembered, ...]:
        """The latent and the turned key in one: kv_rank + d_rope numbers per token."""
        expanded = self.n_heads * (self.d_head + self.d_value)
        return (Remembered(name="latent", shape=(1, self.d_latent), stands_for=expanded),)

"""Attention with separate query, key and value heads: MHA, GQA and MQA are values of n_kv_heads.

Vaswani et al. 2017 (arXiv 1706.03762); shared key/value heads: Shazeer 2019 (arXiv 1911.02150), Ainslie et al. 2023
(arXiv 2305.13245).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from asbuilt.spec.feedforward import linear
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import (
    Part,
    Pass,
    Product,
    Remembered,
    Saved,
    Weight,
    require,
    require_flags,
    require_number,
    require_sizes,
)
from asbuilt.spec.positions import Rotary


@dataclass(frozen=True, kw_only=True)
class Attention(Part):
    """softmax(scale * q k^T) v over the tokens before, projected back to the stream.

    `window` w lets a token see itself and the w-1 before it; `softcap` c turns each score s into c*tanh(s/c);
    `scale` None means d_head^-0.5. `q_norm` and `k_norm` normalise each head before the rotation.
    """

    kind = "attention"
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    positions: Rotary | None = None
    bias: bool = False
    output_bias: bool = False
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_heads", "n_kv_heads", "d_head")
        divides = self.n_heads % self.n_kv_heads == 0
        require(self, "n_kv_heads", divides, f"a divisor of n_heads = {self.n_heads}")
        require_flags(self, "bias", "output_bias")
        if self.window is not None:
            require_sizes(self, "window")
        for name in ("softcap", "scale"):
            if getattr(self, name) is not None:
                require_number(self, name)
        if self.positions is not None:
            fits = self.positions.d_rotary <= self.d_head
            require(self, "positions", fits, f"at most d_head = {self.d_head} rotated numbers")
        for name in ("q_norm", "k_norm"):
            norm = getattr(self, name)
            require(self, name, norm is None or norm.d == self.d_head, f"a norm over d_head = {self.d_head}")

    @property
    def d_query(self) -> int:
        """Width of all query heads together; d_model only where the two happen to be equal."""
        return self.n_heads * self.d_head

    @property
    def d_kv(self) -> int:
        """Width of all key (or value) heads together."""
        return self.n_kv_heads * self.d_head

    def holds(self) -> dict[str, Weight]:
        """q (n_heads*d_head, d_model), k and v (n_kv_heads*d_head, d_model), o (d_model, n_heads*d_head), biases."""
        q = linear(self.d_query, self.d_model, self.bias, "q")
        k = linear(self.d_kv, self.d_model, self.bias, "k")
        v = linear(self.d_kv, self.d_model, self.bias, "v")
        return q | k | v | linear(self.d_model, self.d_query, self.output_bias, "o", stream=True)

    def keys(self, run: Pass) -> int:
        """S: how many keys each query is multiplied with, masked ones included.

        A window layer keeps `window` tokens; several new tokens are laid after them, a single one takes its slot.
        """
        if self.window is None:
            return run.past + run.tokens
        if run.tokens == 1:
            return min(run.past + 1, self.window)
        return min(run.past, self.window) + run.tokens

    def pairs(self, run: Pass) -> int:
        """(query, key) pairs of one sequence and head that the mask leaves."""
        seen = run.past + run.tokens
        all_pairs = run.tokens * run.past + run.tokens * (run.tokens + 1) // 2
        if self.window is None or seen <= self.window:
            return all_pairs
        # tokens whose window is not yet full see everything before them, the others `window` each
        growing = max(0, self.window - run.past)
        return growing * run.past + growing * (growing + 1) // 2 + (run.tokens - growing) * self.window

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Four products with weights, and scores and mixing per head: (T,D)x(D,S) and (T,S)x(S,D)."""
        rows, heads, keys = run.rows, run.batch * self.n_heads, self.keys(run)
        needed = 2 * heads * self.d_head * self.pairs(run)
        return (
            Product(name="q", a=rows, b=self.d_model, c=self.d_query, weight="q.weight"),
            Product(name="k", a=rows, b=self.d_model, c=self.d_kv, weight="k.weight"),
            Product(name="v", a=rows, b=self.d_model, c=self.d_kv, weight="v.weight"),
            Product(name="scores", a=run.tokens, b=self.d_head, c=keys, n=heads, needed=needed),
            Product(name="mix", a=run.tokens, b=keys, c=self.d_head, n=heads, needed=needed),
            Product(name="o", a=rows, b=self.d_query, c=self.d_model, weight="o.weight"),
        )

    def child_run(self, name: str, run: Pass) -> Pass:
        """A norm per head sees one row per head and token."""
        heads = {"q_norm": self.n_heads, "k_norm": self.n_kv_heads}
        return replace(run, tokens=run.tokens * heads[name]) if name in heads else run

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, turned q and k, v, and the mixed values; the kernels differ in what they keep of the scores.

        Fused: one log-sum-exp per query, and the library's own copy of a mask that is not simply causal. Reference:
        the mask, the probabilities (once more in the run's dtype where that is narrow), and capped scores.
        """
        query, kv = run.rows * self.d_query, run.rows * self.d_kv
        common = (
            Saved(name="input", size=run.rows * self.d_model),
            Saved(name="q", size=query),
            Saved(name="k", size=kv),
            Saved(name="v", size=kv),
            Saved(name="mixed", size=query),
        )
        return common + (self._saves_scores(run) if self._uses_reference(run) else self._saves_fused(run))

    def _saves_fused(self, run: Pass) -> tuple[Saved, ...]:
        normaliser = Saved(name="logsumexp", size=run.rows * self.n_heads, width="wide")
        plain_causal = self.window is None or run.tokens <= self.window
        return (normaliser,) if plain_causal else (normaliser, Saved(name="mask", size=run.tokens * self.keys(run)))

    def _saves_scores(self, run: Pass) -> tuple[Saved, ...]:
        size = run.batch * self.n_heads * run.tokens * self.keys(run)
        hidden = 0 if run.tokens == 1 else run.tokens * self.keys(run)  # a lone token sees every key
        mask = Saved(name="mask", size=hidden, width="bool")
        capped = () if self.softcap is None else (Saved(name="capped", size=size),)
        cast = (Saved(name="probabilities cast", size=size),) if run.width < 4 else ()
        return (mask, *capped, Saved(name="probabilities", size=size, width="wide"), *cast)

    def works(self, run: Pass) -> int:
        """q, k, v and turned q and k; beside them what turning takes, or the mixed values, scores and the result."""
        query, kv = run.rows * self.d_query * run.width, run.rows * self.d_kv * run.width
        projected, result = query + 2 * kv, run.rows * self.d_model * run.width
        turned = 0 if self.positions is None else query + kv
        apart = self.q_norm is not None or self.k_norm is not None  # else q and k are turned at once
        turning = max(3 * query, query + 3 * kv) if apart else 3 * (query + kv)
        turning = 0 if self.positions is None else turning
        attending = query + run.rows * self.n_heads * max(4, run.width)
        if self._uses_reference(run):
            attending = self._reference_works(run) + query
        return projected + max(turning, turned + attending, turned + query + result)

    def _reference_works(self, run: Pass) -> int:
        """The mask, and scores twice: masked and as probabilities; a narrow dtype is widened for the softmax."""
        pairs = run.tokens * self.keys(run)
        size = run.batch * self.n_heads * pairs
        widened = 0 if run.width >= 4 else 2 * 4 * size - run.rows * self.d_query * run.width
        return pairs + size * run.width + max(size * run.width, widened)

    def _uses_reference(self, run: Pass) -> bool:
        return run.kernel == "reference" or self.softcap is not None

    def remembers(self) -> tuple[Remembered, ...]:
        """Keys and values: n_kv_heads * d_head numbers each per token."""
        shape = (self.n_kv_heads, self.d_head)
        return (
            Remembered(name="k", shape=shape, window=self.window),
            Remembered(name="v", shape=shape, window=self.window),
        )

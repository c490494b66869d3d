"""Indexers: a narrow attention that chooses the keys that another one attends to.

DeepSeek-V3.2 (arXiv 2512.02556), section 2.1: DeepSeek Sparse Attention. Choices shared by layers: GLM-5. Choices of
blocks of keys: MiniMax-M3, and before it Yuan et al. 2025 (arXiv 2502.11089).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import Part, Pass, Product, Remembered, require, require_sizes
from asbuilt.spec.positions import Rotary

# Queries whose scores of each head are computed at once: those of all queries would take as many times a mask's room.
QUERIES = 32


@dataclass(frozen=True, kw_only=True)
class Indexer(Mapped):
    """Chooses for each token t the `top_k` keys s of largest sum over heads of w_h(x_t) relu(q_h(c_t) . k(x_s)).

    c is the latent of the queries, of width `q_rank`; q and k have RoPE applied, k after its norm. Scores are computed
    in float32 or wider, scaled by (n_heads * d_head)^-0.5, and of equal ones the earlier key is chosen. A pass of which
    no token has more than `top_k` keys only caches them. Choosing has no gradient, so that the indexer learns nothing
    from the model's own loss.
    """

    kind = "attention"
    d_model: int
    """Width of the residual stream."""
    q_rank: int
    """Width of the latent from which queries are computed."""
    n_heads: int
    """Heads of the indexer's queries; all share one key."""
    d_head: int
    """Width of its queries and keys."""
    top_k: int
    """Keys that each token attends to."""
    k_norm: Norm | None = None
    """Norm of the keys."""
    positions: Rotary | None = None
    """RoPE on the first numbers of queries and keys."""
    q: Map | None = None
    """Replaces the plain map to queries, if given."""
    k: Map | None = None
    """Replaces the plain map to keys, if given."""
    weigh: Map | None = None
    """Replaces the plain map to the weights of heads, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "q_rank", "n_heads", "d_head", "top_k")
        fits = self.k_norm is None or self.k_norm.d == self.d_head
        require(self, "k_norm", fits, f"a norm over d_head = {self.d_head}")
        within = self.positions is None or self.positions.d_rotary <= self.d_head
        require(self, "positions", within, f"RoPE of at most d_head = {self.d_head} numbers")
        self.require_maps()

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return (self.n_heads * self.d_head) ** -0.5

    def plain_maps(self) -> dict[str, Linear]:
        """q (q_rank to n_heads*d_head), k (d_model to d_head), weigh (d_model to n_heads)."""
        k = Linear(d_in=self.d_model, d_out=self.d_head, belongs="attention")
        q = replace(k, d_in=self.q_rank, d_out=self.n_heads * self.d_head)
        return {"q": q, "k": k, "weigh": replace(k, d_out=self.n_heads)}

    def chooses(self, run: Pass) -> bool:
        """Returns whether a token of the pass has more than `top_k` keys."""
        return run.past + run.tokens > self.top_k

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The maps; each head's scores of all keys; and their weighted sum. For short texts the keys, for the cache."""
        keys = self.map_products(run, "k")
        if not self.chooses(run):
            return without_gradient(replace(product, caching=True) for product in keys)
        seen = run.past + run.tokens
        pairs = run.batch * causal_pairs(run)
        scores = Product(
            name="scores",
            a=run.tokens * self.n_heads,
            b=self.d_head,
            c=seen,
            n=run.batch,
            needed=2 * self.n_heads * self.d_head * pairs,
        )
        weighed = Product(name="mix", a=1, b=self.n_heads, c=seen, n=run.rows, needed=2 * self.n_heads * pairs)
        return without_gradient(
            (*self.map_products(run, "q"), *keys, *self.map_products(run, "weigh"), scores, weighed)
        )

    def remembers(self) -> tuple[Remembered, ...]:
        """The keys: d_head numbers per token."""
        return (Remembered(name="k", shape=(1, self.d_head)),)


@dataclass(frozen=True, kw_only=True)
class BlockIndexer(Mapped):
    """Chooses, for each token t and head, the `top_k` blocks of `block` keys s of largest max q_h(x_t) . k(x_s).

    Each head chooses for one key head of the attention. Blocks are runs of positions from 0 on; those that hold the
    token itself and the `local` - 1 before it are always among the chosen. q and k have RoPE applied after their norms.
    Scores are computed in float32 or wider. A pass of which no token has more than `top_k` blocks only caches the keys.
    Choosing has no gradient, so that the indexer learns nothing from the model's own loss.
    """

    kind = "attention"
    d_model: int
    """Width of the residual stream."""
    n_heads: int
    """Heads of the indexer's queries, as many as key heads of the attention; all share one key."""
    d_head: int
    """Width of its queries and keys."""
    block: int
    """Keys of a block."""
    top_k: int
    """Blocks that each token attends to."""
    local: int = 1
    """Blocks up to the token's own that are always chosen."""
    q_norm: Norm | None = None
    """Norm of each head's queries."""
    k_norm: Norm | None = None
    """Norm of the keys."""
    positions: Rotary | None = None
    """RoPE on the first numbers of queries and keys."""
    q: Map | None = None
    """Replaces the plain map to queries, if given."""
    k: Map | None = None
    """Replaces the plain map to keys, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_heads", "d_head", "block", "top_k", "local")
        require(self, "local", self.local <= self.top_k, f"at most top_k = {self.top_k} blocks")
        for name in ("q_norm", "k_norm"):
            norm = getattr(self, name)
            require(self, name, norm is None or norm.d == self.d_head, f"a norm over d_head = {self.d_head}")
        within = self.positions is None or self.positions.d_rotary <= self.d_head
        require(self, "positions", within, f"RoPE of at most d_head = {self.d_head} numbers")
        self.require_maps()

    @property
    def most_keys(self) -> int:
        """Keys that a token attends to at most."""
        return self.top_k * self.block

    def plain_maps(self) -> dict[str, Linear]:
        """q (d_model to n_heads*d_head), k (d_model to d_head)."""
        k = Linear(d_in=self.d_model, d_out=self.d_head, belongs="attention")
        return {"q": replace(k, d_out=self.n_heads * self.d_head, split="out"), "k": k}

    def of_heads(self, n_heads: int) -> Self:
        """Returns the indexer of as many heads, on a device that has as many key heads; keys are replicated."""
        return self.resized(n_heads=n_heads)

    def chooses(self, run: Pass) -> bool:
        """Returns whether a token of the pass has more than `top_k` blocks."""
        return run.past + run.tokens > self.most_keys

    def pairs(self, run: Pass) -> int:
        """Returns the (query, key) pairs of one sequence and key head that are attended to."""
        return self._pairs(run.past + run.tokens) - self._pairs(run.past)

    def _pairs(self, tokens: int) -> int:
        """Returns those of the first tokens: all at first, then whole blocks and the past of the token's own."""
        whole = min(tokens, self.most_keys)
        blocks, rest = divmod(tokens - whole, self.block)
        own = blocks * self.block * (self.block + 1) // 2 + rest * (rest + 1) // 2
        return whole * (whole + 1) // 2 + (tokens - whole) * (self.most_keys - self.block) + own

    def child_run(self, name: str, run: Pass) -> Pass:
        """The norm of the queries has one row per head and token."""
        return replace(run, tokens=run.tokens * self.n_heads) if name == "q_norm" else run

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The maps, and each head's scores of all keys. For short texts the keys, for the cache."""
        keys = self.map_products(run, "k")
        if not self.chooses(run):
            return without_gradient(replace(product, caching=True) for product in keys)
        scores = Product(
            name="scores",
            a=run.tokens * self.n_heads,
            b=self.d_head,
            c=run.past + run.tokens,
            n=run.batch,
            needed=2 * self.n_heads * self.d_head * run.batch * causal_pairs(run),
        )
        return without_gradient((*self.map_products(run, "q"), *keys, scores))

    def remembers(self) -> tuple[Remembered, ...]:
        """The keys: d_head numbers per token."""
        return (Remembered(name="k", shape=(1, self.d_head)),)


@dataclass(frozen=True, kw_only=True)
class SharedChoice(Part):
    """Attends to the keys that the last indexer before it chose."""

    kind = "attention"
    top_k: int
    """Keys that each token attends to, as many as that indexer chooses."""

    def __post_init__(self) -> None:
        require_sizes(self, "top_k")


Chooser = Indexer | SharedChoice


def without_gradient(products: Iterator[Product] | tuple[Product, ...]) -> tuple[Product, ...]:
    """Returns the products, marked as computed without gradients."""
    return tuple(replace(product, one_gradient=False, no_gradient=True) for product in products)


def causal_pairs(run: Pass, most: int | None = None) -> int:
    """Returns the (query, key) pairs of one sequence, each token with itself and those before it, `most` at most."""
    if most is None or run.past + run.tokens <= most:
        return run.tokens * run.past + run.tokens * (run.tokens + 1) // 2
    growing = max(0, most - run.past)  # tokens that have fewer keys
    return growing * run.past + growing * (growing + 1) // 2 + (run.tokens - growing) * most

"""Attention to the last tokens, and to entries that each stand for a block of earlier ones.

DeepSeek-V4 (DeepSeek-AI 2026), sections 2.3.1 and 2.3.2: compressed sparse attention chooses entries, heavily
compressed attention uses all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.indexer import causal_pairs, without_gradient
from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import (
    Pass,
    Product,
    Remembered,
    Weight,
    divided,
    require,
    require_flags,
    require_sizes,
)
from asbuilt.spec.positions import Rotary


@dataclass(frozen=True, kw_only=True)
class Compressor(Mapped):
    """One entry for each full block of `ratio` tokens: norm(sum over its tokens of softmax(gate(x) + bias) kv(x)).

    The softmax is over tokens, for each number of the entry. With `overlap` an entry is of two blocks, its own and the
    one before, for which kv, gate and bias have numbers of their own (the first half). RoPE is applied to the last
    numbers of an entry, at the position of its block's first token. The cache holds the entries, and kv and gate of the
    tokens of the last one or two blocks.
    """

    kind = "attention"
    d_model: int
    """Width of the residual stream."""
    d_head: int
    """Width of an entry."""
    ratio: int
    """Tokens of a block."""
    overlap: bool = False
    """Whether an entry is of the block before its own too."""
    norm: Norm | None = None
    """Norm of the entries."""
    positions: Rotary | None = None
    """RoPE of their last numbers."""
    kv: Map | None = None
    """Replaces the plain map to values, if given."""
    gate: Map | None = None
    """Replaces the plain map to gates, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_head", "ratio")
        require_flags(self, "overlap")
        require_entry(self, self.norm, self.positions)
        self.require_maps()

    @property
    def width(self) -> int:
        """Numbers of one token's kv, or gate."""
        return self.d_head * (2 if self.overlap else 1)

    @property
    def open_tokens(self) -> int:
        """Tokens whose kv and gate are cached."""
        return self.ratio * (2 if self.overlap else 1)

    def plain_maps(self) -> dict[str, Linear]:
        """kv and gate, d_model to d_head, or twice that with overlap."""
        one = Linear(d_in=self.d_model, d_out=self.width, belongs="attention")
        return {"kv": one, "gate": one}

    def holds(self) -> dict[str, Weight]:
        """The bias of gates by place in a block (ratio, width)."""
        return {"bias": Weight(shape=(self.ratio, self.width), role="bias")}

    def entries(self, run: Pass) -> int:
        """Returns the entries of a sequence after the pass."""
        return (run.past + run.tokens) // self.ratio

    def child_run(self, name: str, run: Pass) -> Pass | None:
        """The norm has a row for each new entry; RoPE tables are those of blocks, not of tokens."""
        if name == "positions":
            return None
        made = (run.past + run.tokens) // self.ratio - run.past // self.ratio
        return replace(run, tokens=made, past=0) if name == "norm" else run

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Both maps; of a text without a full block nothing reads what they make, so that it has no gradient."""
        products = self.map_products(run, "kv", "gate")
        return products if run.gradients and self.entries(run) else without_gradient(products)

    def remembers(self) -> tuple[Remembered, ...]:
        """d_head numbers for each block, and kv and gate of the tokens of open ones."""
        return (
            Remembered(name="entries", shape=(1, self.d_head), every=self.ratio),
            Remembered(name="open", shape=(1, 2 * self.width), window=self.open_tokens),
        )


@dataclass(frozen=True, kw_only=True)
class EntryIndexer(Mapped):
    """Chooses for each token the `top_k` of largest sum over heads of w_h(x) relu(q_h(c) . k) among past entries.

    The keys k are entries of its own; c is the latent of the queries. As in `Indexer`, choosing has no gradient.
    """

    kind = "attention"
    q_rank: int
    """Width of the latent from which queries are computed."""
    n_heads: int
    """Heads of the indexer's queries; all share one key."""
    top_k: int
    """Entries that each token attends to."""
    compressor: Compressor
    """Makes its keys."""
    q: Map | None = None
    """Replaces the plain map to queries, if given."""
    weigh: Map | None = None
    """Replaces the plain map to the weights of heads, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "q_rank", "n_heads", "top_k")
        self.require_maps()

    @property
    def d_head(self) -> int:
        """Width of its queries and keys."""
        return self.compressor.d_head

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return (self.n_heads * self.d_head) ** -0.5

    def plain_maps(self) -> dict[str, Linear]:
        """q (q_rank to n_heads*d_head), weigh (d_model to n_heads)."""
        q = Linear(d_in=self.q_rank, d_out=self.n_heads * self.d_head, belongs="attention")
        return {"q": q, "weigh": replace(q, d_in=self.compressor.d_model, d_out=self.n_heads)}

    def chooses(self, run: Pass) -> bool:
        """Returns whether a token of the pass has more than `top_k` entries."""
        return self.compressor.entries(run) > self.top_k

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The maps, each head's scores of all entries, and their weighted sum; nothing for short texts."""
        if not self.chooses(run):
            return ()
        seen, pairs = self.compressor.entries(run), run.batch * entry_pairs(run, self.compressor.ratio)
        scores = Product(
            name="scores",
            a=run.tokens * self.n_heads,
            b=self.d_head,
            c=seen,
            n=run.batch,
            needed=2 * self.n_heads * self.d_head * pairs,
        )
        weighed = Product(name="mix", a=1, b=self.n_heads, c=seen, n=run.rows, needed=2 * self.n_heads * pairs)
        return without_gradient((*self.map_products(run, "q", "weigh"), scores, weighed))


@dataclass(frozen=True, kw_only=True)
class CompressedAttention(Mixer):
    """softmax(q k^T / sqrt(d_head)) k over the last `window` tokens and over entries of blocks, keys being values.

    q = head_norm(q_up(c)) with the latent c = q_norm(q_down x), one key k = kv_norm(kv x) for all heads, RoPE on the
    last numbers of both, and undone on the output, so that values depend on distances alone. Each head has a sink. The
    output's heads are mapped in `groups`, each to `o_rank` numbers, and all of these back to the stream.
    """

    d_model: int
    """Width of the residual stream."""
    n_heads: int
    """Query heads; all share one key."""
    d_head: int
    """Width of a head."""
    q_rank: int
    """Width of the queries' latent."""
    window: int
    """Tokens that a token attends to, itself included."""
    groups: int
    """Groups of heads that are mapped together."""
    o_rank: int
    """Numbers that each group is mapped to."""
    q_norm: Norm | None = None
    """Norm of the queries' latent."""
    head_norm: Norm | None = None
    """Norm of each head's query."""
    kv_norm: Norm | None = None
    """Norm of the keys."""
    positions: Rotary | None = None
    """RoPE of the last numbers of queries and keys."""
    compressor: Compressor | None = None
    """Makes the entries; None for attention to the window alone."""
    indexer: EntryIndexer | None = None
    """Chooses the entries that a token attends to; None for all."""
    q_down: Map | None = None
    """Replaces the plain map to the queries' latent, if given."""
    q_up: Map | None = None
    """Replaces the plain map from that latent to queries, if given."""
    kv: Map | None = None
    """Replaces the plain map to keys, if given."""
    o_up: Map | None = None
    """Replaces the plain map back to the stream, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_heads", "d_head", "q_rank", "window", "groups", "o_rank")
        require(self, "groups", self.n_heads % self.groups == 0, f"a divisor of n_heads = {self.n_heads}")
        require_entry(self, self.kv_norm, self.positions, "kv_norm")
        require_entry(self, self.head_norm, None, "head_norm")
        fits = self.q_norm is None or self.q_norm.d == self.q_rank
        require(self, "q_norm", fits, f"a norm over q_rank = {self.q_rank}")
        if self.compressor is not None:
            made = (self.compressor.d_model, self.compressor.d_head)
            allowed = f"entries of d_head = {self.d_head} of a stream of {self.d_model}"
            require(self, "compressor", made == (self.d_model, self.d_head), allowed)
        if self.indexer is not None:
            own, other = self.indexer.compressor, self.compressor
            same = other is not None and (own.ratio, own.d_model) == (other.ratio, other.d_model)
            require(self, "indexer", same, "one whose entries stand for the same blocks")
            require(self, "indexer", self.indexer.q_rank == self.q_rank, f"one of q_rank = {self.q_rank}")
        self.require_maps()

    @property
    def d_query(self) -> int:
        """Width of all heads together."""
        return self.n_heads * self.d_head

    @property
    def queries_per_key(self) -> int:
        """All heads share one key."""
        return self.n_heads

    def plain_maps(self) -> dict[str, Linear]:
        """q_down, q_up, kv (d_model to d_head), o_up (groups*o_rank to d_model)."""
        down = Linear(d_in=self.d_model, d_out=self.q_rank, belongs="attention")
        back = Linear(
            d_in=self.groups * self.o_rank, d_out=self.d_model, split="in", to_stream=True, belongs="attention"
        )
        return {
            "q_down": down,
            "q_up": replace(down, d_in=self.q_rank, d_out=self.d_query, split="out"),
            "kv": replace(down, d_out=self.d_head),
            "o_up": back,
        }

    def holds(self) -> dict[str, Weight]:
        """One sink per head, and each group's map (groups*o_rank, n_heads/groups*d_head)."""
        shape = (self.groups * self.o_rank, self.d_query // self.groups)
        return {
            "sinks": Weight(shape=(self.n_heads,), role="bias", split="out"),
            "o_down": Weight(shape=shape, role="matrix", split="out"),
        }

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_heads / tensor heads in groups / tensor groups; keys and entries are replicated."""
        return self.resized(n_heads=divided(self, "n_heads", tensor), groups=divided(self, "groups", tensor))

    def recent(self, run: Pass) -> int:
        """Returns how many single tokens' keys a query is multiplied with."""
        return min(run.past + 1, self.window) if run.tokens == 1 else min(run.past, self.window) + run.tokens

    def entries(self, run: Pass) -> int:
        """Returns how many entries a query is multiplied with: one new token gathers those that are chosen."""
        if self.compressor is None:
            return 0
        made = self.compressor.entries(run)
        return min(made, self.indexer.top_k) if self.indexer is not None and run.tokens == 1 else made

    def pairs(self, run: Pass) -> int:
        """Returns the unmasked (query, key) pairs of one sequence and head."""
        if self.compressor is None:
            return causal_pairs(run, self.window)
        most = None if self.indexer is None else self.indexer.top_k
        return causal_pairs(run, self.window) + entry_pairs(run, self.compressor.ratio, most)

    def child_run(self, name: str, run: Pass) -> Pass:
        """The norm of heads has one row per head and token; entries are chosen without gradients."""
        if name == "indexer":
            return replace(run, gradients=False)
        return replace(run, tokens=run.tokens * self.n_heads) if name == "head_norm" else run

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The maps, scores and weighted sums per head, and the map of each group."""
        heads, keys = run.batch * self.n_heads, self.recent(run) + self.entries(run)
        needed = 2 * heads * self.d_head * self.pairs(run)
        return (
            *self.map_products(run, "q_down", "q_up", "kv"),
            Product(name="scores", a=run.tokens, b=self.d_head, c=keys, n=heads, needed=needed),
            Product(name="mix", a=run.tokens, b=keys, c=self.d_head, n=heads, needed=needed),
            Product(
                name="o_down",
                a=run.rows,
                b=self.d_query // self.groups,
                c=self.o_rank,
                n=self.groups,
                weight="o_down",
            ),
            *self.map_products(run, "o_up"),
        )

    def remembers(self) -> tuple[Remembered, ...]:
        """The window's keys: d_head numbers per token; the compressors remember their entries."""
        return (Remembered(name="kv", shape=(1, self.d_head), window=self.window),)


def entry_pairs(run: Pass, ratio: int, most: int | None = None) -> int:
    """Returns the (query, entry) pairs of one sequence: token p has (p + 1) // ratio entries, `most` at most."""

    def first(tokens: int) -> int:
        """Of the first tokens."""
        full = tokens // ratio
        if most is not None and full > most:
            return first(most * ratio - 1) + (tokens - most * ratio + 1) * most
        return ratio * full * (full - 1) // 2 + full * (tokens - full * ratio + 1)

    return first(run.past + run.tokens) - first(run.past)


def require_entry(
    part: Compressor | CompressedAttention, norm: Norm | None, rotary: Rotary | None, name: str = "norm"
) -> None:
    """Raises InputError unless norm and RoPE fit vectors of d_head numbers."""
    require(part, name, norm is None or norm.d == part.d_head, f"a norm over d_head = {part.d_head}")
    fits = rotary is None or rotary.d_rotary <= part.d_head
    require(part, "positions", fits, f"RoPE of at most d_head = {part.d_head} numbers")

"""Attention with separate query, key and value heads: MHA, GQA and MQA differ in n_kv_heads.

Vaswani et al. 2017 (arXiv 1706.03762); shared key/value heads: Shazeer 2019 (arXiv 1911.02150), Ainslie et al. 2023
(arXiv 2305.13245); keys and values of an earlier layer: Brandon et al. 2024 (arXiv 2405.12981); sparse patterns: Child
et al. 2019 (arXiv 1904.10509); differences of two attentions: Ye et al. 2024 (arXiv 2410.05258).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

from asbuilt.spec.differential import Differential
from asbuilt.spec.indexer import BlockIndexer
from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.norms import HeadNorm, Norm, RMSNorm, SoftplusScale
from asbuilt.spec.part import (
    Part,
    Pass,
    Product,
    Remembered,
    Weight,
    divided,
    require,
    require_flags,
    require_names,
    require_number,
    require_sizes,
)
from asbuilt.spec.positions import Alibi, QueryTemperature, RelativeBuckets, Rotary
from asbuilt.spec.relative import Disentangled, RelativeProjection


@dataclass(frozen=True, kw_only=True)
class Attention(Mixer):
    """softmax(scale * q k^T) v, causal or over all tokens, projected back to the stream.

    With a `window` w a token attends to itself and the w-1 before it, with a `chunk` c to those in its own run of c
    positions. With a `stride` s it attends to those s, 2s, ... before it too, and without a window to these and itself
    alone; with a `summary` n of chunks also to the last n tokens of every earlier chunk. In both all keys are cached.
    `softcap` c replaces each score s by c*tanh(s/c), before any term of the distance is added but a
    RelativeProjection's; `scale` None means d_head^-0.5. `q_norm` and `k_norm` normalise
    each head, or all heads together if they are that wide, before RoPE unless `rotate_first`. `sinks` adds one learned
    score per head to the softmax, without a value. `temperature` scales queries by their position. Keys and values are
    not `cached` if all tokens always come at once. With `caches_input` the layer's input is cached in their place, and
    each pass makes keys and values of all tokens that it holds (Dai et al. 2019, arXiv 1901.02860).

    Values have the width `d_value`, are normalised by `v_norm` and multiplied by `value_scale`; with `values_are_keys`
    they are the keys' projection before its norm and RoPE. A layer with `kv_from` has no keys and values of its own: it
    reads those of the nearest earlier layer of the stack whose `kv_name` that is, and caches nothing. With `gating`
    each channel or head of the sums is multiplied by sigmoid(gate(x)) before o (Qiu et al. 2025, arXiv 2505.06708).
    With `differential` heads are in pairs, see Differential; a gate per head is then one for half a pair's sums.

    With an `indexer` the heads of a group attend only to the blocks of keys that it chooses for their key head: a
    single token after cached ones gathers them, in all other passes the others are masked.
    """

    d_model: int
    """Width of the residual stream."""
    n_heads: int
    """Query heads."""
    n_kv_heads: int
    """Key and value heads; fewer than n_heads is grouped-query attention, 1 is multi-query attention."""
    d_head: int
    """Width of a head; n_heads * d_head need not be d_model."""
    d_value: int | None = None
    """Width of a value, if not d_head."""
    d_input: int | None = None
    """Width of what q, k and v read, if not d_model."""
    causal: bool = True
    """Whether a token attends only to itself and those before it."""
    bias: bool = False
    """Whether q, k and v have biases."""
    output_bias: bool = False
    """Whether o has a bias."""
    key_bias: bool = True
    """Whether k has a bias where q and v have one."""
    q_norm: Norm | HeadNorm | SoftplusScale | None = None
    """Norm of the queries, per head or over all heads, depending on its width; or factors in its place."""
    k_norm: Norm | HeadNorm | None = None
    """Norm of the keys, per head or over all heads, depending on its width."""
    v_norm: Norm | None = None
    """Norm of each head's values."""
    value_scale: float = 1.0
    """Factor on the values."""
    values_are_keys: bool = False
    """Whether values are the keys' projection, before norm and RoPE; both need a norm."""
    kv_name: str | None = None
    """Name under which later layers read this layer's keys and values; None if none does."""
    kv_from: str | None = None
    """Name of the earlier layer whose keys and values are read; None for its own."""
    rotate_first: bool = False
    """Whether RoPE is applied before those norms."""
    positions: Rotary | Alibi | RelativeBuckets | RelativeProjection | Disentangled | None = None
    """How scores depend on positions: RoPE, ALiBi, buckets, a projection or embedding of distances, or not at all."""
    window: int | None = None
    """Sliding window: tokens that a token attends to, itself included; None for all."""
    chunk: int | None = None
    """Chunk size: a token attends only to tokens of its own chunk; None for no chunks."""
    stride: int | None = None
    """Distance whose multiples a token attends to, besides those of its window; None for no such pattern."""
    summary: int | None = None
    """Last tokens of each earlier chunk that a token attends to, besides those of its own; None for none."""
    softcap: float | None = None
    """c, if each score s is replaced by c * tanh(s / c)."""
    sinks: bool = False
    """Whether each head has an extra learned score in its softmax, without a value."""
    scale: float | None = None
    """Factor on the scores; None means d_head^-0.5."""
    temperature: QueryTemperature | None = None
    """Scaling of queries by their position."""
    cached: bool = True
    """Whether keys and values are cached between passes."""
    caches_input: bool = False
    """Whether the input is cached in their place, of which each pass makes keys and values again."""
    gating: Literal["channel", "head"] | None = None
    """What of the weighted sums has a gate of its own, a sigmoid of a map of the input; None for no gates."""
    differential: Differential | None = None
    """Makes of the sums of two heads one, their scaled difference; None for all as they are."""
    indexer: BlockIndexer | None = None
    """Chooses the blocks of keys that a token attends to; None for all of them."""
    q: Map | None = None
    """Replaces the plain map to queries, if given."""
    k: Map | None = None
    """Replaces the plain map to keys, if given."""
    v: Map | None = None
    """Replaces the plain map to values, if given."""
    gate: Map | None = None
    """Replaces the plain map to the gates, if given."""
    o: Map | None = None
    """Replaces the plain map back to the stream, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_heads", "n_kv_heads", "d_head")
        divides = self.n_heads % self.n_kv_heads == 0
        require(self, "n_kv_heads", divides, f"a divisor of n_heads = {self.n_heads}")
        require_flags(
            self,
            "causal",
            "bias",
            "output_bias",
            "key_bias",
            "rotate_first",
            "sinks",
            "cached",
            "caches_input",
            "values_are_keys",
        )
        require(self, "key_bias", self.bias or self.key_bias, "true unless q and v have biases")
        require_sizes(
            self, *(name for name in ("window", "chunk", "d_value", "d_input") if getattr(self, name) is not None)
        )
        require(self, "gating", self.gating in ("channel", "head", None), "channel, head or none")
        require(self, "chunk", self.chunk is None or self.window is None, "none beside a window")
        require(self, "chunk", self.chunk is None or self.causal, "none unless attention is causal")
        self._require_sparse()
        rotary = self.positions if isinstance(self.positions, Rotary) else None
        ordered = rotary is not None and any(order_matters(norm, rotary) for norm in (self.q_norm, self.k_norm))
        require(
            self, "rotate_first", ordered or not self.rotate_first, "false unless the order matters to a norm of q or k"
        )
        for name in ("softcap", "scale"):
            if getattr(self, name) is not None:
                require_number(self, name)
        self._require_positions()
        for name, whole in (("q_norm", self.d_query), ("k_norm", self.d_kv)):
            norm = getattr(self, name)
            if isinstance(norm, HeadNorm):
                fits = norm.d == self.d_head and norm.n_heads * norm.d == whole
                require(self, name, fits, f"gains for {whole // self.d_head} heads of d_head = {self.d_head}")
                continue
            fits = norm is None or norm.d in (self.d_head, whole)
            require(self, name, fits, f"a norm over d_head = {self.d_head}, or over all heads, {whole}")
        self._require_values()
        self._require_pairs()
        self._require_source()
        self._require_indexer()
        if self.caches_input:
            self._require_repeatable()
        if isinstance(self.positions, Disentangled):
            self._require_plain()
        self.require_maps()

    def _require_pairs(self) -> None:
        """Requires heads in pairs of as many and as wide ones, if their sums are subtracted."""
        part = self.differential
        if part is None:
            return
        require(self, "differential", isinstance(part, Differential), "a Differential, or none")
        require(self, "n_kv_heads", self.n_kv_heads % 2 == 0, "even, if heads are in pairs")
        sizes = (part.n_heads, part.d_head, part.norm.d)
        fits = sizes == (self.n_heads, self.d_head, 2 * self.value_width)
        allowed = f"one of {self.n_heads} heads of {self.d_head}, and two values of {self.value_width}"
        require(self, "differential", fits, allowed)

    def _require_sparse(self) -> None:
        """Requires a stride or a summary to be a pattern that the layer's other fields leave room for."""
        if self.stride is not None:
            require_sizes(self, "stride")
            require(self, "stride", self.stride > 1, "at least 2: all tokens are multiples of 1 away")
            require(self, "stride", self.causal, "none unless attention is causal")
            require(self, "stride", self.chunk is None, "none with chunks, whose earlier ones have a summary")
        if self.summary is not None:
            require_sizes(self, "summary")
            allowed = "none without chunks" if self.chunk is None else f"fewer than the chunk's {self.chunk} tokens"
            require(self, "summary", self.chunk is not None and self.summary < self.chunk, allowed)

    def _require_positions(self) -> None:
        """Requires positions to match the heads, and their window that of the layer."""
        if isinstance(self.positions, Rotary):
            fits = self.positions.d_rotary <= self.d_head
            require(self, "positions", fits, f"at most d_head = {self.d_head} rotated numbers")
        if isinstance(self.positions, Alibi):
            same = self.positions.n_heads == self.n_heads
            require(self, "positions", same, f"slopes for n_heads = {self.n_heads}")
        if isinstance(self.positions, RelativeProjection):
            same = (self.positions.n_heads, self.positions.d_head) == (self.n_heads, self.d_head)
            require(self, "positions", same, f"{self.n_heads} heads of width {self.d_head}")
            whole = self.causal and self.chunk is None and not self.sparse
            require(self, "positions", whole, "no projection of distances with chunks or bidirectional attention")
            same = self.positions.window == self.window
            require(self, "positions", same, f"a projection of distances with the attention's window, {self.window}")

    def _require_plain(self) -> None:
        """Requires nothing between the maps and the scores, and all tokens at once, of a layer that embeds distances.

        Distances pass through its own maps of queries and keys.
        """
        require(self, "n_kv_heads", self.n_kv_heads == self.n_heads, f"n_heads = {self.n_heads}, to embed distances")
        allowed = "no embedding of distances with a window or causal attention"
        require(self, "positions", self.reach is None and not self.causal, allowed)
        for name in ("q_norm", "k_norm", "temperature", "kv_from"):
            require(self, name, getattr(self, name) is None, "none, to embed distances")
        require(self, "values_are_keys", not self.values_are_keys, "false, to embed distances")

    def _require_repeatable(self) -> None:
        """Requires nothing between the cached input and its keys and values but their maps."""
        require(self, "caches_input", self.causal and self.cached, "false unless attention is causal and cached")
        require(self, "positions", not isinstance(self.positions, Rotary), "no RoPE, if the input is cached")
        for name in ("k_norm", "v_norm", "kv_name", "kv_from"):
            require(self, name, getattr(self, name) is None, "none, if the input is cached")
        require(self, "values_are_keys", not self.values_are_keys, "false, if the input is cached")
        require(self, "caches_input", not self.sparse, "false, beside a stride or a summary")

    def _require_values(self) -> None:
        width = self.value_width
        require(self, "v_norm", self.v_norm is None or self.v_norm.d == width, f"a norm over a value's width, {width}")
        require_number(self, "value_scale")
        if self.values_are_keys:
            require(self, "d_value", width == self.d_head, f"d_head = {self.d_head}, if values are keys")
            for name in ("k_norm", "v_norm"):
                require(self, name, getattr(self, name) is not None, "a norm, if values are keys")

    def _require_source(self) -> None:
        """Requires a layer that reads another's keys and values to have nothing that makes its own."""
        require_names(self, "kv_name", "kv_from")
        if self.kv_from is None:
            return
        own = ("k_norm", "v_norm", "kv_name")
        for name in own:
            require(self, name, getattr(self, name) is None, "none: it reads another layer's keys and values")
        require(self, "values_are_keys", not self.values_are_keys, "false: it reads another layer's keys and values")
        require(self, "key_bias", self.key_bias, "true: it reads another layer's keys and values")
        require(self, "value_scale", self.value_scale == 1.0, "1: it reads another layer's keys and values")
        plain = not isinstance(self.positions, RelativeProjection)
        require(self, "positions", plain, "no projection of distances: it reads another layer's keys and values")

    def _require_indexer(self) -> None:
        """Requires a layer that chooses keys to have all of its own, and scores that the choice alone masks."""
        if self.indexer is None:
            return
        ok = isinstance(self.indexer, BlockIndexer)
        ok = ok and (self.indexer.d_model, self.indexer.n_heads) == (self.input_width, self.n_kv_heads)
        allowed = f"a BlockIndexer of d_model = {self.input_width} and n_heads = {self.n_kv_heads}, or none"
        require(self, "indexer", ok, allowed)
        whole = self.decodes and self.reach is None and not self.sinks and not self.caches_input
        whole = whole and self.kv_name is self.kv_from is None
        whole = whole and not self.sparse and self.differential is None
        plain = isinstance(self.positions, Rotary | None)
        allowed = "none unless attention is causal, cached, without patterns, sinks, pairs, distances or shared keys"
        require(self, "indexer", whole and plain, allowed)

    def children(self) -> Iterator[tuple[str, Part]]:
        """In order of computation: maps, norms of q and k, then positions, or positions before the norms."""
        children = super().children()
        if not self.rotate_first:
            return children
        return iter(sorted(children, key=lambda child: (child[0] not in self.maps, child[0] != "positions")))

    @property
    def decodes(self) -> bool:
        """True if attention is causal and keys are cached."""
        return self.causal and self.cached

    @property
    def sees_images(self) -> bool:
        """True if attention is causal, with or without a window, not sparse, and scores have no distance term."""
        distant = isinstance(self.positions, Alibi | RelativeBuckets | RelativeProjection)
        return self.causal and self.chunk is None and not self.sparse and not distant and self.indexer is None

    @property
    def choice(self) -> tuple[bool, int] | None:
        """That of its indexer."""
        return None if self.indexer is None else (True, self.indexer.most_keys)

    @property
    def lends_choice(self) -> bool:
        """False: each key head has a choice of its own."""
        return False

    def chooses(self, run: Pass) -> bool:
        """Returns whether a token of the pass attends only to chosen keys."""
        return self.indexer is not None and self.indexer.chooses(run)

    @property
    def plain_pattern(self) -> bool:
        """Whether it has neither a window or chunks nor positions that are added to scores."""
        return self.reach is None and isinstance(self.positions, Rotary | None)

    @property
    def buckets(self) -> tuple[int, int] | None:
        """Those of its relative positions."""
        asked = isinstance(self.positions, RelativeBuckets)
        return (self.positions.n_buckets, self.n_heads) if asked else None  # type: ignore[union-attr]

    @property
    def distances(self) -> tuple[int, int] | None:
        """Those that it embeds."""
        return (self.positions.n_rows, self.d_model) if isinstance(self.positions, Disentangled) else None

    @property
    def queries_per_key(self) -> int:
        """n_heads / n_kv_heads."""
        return self.n_heads // self.n_kv_heads

    @property
    def input_width(self) -> int:
        """Width of what q, k and v read."""
        return self.d_model if self.d_input is None else self.d_input

    @property
    def d_query(self) -> int:
        """Width of all query heads together, which may differ from d_model."""
        return self.n_heads * self.d_head

    @property
    def d_kv(self) -> int:
        """Width of all key heads together."""
        return self.n_kv_heads * self.d_head

    @property
    def value_width(self) -> int:
        """Width of a head's value."""
        return self.d_head if self.d_value is None else self.d_value

    @property
    def mixed_width(self) -> int:
        """Width of what a head's weights sum: a value, or those of a pair."""
        return self.value_width * (1 if self.differential is None else 2)

    @property
    def billed(self) -> Attention:
        """The same with one `start` of a difference, which later layers have more of: they cost the same."""
        return self if self.differential is None else replace(self, differential=replace(self.differential, start=0.5))

    @property
    def d_mixed(self) -> int:
        """Width of all heads' weighted sums together."""
        return self.n_heads * self.value_width

    @property
    def d_gate(self) -> int:
        """Number of gates of a token."""
        return {"channel": self.d_mixed, "head": self.n_heads, None: 0}[self.gating]

    @property
    def inward(self) -> tuple[str, ...]:
        """Names of the maps that read the stream, those to gates apart."""
        if self.kv_from is not None:
            return ("q",)
        return ("q", "k") if self.values_are_keys else ("q", "k", "v")

    def plain_maps(self) -> dict[str, Linear]:
        """q (d_input to n_heads*d_head), k (to n_kv_heads*d_head), v (to n_kv_heads*d_value), gate, o (to d_model)."""
        q = Linear(d_in=self.input_width, d_out=self.d_query, bias=self.bias, split="out", belongs="attention")
        k = replace(q, d_out=self.d_kv, bias=self.bias and self.key_bias)
        maps = {"q": q, "k": k, "v": replace(q, d_out=self.n_kv_heads * self.value_width)}
        own = {name: maps[name] for name in self.inward}
        own |= {"gate": replace(q, d_out=self.d_gate)} if self.gating else {}
        return own | {"o": output_map(self.d_mixed, self.d_model, self.output_bias)}

    def holds(self) -> dict[str, Weight]:
        """One sink per head, if enabled."""
        return {"sinks": Weight(shape=(self.n_heads,), role="bias", split="out")} if self.sinks else {}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_heads / tensor heads and their key/value heads, at least one; o's bias is replicated.

        Beyond n_kv_heads devices, key/value heads and their cache are therefore replicated. A norm over all heads is
        divided like the heads, and so are gains for each.
        """
        heads = divided(self, "n_heads", tensor)
        if self.n_kv_heads % tensor and tensor % self.n_kv_heads:
            divided(self, "n_kv_heads", tensor)
        kv_heads = max(1, self.n_kv_heads // tensor)
        norms = {
            "q_norm": self._shard_norm(self.q_norm, self.d_query, heads),
            "k_norm": self._shard_norm(self.k_norm, self.d_kv, kv_heads),
        }
        positions = self.positions
        if isinstance(positions, Alibi):
            positions = replace(positions, n_heads=heads)
        if isinstance(positions, RelativeProjection):
            positions = positions.shard(tensor)
        pairs = self.differential and replace(self.differential, n_heads=heads)
        indexer = None if self.indexer is None else self.indexer.of_heads(kv_heads)
        made = {"positions": positions, "differential": pairs, "indexer": indexer, **norms}
        return self.resized(n_heads=heads, n_kv_heads=kv_heads, **made)

    def _shard_norm(
        self, norm: Norm | HeadNorm | SoftplusScale | None, whole: int, heads: int
    ) -> Norm | HeadNorm | SoftplusScale | None:
        if isinstance(norm, HeadNorm):
            return replace(norm, n_heads=heads)
        if norm is None or norm.d != whole or whole == self.d_head:
            return norm
        return replace(norm, d=heads * self.d_head)

    @property
    def reach(self) -> int | None:
        """How many tokens the cache holds; None for all."""
        if self.sparse:
            return None
        return self.window if self.chunk is None else self.chunk

    @property
    def sparse(self) -> bool:
        """Whether a token attends to far ones without those between."""
        return self.stride is not None or self.summary is not None

    def keys(self, run: Pass) -> int:
        """Returns S, the number of keys each query is multiplied with, masked ones included.

        A layer with a window or chunks caches that many tokens; several new tokens are appended to them, a single one
        takes its slot. Without causality all tokens come at once, and each is multiplied with those of its window on
        either side. A single token that chooses keys is multiplied with those alone.
        """
        if self.reach is None:
            if self.indexer is not None and run.tokens == 1 and self.indexer.chooses(run):
                return self.indexer.most_keys
            return run.past + run.tokens
        if not self.causal:
            return min(run.past + 1, 2 * self.reach - 1) if run.tokens == 1 else run.past + run.tokens
        if run.tokens == 1:
            return min(run.past + 1, self.reach)
        return min(run.past, self.reach) + run.tokens

    def pairs(self, run: Pass) -> int:
        """Returns the unmasked (query, key) pairs of one sequence and head."""
        seen = run.past + run.tokens
        if not self.causal:
            return self._pairs_both_ways(run)
        if self.indexer is not None:
            return self.indexer.pairs(run)
        pairs = self._pairs_before(run, seen)
        if not self.sees_ahead(run):
            return pairs
        behind = run.mutual * (run.mutual + 1) // 2
        if run.mutual_whole:
            behind = self._pairs_before(replace(run, tokens=run.mutual, past=0), run.mutual)
        return pairs + run.images * (run.mutual**2 - behind)

    def sees_ahead(self, run: Pass) -> bool:
        """Returns whether tokens of an image attend to later ones of it, although attention is causal."""
        return self.causal and run.mutual > 0 and (self.window is not None or not run.mutual_in_windows)

    def _pairs_before(self, run: Pass, seen: int) -> int:
        """Returns the causal pairs."""
        if self.sparse:
            return self._sparse_pairs(seen) - self._sparse_pairs(run.past)
        if self.chunk is not None:
            return _chunk_pairs(seen, self.chunk) - _chunk_pairs(run.past, self.chunk)
        return run.causal_pairs(self.window)

    def _sparse_pairs(self, tokens: int) -> int:
        """Returns the pairs of the first `tokens` tokens with those near them, and with the far ones they attend to."""
        if self.chunk is not None:
            return _chunk_pairs(tokens, self.chunk) + _quotients(tokens, self.chunk) * (self.summary or 0)
        assert self.stride is not None
        near = 1 if self.window is None else self.window
        within = min(tokens, near)
        strides = _quotients(within, self.stride) + (tokens - within) * ((near - 1) // self.stride)
        return within * (within + 1) // 2 + (tokens - within) * near + _quotients(tokens, self.stride) - strides

    def _pairs_both_ways(self, run: Pass) -> int:
        """Returns all pairs of the new tokens, or those less than a window apart on either side."""
        if self.window is None:
            return run.tokens * (run.past + run.tokens)
        near = min(self.window, run.tokens)
        return run.tokens * (2 * near - 1) - near * (near - 1)

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The products with weights, and per head scores and weighted sums: (T,D)x(D,S), (T,S)x(S,mixed_width)."""
        heads, keys, wide = run.batch * self.n_heads, self.keys(run), self.mixed_width
        pairs = 2 * heads * self.pairs(run)
        return (
            *self.map_products(run, *self.inward),
            *self._distance_products(run),
            Product(name="scores", a=run.tokens, b=self.d_head, c=keys, n=heads, needed=self.d_head * pairs),
            Product(name="mix", a=run.tokens, b=keys, c=wide, n=heads, needed=wide * pairs),
            *self.map_products(run, *(("gate",) if self.gating else ()), "o"),
        )

    def _distance_products(self, run: Pass) -> Iterator[Product]:
        """Yields the products of all embedded distances with a map, and of each query or key with the result."""
        part = self.positions
        if not isinstance(part, Disentangled):
            return
        both = {"k": part.to_keys, "q": part.to_queries}
        for name in (name for name, multiplied in both.items() if multiplied):
            yield from self.maps[name].products(name, part.n_rows)
            yield Product(name="by distance", a=run.rows, b=self.d_head, c=part.n_rows, n=self.n_heads)

    def map_rows(self, name: str, run: Pass) -> int:
        """A cached input gives keys and values of all tokens that the cache holds, not of the new ones alone."""
        again = self.caches_input and name in ("k", "v")
        return run.batch * self.keys(run) if again else super().map_rows(name, run)

    def child_run(self, name: str, run: Pass) -> Pass:
        """A norm per head has one row per head and token; keys are chosen without gradients."""
        if name == "indexer":
            return replace(run, gradients=False)
        heads = {"q_norm": self.n_heads, "k_norm": self.n_kv_heads, "v_norm": self.n_kv_heads}
        norm = getattr(self, name)
        per_head = name == "v_norm" or (name in heads and norm.d == self.d_head)
        return replace(run, tokens=run.tokens * heads[name]) if per_head else run

    def remembers(self) -> tuple[Remembered, ...]:
        """Keys and values of n_kv_heads heads per token, or the input that they are made of.

        Nothing if they are another layer's or never used again.
        """
        return () if self.kv_from is not None else self.attends()

    def attends(self) -> tuple[Remembered, ...]:
        """The same, or those of the layer that a layer with `kv_from` reads."""
        if not self.causal or not self.cached:
            return ()
        if self.caches_input:
            made = max(self.input_width, self.n_kv_heads * (self.d_head + self.value_width))
            return (Remembered(name="input", shape=(1, self.input_width), window=self.reach, stands_for=made),)
        widths = {"k": self.d_head, "v": self.value_width}
        most = None if self.indexer is None else self.indexer.most_keys
        return tuple(
            Remembered(name=name, shape=(self.n_kv_heads, width), window=self.reach, reads=most)
            for name, width in widths.items()
        )

    def serves(self, reader: Attention) -> bool:
        """Returns whether another layer can read this one's keys and values: their shapes, places and pattern agree."""
        names = (
            "n_kv_heads",
            "d_head",
            "value_width",
            "positions",
            "causal",
            "window",
            "chunk",
            "stride",
            "summary",
            "cached",
        )
        return all(getattr(self, name) == getattr(reader, name) for name in names)


def output_map(d_in: int, d_model: int, bias: bool) -> Linear:
    """Returns the map from the heads of an attention back to the stream."""
    return Linear(d_in=d_in, d_out=d_model, bias=bias, split="in", to_stream=True, belongs="attention")


def order_matters(norm: Norm | HeadNorm | SoftplusScale | None, rotary: Rotary | None = None) -> bool:
    """Returns whether normalising heads before RoPE differs from normalising them after.

    RoPE preserves a head's length, which is all that an RMSNorm without gains depends on, unless a scaling multiplies
    its cosines and sines.
    """
    stretched = rotary is not None and rotary.stretches
    return norm is not None and (stretched or not (isinstance(norm, RMSNorm) and norm.gain == "none"))


def _chunk_pairs(tokens: int, chunk: int) -> int:
    """Returns the pairs of the first `tokens` tokens, each attending to itself and those before it in its chunk."""
    full, rest = divmod(tokens, chunk)
    return full * chunk * (chunk + 1) // 2 + rest * (rest + 1) // 2


def _quotients(tokens: int, size: int) -> int:
    """Returns the sum of p // size over the positions p of the first `tokens` tokens."""
    full, rest = divmod(tokens, size)
    return size * full * (full - 1) // 2 + full * rest

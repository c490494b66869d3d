"""Content-dependent relative positions: a projection of sinusoids of the distance, or its learned embedding.

Dai et al. 2019 (Transformer-XL, arXiv 1901.02860), section 3.3; He et al. 2020 (DeBERTa, arXiv 2006.03654), 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.part import (
    Part,
    Pass,
    Product,
    Weight,
    divided,
    require,
    require_flags,
    require_names,
    require_number,
    require_sizes,
)


@dataclass(frozen=True, kw_only=True)
class ScoreBiases(Part):
    """Two learned vectors per head, added to queries: u before they meet keys, v before they meet distances.

    They may be lent under the name `weights_name`, or those of the earlier layer that lends them as `weights_from`.
    """

    kind = "attention"
    n_heads: int
    """Query heads."""
    d_head: int
    """Width of a head."""
    weights_name: str | None = None
    """Name under which later layers use these vectors; None if none does."""
    weights_from: str | None = None
    """Name of the earlier layer whose vectors these are; None for its own."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_heads", "d_head")
        require_names(self, "weights_name", "weights_from")
        both = self.weights_name is not None and self.weights_from is not None
        require(self, "weights_name", not both, "none: its weights are another's")

    @property
    def lends(self) -> str | None:
        """Its `weights_name`."""
        return self.weights_name

    @property
    def borrows(self) -> str | None:
        """Its `weights_from`."""
        return self.weights_from

    def holds(self) -> dict[str, Weight]:
        """u, added before keys, and v, added before distances, (n_heads, d_head) each."""
        vector = Weight(shape=(self.n_heads, self.d_head), role="bias", split="out")
        return {"keys": vector, "distances": vector}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds the vectors of its n_heads / tensor heads."""
        return replace(self, n_heads=divided(self, "n_heads", tensor))


@dataclass(frozen=True, kw_only=True)
class RelativeProjection(Part):
    """Scores (q + u) . k + c (q + v) . (W s(d)), s(d) the sinusoids of the distance d, before they are scaled.

    Transformer-XL's u and v are the `biases`, absent from others. Keys farther than `max_distance` have its sinusoids.
    Frequencies fall from 1 towards 1/10000 by equal factors, and reach it only with `endpoint`. A soft cap of the
    attention is that of the sum.
    """

    kind = "attention"
    d_model: int
    """Width of the sinusoids, and of the residual stream."""
    n_heads: int
    """Query heads."""
    d_head: int
    """Width of a head."""
    window: int | None = None
    """Sliding window of the attention: distances from it on are never needed; None for all."""
    max_distance: int | None = None
    """Distance beyond which all keys count as this far; None for no limit."""
    biases: ScoreBiases | None = None
    """Learned vectors that are added to the queries; None for none."""
    scale: float = 1.0
    """Factor on the term of distances, c."""
    endpoint: bool = False
    """Whether the last frequency is 1/10000, rather than the one after it."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_heads", "d_head")
        require_sizes(self, *(name for name in ("window", "max_distance") if getattr(self, name) is not None))
        require_number(self, "scale")
        require_flags(self, "endpoint")
        require(self, "d_model", self.d_model % 2 == 0, "an even number, for a sine and a cosine of each frequency")
        found = self.biases
        fits = found is None or (found.n_heads, found.d_head) == (self.n_heads, self.d_head)
        require(self, "biases", fits, f"vectors of {self.n_heads} heads of width {self.d_head}")

    @property
    def most_distances(self) -> int | None:
        """Distances that differ, the query's own included; None for as many as there are tokens."""
        farthest = None if self.max_distance is None else self.max_distance + 1
        return min((n for n in (self.window, farthest) if n is not None), default=None)

    def n_distances(self, length: int) -> int:
        """Returns how many distances differ in a sequence of `length` tokens."""
        return length if self.most_distances is None else min(length, self.most_distances)

    def holds(self) -> dict[str, Weight]:
        """W (n_heads*d_head, d_model)."""
        return {"weight": Weight(shape=(self.n_heads * self.d_head, self.d_model), role="matrix", split="out")}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds the rows of its n_heads / tensor heads."""
        own = None if self.biases is None else self.biases.shard(tensor)
        return replace(self, n_heads=divided(self, "n_heads", tensor), biases=own)

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The sinusoids of every distance times W, and each query times the result of every distance."""
        distances = self.n_distances(run.past + run.tokens)
        needed = 2 * run.batch * self.n_heads * self.d_head * run.causal_pairs(self.most_distances)
        return (
            # the sinusoids need no gradient
            Product(
                name="distances",
                a=distances,
                b=self.d_model,
                c=self.n_heads * self.d_head,
                weight="weight",
                one_gradient=True,
            ),
            Product(name="by distance", a=run.rows, b=self.d_head, c=distances, n=self.n_heads, needed=needed),
        )


@dataclass(frozen=True, kw_only=True)
class Disentangled(Part):
    """Scores get q . k(e) and q(e) . k, e the embedding of the distance, before they are scaled.

    The layer's own maps make k(e) and q(e), heads of keys and queries, of the stack's `DistanceTable`, which has a row
    for each of `span` distances on either side: those farther have the outermost. With a `max_distance` half of the
    rows are for single distances, and the rest are logarithmically spaced up to it (DeBERTa-v3, arXiv 2111.09543).
    """

    span: int
    """Rows of the table on either side of the query."""
    max_distance: int | None = None
    """Distance from which all share the last row, if rows are logarithmically spaced; None for a row per distance."""
    to_keys: bool = True
    """Whether queries are multiplied with the keys of distances."""
    to_queries: bool = True
    """Whether keys are multiplied with the queries of distances."""

    def __post_init__(self) -> None:
        require_sizes(self, "span", *(() if self.max_distance is None else ("max_distance",)))
        require_flags(self, "to_keys", "to_queries")
        require(self, "to_queries", self.to_keys or self.to_queries, "true without to_keys")
        far = self.max_distance is None or (self.exact > 0 and self.max_distance > self.exact + 1)
        require(self, "max_distance", far, f"more than {self.exact + 1}, and a span of at least 2")

    @property
    def exact(self) -> int:
        """Distances on either side that have a row each, if others are logarithmically spaced."""
        return self.span // 2

    @property
    def n_rows(self) -> int:
        """Rows of the table."""
        return 2 * self.span


@dataclass(frozen=True, kw_only=True)
class DistanceTable(Part):
    """One learned vector per distance, or bucket of distances, for all layers of a stack, normalised if `eps` is given.

    The layers' maps make keys and queries of all rows in each pass.
    """

    kind = "attention"
    n_rows: int
    """Number of distances, or buckets of them."""
    d_model: int
    """Width of the residual stream."""
    eps: float | None = None
    """Epsilon of the LayerNorm of the vectors; None for no norm."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_rows", "d_model")
        if self.eps is not None:
            require_number(self, "eps")

    def holds(self) -> dict[str, Weight]:
        """The table (n_rows, d_model), and the norm's gain and bias."""
        table = {"weight": Weight(shape=(self.n_rows, self.d_model), role="bias", init="normal")}
        gain = {"norm.weight": Weight(shape=(self.d_model,), role="gain")}
        return table if self.eps is None else table | gain | {"norm.bias": Weight(shape=(self.d_model,), role="bias")}

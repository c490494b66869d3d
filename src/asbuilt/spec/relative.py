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
    require_number,
    require_sizes,
)


@dataclass(frozen=True, kw_only=True)
class RelativeProjection(Part):
    """Scores get q . (W s(d)), s(d) the sinusoids of the distance d to the key, before they are scaled.

    Transformer-XL's terms with two learned vectors per head are omitted, since they do not depend on the query.
    """

    kind = "attention"
    d_model: int
    """Width of the sinusoids, and of the residual stream."""
    n_heads: int
    """Query heads."""
    d_head: int
    """Width of a head."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_heads", "d_head")
        require(self, "d_model", self.d_model % 2 == 0, "an even number, for a sine and a cosine of each frequency")

    def holds(self) -> dict[str, Weight]:
        """W (n_heads*d_head, d_model)."""
        return {"weight": Weight(shape=(self.n_heads * self.d_head, self.d_model), role="matrix", split="out")}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds the rows of its n_heads / tensor heads."""
        return replace(self, n_heads=divided(self, "n_heads", tensor))

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The sinusoids of every distance times W, and each query times the result of every distance."""
        distances, pairs = run.past + run.tokens, run.tokens * run.past + run.tokens * (run.tokens + 1) // 2
        needed = 2 * run.batch * self.n_heads * self.d_head * pairs
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

"""Content-dependent relative positions: a projection of sinusoids of the distance.

Dai et al. 2019 (Transformer-XL, arXiv 1901.02860), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.part import Part, Pass, Product, Weight, divided, require, require_sizes


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

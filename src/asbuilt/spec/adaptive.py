"""Adaptive embeddings and heads: the vocabulary in clusters, from frequent to rare tokens, each with its own width.

Grave et al. 2017 (arXiv 1609.04309), and with embeddings of the same clusters Baevski & Auli 2019 (arXiv 1809.10853).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.part import (
    Gives,
    Part,
    Pass,
    Product,
    Weight,
    divided_vocabulary,
    require,
    require_flags,
    require_number,
    require_sizes,
)


@dataclass(frozen=True, kw_only=True)
class TokenCluster(Mapped):
    """project(row), with a table of one learned vector per token of the cluster; zeros for all other tokens."""

    kind = "embedding"
    n_vocab: int
    """Tokens of the cluster."""
    d_model: int
    """Width of the residual stream."""
    d_table: int
    """Width of the table."""
    project: Map | None = None
    """Replaces the plain map from the table's width, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_vocab", "d_model", "d_table")
        self.require_maps()

    def plain_maps(self) -> dict[str, Linear]:
        """From the table's width to d_model."""
        return {"project": Linear(d_in=self.d_table, d_out=self.d_model, belongs="embedding")}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_vocab / tensor of the rows, padded if that is not whole."""
        return replace(self, n_vocab=divided_vocabulary(self.n_vocab, tensor))

    def holds(self) -> dict[str, Weight]:
        """The table (n_vocab, d_table)."""
        return {"weight": Weight(shape=(self.n_vocab, self.d_table), role="table", split="out")}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The linear map of all tokens, so that the products do not depend on which tokens come."""
        return self.map_products(run, "project")


@dataclass(frozen=True, kw_only=True)
class AdaptiveEmbedding(Part):
    """scale * the sum of all clusters' embeddings, each of which is zero for tokens of the others.

    Token ids are numbered through the clusters in order: the first n_0 are those of the first cluster, and so on.
    """

    kind = "embedding"
    clusters: tuple[TokenCluster, ...]
    """The clusters, from the most frequent tokens to the rarest."""
    scale: float = 1.0
    """Factor on the vectors."""

    def __post_init__(self) -> None:
        _require_clusters(self, TokenCluster)
        require_number(self, "scale")

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.clusters[0].d_model

    @property
    def n_vocab(self) -> int:
        """Size of the vocabulary: the tokens of all clusters."""
        return sum(cluster.n_vocab for cluster in self.clusters)


@dataclass(frozen=True, kw_only=True)
class ClusterHead(Mapped):
    """Logits project(x) W^T + b of a cluster's tokens; of the first cluster also of the other clusters themselves.

    W is the head's own, or `tied`: the table of the same cluster of the embedding. With a `tied_map` project(x) is
    x P, with P the matrix of the embedding's map, whose transpose maps back.
    """

    kind = "head"
    d_model: int
    """Width of the residual stream."""
    n_vocab: int
    """Tokens of the cluster."""
    d_table: int
    """Width of W's rows."""
    cluster: int
    """Number of the cluster, from 0."""
    tied: bool = False
    """Whether W is the table of the embedding's cluster."""
    tied_map: bool = False
    """Whether x is multiplied by the matrix of the embedding's map, in place of an own map."""
    n_clusters: int = 0
    """Number of other clusters that have a logit here, each with an own vector and bias."""
    project: Map | None = None
    """Replaces the plain map to W's width, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_vocab", "d_table")
        require_flags(self, "tied", "tied_map")
        for name in ("cluster", "n_clusters"):
            value = getattr(self, name)
            require(self, name, type(value) is int and 0 <= value < MOST_CLUSTERS, f"from 0 to {MOST_CLUSTERS - 1}")
        self.require_maps()

    def plain_maps(self) -> dict[str, Linear]:
        """From d_model to the table's width, unless that is the embedding's."""
        return {} if self.tied_map else {"project": Linear(d_in=self.d_model, d_out=self.d_table, belongs="head")}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_vocab / tensor of the tokens' logits, padded if that is not whole; others are copied."""
        return replace(self, n_vocab=divided_vocabulary(self.n_vocab, tensor))

    def holds(self) -> dict[str, Weight]:
        """W (n_vocab, d_table), unless tied, b, and the same of other clusters (n_clusters, d_table)."""
        own = {"weight": Weight(shape=(self.n_vocab, self.d_table), role="matrix", split="out")}
        bias = {"bias": Weight(shape=(self.n_vocab,), role="bias", split="out")}
        others = {
            "cluster_weight": Weight(shape=(self.n_clusters, self.d_table), role="matrix"),
            "cluster_bias": Weight(shape=(self.n_clusters,), role="bias"),
        }
        return ({} if self.tied else own) | bias | (others if self.n_clusters else {})

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The map, and the product of the result with all rows of W, and with the vectors of other clusters."""
        narrow = Product(name="logits", a=run.rows, b=self.d_table, c=self.n_vocab, weight="weight")
        at = f"/embedding.clusters.{self.cluster}."
        back = Product(name="project", a=run.rows, b=self.d_model, c=self.d_table, weight=f"{at}project.weight")
        others = replace(narrow, name="cluster_weight", c=self.n_clusters, weight="cluster_weight")
        return (
            *((back,) if self.tied_map else self.map_products(run, "project")),
            replace(narrow, weight=f"{at}weight") if self.tied else narrow,
            *((others,) if self.n_clusters else ()),
        )


@dataclass(frozen=True, kw_only=True)
class AdaptiveHead(Part):
    """Log-probabilities of all tokens, of a softmax over the first cluster's tokens and the other clusters.

    A token of cluster i > 0 has log p(i) + log p(token | i), with a softmax over the tokens of that cluster. They are
    normalised, so a loss that normalises logits leaves them as they are.
    """

    kind = "head"
    gives: ClassVar[Gives] = "logits"
    per_token: ClassVar[bool] = True
    clusters: tuple[ClusterHead, ...]
    """The clusters, of which the first has a logit for each of the others."""

    def __post_init__(self) -> None:
        _require_clusters(self, ClusterHead)
        numbered = all(cluster.cluster == i for i, cluster in enumerate(self.clusters))
        require(self, "clusters", numbered, "clusters numbered in order from 0")
        others = [cluster.n_clusters for cluster in self.clusters]
        wanted = [len(others) - 1, *(0 for _ in others[1:])]
        require(self, "clusters", others == wanted, f"clusters whose n_clusters are {wanted}")

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.clusters[0].d_model

    @property
    def n_vocab(self) -> int:
        """Size of the vocabulary: the tokens of all clusters."""
        return sum(cluster.n_vocab for cluster in self.clusters)

    @property
    def n_scores(self) -> int:
        """Number of classes of the loss: one per token of the vocabulary."""
        return self.n_vocab

    def shares_with(self, embedding: Part) -> bool:
        """Returns whether what is tied is a table or map of the embedding, plain and of the same sizes."""
        below = embedding.clusters if isinstance(embedding, AdaptiveEmbedding) else ()
        tied = [cluster for cluster in self.clusters if cluster.tied or cluster.tied_map]
        return all(one.cluster < len(below) and _fits(one, below[one.cluster]) for one in tied)


# Clusters of one vocabulary: published models have at most four.
MOST_CLUSTERS = 64


def _require_clusters(part: AdaptiveEmbedding | AdaptiveHead, kind: type[Part]) -> None:
    """Raises InputError unless the part's clusters are one or more of a kind, and of one width."""
    found = part.clusters
    number = isinstance(found, tuple) and 1 <= len(found) <= MOST_CLUSTERS
    allowed = f"1 to {MOST_CLUSTERS} parts of kind {kind.__name__}"
    require(part, "clusters", number and all(isinstance(one, kind) for one in found), allowed)
    widths = sorted({one.d_model for one in found})
    require(part, "clusters", len(widths) == 1, f"clusters of one d_model, not {widths}")


def _fits(head: ClusterHead, below: TokenCluster) -> bool:
    same = (head.n_vocab, head.d_table) == (below.n_vocab, below.d_table)
    return same and (not head.tied_map or below.project is None)

"""Adaptive embeddings and heads: clusters of tokens, each with its own width.

Shapes: batch B, new tokens T, model width M.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asbuilt.nn.embedding import scaled
from asbuilt.nn.linear import Linear, Matrix, PartModule
from asbuilt.nn.registry import computes, module
from asbuilt.nn.step import Step
from asbuilt.spec import adaptive as spec


@computes(spec.TokenCluster)
class TokenCluster(PartModule):
    """Looks up one row per token of the cluster, and maps it to the model's width."""

    weight: Tensor
    project: Linear

    def __init__(self, part: spec.TokenCluster, path: str) -> None:
        super().__init__(part, path)
        self.n_vocab = part.n_vocab

    def forward(self, places_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M), zeros for places that the table does not have."""
        outside = (places_BT < 0) | (places_BT >= self.n_vocab)
        rows = Matrix(self.weight).rows(places_BT.masked_fill(outside, 0), step.dtype)
        return self.project(rows.masked_fill(outside[..., None], 0.0))


@computes(spec.AdaptiveEmbedding)
class AdaptiveEmbedding(nn.Module):
    """The scaled sum of what the clusters give."""

    def __init__(self, part: spec.AdaptiveEmbedding, path: str) -> None:
        super().__init__()
        self.part = part
        self.clusters = nn.ModuleList(module(one, f"{path}.clusters.{i}") for i, one in enumerate(part.clusters))

    def forward(self, tokens_BT: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        x_BTM, first = None, 0
        for part, cluster in zip(self.part.clusters, self.clusters, strict=True):
            made = cluster(tokens_BT - first, step)
            x_BTM = made if x_BTM is None else x_BTM + made
            first += part.n_vocab
        assert x_BTM is not None
        return scaled(x_BTM, self.part.scale)


@computes(spec.ClusterHead)
class ClusterHead(PartModule):
    """Logits of a cluster's tokens, and of other clusters."""

    weight: Tensor
    bias: Tensor
    cluster_weight: Tensor
    cluster_bias: Tensor
    project: Linear

    def __init__(self, part: spec.ClusterHead, path: str) -> None:
        super().__init__(part, path)
        self.part = part

    def forward(self, x: Tensor, shared: TokenCluster | None) -> Tensor:
        """Returns (..., n_vocab + n_clusters); what is tied is that of `shared`, the embedding's cluster."""
        part, table = self.part, None if shared is None else shared.weight
        if part.tied_map:
            assert shared is not None, "a tied map needs the embedding's"
            narrow = Matrix(shared.project.weight.t()).product(x)
        else:
            narrow = self.project(x)
        table = table if part.tied else self.weight
        assert table is not None, "a tied head needs the embedding's table"
        logits = Matrix(table).product(narrow, self.bias)
        if not part.n_clusters:
            return logits
        return torch.cat((logits, Matrix(self.cluster_weight).product(narrow, self.cluster_bias)), -1)


@computes(spec.AdaptiveHead)
class AdaptiveHead(nn.Module):
    """Log-probabilities of all tokens."""

    def __init__(self, part: spec.AdaptiveHead, path: str) -> None:
        super().__init__()
        self.part = part
        self.clusters = nn.ModuleList(module(one, f"{path}.clusters.{i}") for i, one in enumerate(part.clusters))

    def forward(self, x: Tensor, embedding: nn.Module | None) -> Tensor:
        """Returns (..., n_vocab), of softmaxes in float32 or wider; `embedding` holds what is tied."""
        shared = [*embedding.clusters] if isinstance(embedding, AdaptiveEmbedding) else []
        n = self.part.clusters[0].n_vocab
        found: list[Tensor] = []
        first = None
        for i, cluster in enumerate(self.clusters):
            below = shared[i] if i < len(shared) else None
            logits = cluster(x, below)
            wide = torch.promote_types(logits.dtype, torch.float32)
            made = torch.log_softmax(logits, -1, dtype=wide)
            if first is None:
                first, made = made, made[..., :n]
            else:
                made = made + first[..., n + i - 1, None]
            found.append(made.to(x.dtype))
        return torch.cat(found, -1)

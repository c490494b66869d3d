"""Score terms from a projection of the distance's sinusoids, or from its learned embedding.

Shapes: batch B, new tokens T, keys S, distances L (those that differ), model width M, heads H, head width D.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asbuilt.kernels.relative import by_distance, distance_rows
from asbuilt.kernels.rotary import widest
from asbuilt.nn.linear import Linear, PartModule, parameter
from asbuilt.nn.masks import AttentionPattern, Keys, seen_keys
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import relative as spec
from asbuilt.spec.relative import Disentangled


@computes(spec.ScoreBiases)
class ScoreBiases(nn.Module):
    """What is added to queries before keys, and before distances; one that borrows both has none of its own."""

    keys: Tensor
    distances: Tensor

    def __init__(self, part: spec.ScoreBiases, path: str) -> None:
        super().__init__()
        self.part = part
        for name, weight in part.holds().items() if part.borrows is None else ():
            self.register_parameter(name, parameter(weight))

    def holder(self, step: Step) -> ScoreBiases:
        """Returns the module that holds the vectors: itself, which it then lends to later ones, or its lender."""
        if self.part.weights_from is not None:
            lender = step.lenders[self.part.weights_from]
            assert isinstance(lender, ScoreBiases)
            return lender
        if self.part.weights_name is not None:
            step.lenders[self.part.weights_name] = self
        return self


@computes(spec.RelativeProjection)
class ProjectedDistances(PartModule):
    """(q + v) . (W s(distance)), -inf for keys that the query does not attend to; and q + u, which meets keys."""

    weight: Tensor

    def __init__(self, part: spec.RelativeProjection, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.biases = None if part.biases is None else ScoreBiases(part.biases, f"{path}.biases")

    def forward(self, q_BTHD: Tensor, step: Step, scale: float, keys: Keys) -> tuple[Tensor, Tensor]:
        """Returns the queries that meet keys (B, T, H, D), and the term added to the scores, (B, H, T, S)."""
        part, (H, D) = self.part, q_BTHD.shape[2:]
        at = "distances", part.window, part.max_distance
        distances, ahead = step.once(at, lambda: distances_of(part, step, keys))
        far_LHD = F.linear(sinusoids(step, part, q_BTHD.dtype), self.weight).view(-1, H, D)
        biases = None if self.biases is None else self.biases.holder(step)
        far_queries = q_BTHD if biases is None else q_BTHD + biases.distances
        scores = by_distance(far_queries, far_LHD, distances) * (scale * part.scale)
        scores = scores.masked_fill(ahead[:, None], -torch.inf)
        return q_BTHD if biases is None else q_BTHD + biases.keys, scores


@computes(spec.DistanceTable)
class DistanceTable(PartModule):
    """The embeddings of distances of a stack's layers, normalised or not."""

    weight: Tensor
    norm: Linear  # has the norm's gain and bias

    def __init__(self, part: spec.DistanceTable, path: str) -> None:
        super().__init__(part, path)
        self.d_model, self.eps = part.d_model, part.eps

    def forward(self, step: Step) -> None:
        """Shares the embeddings with the layers of a pass."""
        step.distances_LM = self.weight
        if self.eps is not None:
            norm = self.norm
            step.distances_LM = F.layer_norm(self.weight, (self.d_model,), norm.weight, norm.bias, self.eps)


def disentangled(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    part: Disentangled,
    maps: tuple[nn.Module, nn.Module],
    step: Step,
    scale: float,
    keys: Keys,
) -> Tensor:
    """Returns the term added to the scores, (B, H, T, T): embedded distances as keys, as queries, or both.

    `maps` are the layer's own, to queries and keys.
    """
    assert step.distances_LM is not None, "the stack has no table of distances"
    H, D = q_BTHD.shape[2:]
    rows, hidden = step.once((part, "rows"), lambda: rows_of(part, step, keys))
    terms = []
    if part.to_keys:
        terms.append(by_distance(q_BTHD, maps[1](step.distances_LM).view(-1, H, D), rows))
    if part.to_queries:
        read = by_distance(k_BTHD, maps[0](step.distances_LM).view(-1, H, D), rows.transpose(1, 2))
        terms.append(read.transpose(-1, -2))
    scores = (terms[0] if len(terms) == 1 else terms[0] + terms[1]) * scale
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def rows_of(part: Disentangled, step: Step, keys: Keys) -> tuple[Tensor, Tensor | None]:
    """Returns the row of the table of distances for each query and key (B or 1, T, T), and the mask, None for none."""
    keys_BS = keys()
    rows = distance_rows(part, step.positions_BT[:, :, None] - keys_BS[:, None, :])
    return rows, None if step.uniform else ~seen_keys(step, AttentionPattern(causal=False), keys_BS)[:, None]


def distances_of(part: spec.RelativeProjection, step: Step, keys: Keys) -> tuple[Tensor, Tensor]:
    """Returns the distance of each key before each query, the farthest one beyond it, and the mask: (B or 1, T, S)."""
    keys_BS = keys()
    behind = step.positions_BT[:, :, None] - keys_BS[:, None, :]
    farthest = part.n_distances(max(step.lengths)) - 1
    return behind.clamp(0, farthest), ~seen_keys(step, AttentionPattern(window=part.window), keys_BS)


def sinusoids(step: Step, part: spec.RelativeProjection, dtype: torch.dtype) -> Tensor:
    """Returns sines and then cosines of every distance that differs (L, width), computed once for all layers.

    Distance d and pair i of n have the angle d / 10000^(i / n), or with an `endpoint` d / 10000^(i / (n - 1)).
    """
    width, n = part.d_model, part.n_distances(max(step.lengths))

    def made() -> Tensor:
        pairs = torch.arange(width // 2, device=step.device, dtype=widest(step.device))
        steps = max(1, width // 2 - part.endpoint)
        angles = torch.arange(n, device=step.device)[:, None] / 10000 ** (pairs / steps)
        return torch.cat((angles.sin(), angles.cos()), -1).to(dtype)

    return step.once(("sinusoids", width, part.endpoint, n, dtype), made)

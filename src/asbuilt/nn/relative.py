"""Score terms from a projection of the distance's sinusoids, or from its learned embedding.

Shapes: batch B, new tokens T, keys S, distances L (0 to the longest row), model width M, heads H, head width D.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asbuilt.kernels.relative import by_distance, distance_rows
from asbuilt.kernels.rotary import widest
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.masks import AttentionPattern, Keys, seen_keys
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import relative as spec
from asbuilt.spec.relative import Disentangled


@computes(spec.RelativeProjection)
class ProjectedDistances(PartModule):
    """q . (W s(distance)), -inf for keys after the query."""

    weight: Tensor

    def __init__(self, part: spec.RelativeProjection, path: str) -> None:
        super().__init__(part, path)
        self.part = part

    def forward(self, q_BTHD: Tensor, step: Step, scale: float, keys: Keys) -> Tensor:
        """Returns the term added to the scores, (B, H, T, S)."""
        H, D = q_BTHD.shape[2:]
        distances, ahead = step.once("distances", lambda: distances_of(step, keys))
        far_LHD = F.linear(sinusoids(step, self.part.d_model, q_BTHD.dtype), self.weight).view(-1, H, D)
        return (by_distance(q_BTHD, far_LHD, distances) * scale).masked_fill(ahead[:, None], -torch.inf)


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


def distances_of(step: Step, keys: Keys) -> tuple[Tensor, Tensor]:
    """Returns the distance of each key before each query, and the mask, both (B or 1, T, S), without a window."""
    keys_BS = keys()
    behind = step.positions_BT[:, :, None] - keys_BS[:, None, :]
    return behind.clamp(0, max(step.lengths) - 1), ~seen_keys(step, AttentionPattern(), keys_BS)


def sinusoids(step: Step, width: int, dtype: torch.dtype) -> Tensor:
    """Returns sines and then cosines of every distance up to the longest row (L, width), computed once for all layers.

    Distance d and pair i have the angle d / 10000^(2i / width).
    """

    def made() -> Tensor:
        pairs = torch.arange(0, width, 2, device=step.device, dtype=widest(step.device))
        angles = torch.arange(max(step.lengths), device=step.device)[:, None] / 10000 ** (pairs / width)
        return torch.cat((angles.sin(), angles.cos()), -1).to(dtype)

    return step.once((width, dtype), made)

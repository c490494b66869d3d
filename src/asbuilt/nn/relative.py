"""Scores by a projection of the distance's sinusoids.

Shapes: batch B, new tokens T, keys S, distances L (0 to the longest row), model width M, heads H, head width D.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.nn.linear import PartModule
from asbuilt.nn.step import Step
from asbuilt.spec.relative import RelativeProjection


class ProjectedDistances(PartModule):
    """q . (W s(distance)), -inf where a key comes after its query."""

    weight: Tensor

    def __init__(self, part: RelativeProjection, path: str) -> None:
        super().__init__(part, path)
        self.part = part

    def forward(self, q_BTHD: Tensor, step: Step, scale: float) -> Tensor:
        """Returns what is added to the scores, (B, H, T, S)."""
        B, T, H, D = q_BTHD.shape
        distances, ahead = step.distances
        far_LHD = F.linear(step.sinusoids(self.part.d_model, q_BTHD.dtype), self.weight).view(-1, H, D)
        # a copy of its own, so that what is kept for the backward pass does not depend on the shapes
        queries = q_BTHD.permute(2, 0, 1, 3).reshape(H, B * T, D).clone()
        every = torch.bmm(queries, far_LHD.permute(1, 2, 0)).view(H, B, T, -1).transpose(0, 1)
        scores = every.gather(-1, distances[:, None].expand(B, H, -1, -1)) * scale
        return scores.masked_fill(ahead[:, None], -torch.inf)

"""Score terms from a projection of the distance's sinusoids.

Shapes: batch B, new tokens T, keys S, distances L (0 to the longest row), model width M, heads H, head width D.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.rotary import widest
from asbuilt.nn.linear import PartModule
from asbuilt.nn.masks import AttentionPattern, Keys, seen_keys
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec.relative import RelativeProjection


@computes(RelativeProjection)
class ProjectedDistances(PartModule):
    """q . (W s(distance)), -inf for keys after the query."""

    weight: Tensor

    def __init__(self, part: RelativeProjection, path: str) -> None:
        super().__init__(part, path)
        self.part = part

    def forward(self, q_BTHD: Tensor, step: Step, scale: float, keys: Keys) -> Tensor:
        """Returns the term added to the scores, (B, H, T, S)."""
        B, T, H, D = q_BTHD.shape
        distances, ahead = step.once("distances", lambda: distances_of(step, keys))
        far_LHD = F.linear(sinusoids(step, self.part.d_model, q_BTHD.dtype), self.weight).view(-1, H, D)
        # a copy, so that what is saved for the backward pass does not depend on the shapes
        queries = q_BTHD.permute(2, 0, 1, 3).reshape(H, B * T, D).clone()
        every = torch.bmm(queries, far_LHD.permute(1, 2, 0)).view(H, B, T, -1).transpose(0, 1)
        scores = every.gather(-1, distances[:, None].expand(B, H, -1, -1)) * scale
        return scores.masked_fill(ahead[:, None], -torch.inf)


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

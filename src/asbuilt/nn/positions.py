"""Positions that are added to the stream, and the bias table of relative buckets.

Shapes: batch B, new tokens T, model width M.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.image_grid import cubic_taps, linear_taps, taps, triangle_taps
from asbuilt.kernels.rotary import RopeTables, frequencies, tables
from asbuilt.nn.linear import PartModule
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import positions as spec

TAPS = {"corners": taps, "linear": linear_taps, "cubic": cubic_taps, "triangle": triangle_taps}


@computes(spec.BiasTable)
class BiasTable(PartModule):
    """The bias table of a stack's relative buckets."""

    weight: Tensor

    def forward(self, step: Step) -> None:
        """Shares the table with the layers of a pass."""
        step.relative_BH = self.weight


@computes(spec.LearnedPositions)
class LearnedPositions(PartModule):
    """Looks up one vector per position."""

    weight: Tensor

    def __init__(self, part: spec.LearnedPositions, path: str) -> None:
        super().__init__(part, path)
        self.offset = part.offset

    def forward(self, step: Step) -> Tensor:
        """Returns (B or 1, T, M)."""
        return F.embedding(step.positions_BT + self.offset if self.offset else step.positions_BT, self.weight)


@computes(spec.GridPositions)
class GridPositions(PartModule):
    """Interpolates a square table to an image's grid."""

    weight: Tensor

    def __init__(self, part: spec.GridPositions, path: str) -> None:
        super().__init__(part, path)
        self.n_side, self.taps = part.n_side, TAPS[part.interpolation]

    def forward(self, step: Step) -> Tensor:
        """Returns (1, P, M)."""
        assert step.grid is not None, "these positions are those of an image"
        places, weights = self.taps(step.grid, self.n_side, step.device)
        weights, made = weights[..., None].to(self.weight.dtype), None
        for place, weight in zip(places, weights, strict=True):  # one by one, since sixteen at once are much memory
            near = F.embedding(place, self.weight) * weight
            made = near if made is None else made + near
        assert made is not None
        return made[None]


@computes(spec.Sinusoids)
class Sinusoids(PartModule):
    """Looks up the sines and cosines of a position."""

    weight: Tensor

    def __init__(self, part: spec.Sinusoids, path: str) -> None:
        super().__init__(part, path)
        with torch.no_grad():
            self.weight.copy_(sinusoids(part))

    def forward(self, step: Step) -> Tensor:
        """Returns (B or 1, T, M)."""
        return F.embedding(step.positions_BT, self.weight)


def sinusoids(part: spec.Sinusoids) -> Tensor:
    """Returns the table (n_positions, d_model) in float64."""
    angles = torch.arange(part.n_positions, dtype=torch.float64)[:, None]
    angles = angles * torch.tensor(part.frequencies, dtype=torch.float64)
    sines, cosines = angles.sin(), angles.cos()[:, : part.d_model // 2]
    if part.layout == "halves":
        return torch.cat((sines, cosines), 1)
    table = angles.new_empty(part.n_positions, part.d_model)
    table[:, 0::2], table[:, 1::2] = sines, cosines
    return table


def rope_tables(step: Step, rotary: spec.Rotary, dtype: torch.dtype) -> RopeTables:
    """Returns the RoPE tables for a pass's tokens, built once for all layers."""

    def made() -> RopeTables:
        inverse = step.constant((rotary, step.reach), lambda: frequencies(rotary, step.reach, step.device))
        return tables(rotary, step.positions_BT, step.reach, dtype, step.coordinates_3BT, inverse)

    return step.once((rotary, dtype), made)


def temperature(step: Step, part: spec.QueryTemperature, dtype: torch.dtype) -> Tensor:
    """Returns the scale of each token's queries, (B or 1, T, 1, 1), computed once for all layers."""

    def made() -> Tensor:
        counted = step.positions_BT if part.from_zero else step.positions_BT + 1
        steps = torch.floor(counted.float() / part.floor)
        return (1 + part.scale * torch.log1p(steps)).to(dtype)[:, :, None, None]

    return step.once((part, dtype), made)

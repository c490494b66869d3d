"""Relative position buckets: one per near distance, logarithmically spaced ones for far distances.

Shapes: batch B, queries or keys T, the others S, rows of a table of distances L, heads H, head width D.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asbuilt.spec.positions import RelativeBuckets
from asbuilt.spec.relative import Disentangled


def buckets(part: RelativeBuckets, ahead: Tensor) -> Tensor:
    """Returns the bucket of each distance; `ahead` is the key's position minus the query's.

    Logarithms are in float32: at the edge of a bucket their rounding decides, as in published code.
    """
    first = torch.where(ahead > 0, part.one_way, 0) if part.both_ways else 0
    distance = ahead.abs() if part.both_ways else (-ahead).clamp(min=0)
    far = torch.log(distance.clamp(min=1).float() / part.exact) / math.log(part.max_distance / part.exact)
    shared = part.exact + (far * (part.one_way - part.exact)).long()
    return first + torch.where(distance < part.exact, distance, shared.clamp(max=part.one_way - 1))


def distance_rows(part: Disentangled, behind: Tensor) -> Tensor:
    """Returns the row of each distance in a table of them; `behind` is the query's position minus the key's.

    Logarithms are in float32, as in `buckets`.
    """
    if part.max_distance is not None:
        distance, exact = behind.abs(), part.exact
        widest = torch.log(torch.tensor((part.max_distance - 1) / exact, device=behind.device, dtype=torch.float32))
        far = torch.log(distance.clamp(min=exact).float() / exact) / widest * (exact - 1)
        behind = torch.where(distance <= exact, behind, (exact + far.ceil().long()) * behind.sign())
    return (behind + part.span).clamp(0, part.n_rows - 1)


def by_distance(x_BTHD: Tensor, rows_LHD: Tensor, index_BTS: Tensor) -> Tensor:
    """Returns (B, H, T, S): each head's product with the row of a table of distances that `index` names."""
    B, T, H, D = x_BTHD.shape
    # a copy, so that what is saved for the backward pass does not depend on the shapes
    queries = x_BTHD.permute(2, 0, 1, 3).reshape(H, B * T, D).clone()
    every = torch.bmm(queries, rows_LHD.permute(1, 2, 0)).view(H, B, T, -1).transpose(0, 1)
    return every.gather(-1, index_BTS[:, None].expand(B, H, -1, -1))

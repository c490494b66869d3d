"""Relative position buckets: one per near distance, logarithmically spaced ones for far distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asbuilt.spec.positions import RelativeBuckets


def buckets(part: RelativeBuckets, ahead: Tensor) -> Tensor:
    """Returns the bucket of each distance; `ahead` is the key's position minus the query's.

    Logarithms are in float32: at the edge of a bucket their rounding decides, as in published code.
    """
    first = torch.where(ahead > 0, part.one_way, 0) if part.both_ways else 0
    distance = ahead.abs() if part.both_ways else (-ahead).clamp(min=0)
    far = torch.log(distance.clamp(min=1).float() / part.exact) / math.log(part.max_distance / part.exact)
    shared = part.exact + (far * (part.one_way - part.exact)).long()
    return first + torch.where(distance < part.exact, distance, shared.clamp(max=part.one_way - 1))

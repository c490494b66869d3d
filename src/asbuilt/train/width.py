"""Width-transferable scaling (muP): learning rate and std found at a small width suit the same model at a larger one.

Yang et al. 2022 (arXiv 2203.03466), table 3, for Adam. With m = width / base width, and s, lr those of the base:

weight                             std        learning rate
matrices of the blocks             s / √m     lr / m          (m times more inputs: each moves m times less)
head, routers                      s / m      lr / m          (as a factor of 1/m on what they give)
tables, gains, biases              s          lr

It is a matter of initialisation and groups alone: the trained model is a plain one. Heads must grow in number, not in
width, so that 1/√d_head stays; a tied head is refused, as one matrix cannot have both rows of the table.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from asbuilt.errors import InputError
from asbuilt.spec import Model, TiedHead, walk
from asbuilt.spec.part import Kind, Weight, stored_weights

READ_OUT: tuple[Kind, ...] = ("head", "router")


class Scales(NamedTuple):
    """What multiplies the standard deviation and the learning rate of a weight."""

    std: float = 1.0
    lr: float = 1.0


def scales(spec: Model, base: int) -> dict[str, Scales]:
    """Returns the scales of each weight of a model, by path, beside those of a model of the width `base`.

    Without a base, 0, all are 1. Raises InputError for a model whose head is its embedding table.
    """
    weights = list(stored_weights(spec))
    if not base:
        return {path: Scales() for path, _, _ in weights}
    tied = next((path for path, part in walk(spec) if isinstance(part, TiedHead)), None)
    if tied is not None:
        raise InputError(
            f"{tied} is tied to the embedding, and both need other scales",
            field="model.base_width",
            value=base,
            fix="tie_word_embeddings = false",
        )
    ratio = spec.d_model / base
    return {path: _scales(weight, owner.kind, ratio) for path, weight, owner in weights}


def _scales(weight: Weight, kind: Kind, ratio: float) -> Scales:
    if weight.role != "matrix" or kind == "embedding":
        return Scales()
    return Scales(std=1 / ratio if kind in READ_OUT else 1 / math.sqrt(ratio), lr=1 / ratio)

"""Contrastive pairs: each image is nearest to its own text among those of its batch, and each text to its own image.

Radford et al. 2021 (CLIP, arXiv 2103.00020), section 2.3 and figure 3. With s_nb = exp(t) cos(u_n, v_b) of the image n
and the text b, the loss of a batch of B pairs is the mean of two cross-entropies, -ln softmax_b(s_nb) and
-ln softmax_n(s_nb) at n = b, over the pairs. t is learned; it starts at ln(1 / 0.07), and exp(t) stays at most 100.
Batches that are accumulated see each other's pairs as little as those of different steps do.

Shapes: images N and texts B in the same order, vectors D wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.nn.dual_encoder import DualEncoder
from asbuilt.nn.model import Model
from asbuilt.nn.vision import unit
from asbuilt.train.batch import ImageTexts
from asbuilt.train.loss import Loss

TEMPERATURE = 0.07  # 1 / exp(t) at the start
MOST = math.log(100.0)  # of t


class Retrieval(NamedTuple):
    """Shares of images whose nearest text, and of texts whose nearest image, is theirs, among `candidates` pairs."""

    texts: float
    images: float
    candidates: int


def start_temperature(model: Model) -> None:
    """Sets t to what CLIP starts with."""
    with torch.no_grad():
        towers(model).vision.scale.fill_(-math.log(TEMPERATURE))


def limit_temperature(model: Model) -> None:
    """Has exp(t) be at most 100, after a step."""
    with torch.no_grad():
        towers(model).vision.scale.clamp_(max=MOST)


def towers(model: Model) -> DualEncoder:
    """Returns the model as what it must be."""
    assert isinstance(model, DualEncoder)
    return model


def contrastive_loss(model: Model, batch: ImageTexts) -> Loss:
    """Returns the summed loss of a batch's pairs."""
    return pair_loss(model(batch.ids, **batch.inputs))


def pair_loss(similarities_NB: Tensor) -> Loss:
    """Returns the sum over pairs of both cross-entropies' mean, in float32 or wider."""
    wide_NB = similarities_NB.to(torch.promote_types(similarities_NB.dtype, torch.float32))
    own_N = torch.arange(len(wide_NB), device=wide_NB.device)
    both = (F.cross_entropy(one, own_N, reduction="sum") for one in (wide_NB, wide_NB.t()))
    total = sum(both, wide_NB.new_zeros(())) / 2
    return Loss(total, total.detach())


@torch.no_grad()
def retrieval(model: Model, batches: Sequence[ImageTexts]) -> Retrieval:
    """Returns how often the nearest is the right one, among all pairs of all batches.

    Where several pairs have the same text, each of them is right.
    """
    one = towers(model)
    images_ND = torch.cat([unit(one.vision.tower.of_images(batch.images, "fused").float()) for batch in batches])
    texts_BD = torch.cat([unit(one(batch.ids).float()) for batch in batches])
    near_NB = images_ND @ texts_BD.t()
    kinds_B = _kinds(batches).to(near_NB.device)
    return Retrieval(
        texts=float((kinds_B[near_NB.argmax(1)] == kinds_B).float().mean()),
        images=float((kinds_B[near_NB.argmax(0)] == kinds_B).float().mean()),
        candidates=len(kinds_B),
    )


def _kinds(batches: Sequence[ImageTexts]) -> Tensor:
    """Returns a number for each pair, (B,): the same for those with the same text."""
    numbers: dict[tuple[int, ...], int] = {}
    texts = [tuple(ids[kept].tolist()) for batch in batches for ids, kept in zip(batch.ids, _held(batch), strict=True)]
    return torch.tensor([numbers.setdefault(text, len(numbers)) for text in texts])


def _held(batch: ImageTexts) -> Tensor:
    """Marks the tokens of each text (B, T), without what fills the row."""
    return batch.targets >= 0

"""Attention that reads keys and values from codes, block by block, with an online softmax.

Codes meet queries and weights as they are: scores are scaled afterwards, weights beforehand, so that no block is
expanded to more than its codes as floats. What is needed beside inputs and result does not grow with the cache.
Milakov and Gimelshein 2018 (arXiv 1805.02867), Dao et al. 2022 (arXiv 2205.14135).
Shapes: q (B, H, T, D); k, v (B, K, S, D) with H a multiple of K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asbuilt.kernels.codes import Block, Coded

if TYPE_CHECKING:
    from asbuilt.kernels.attention import Mask

# Numbers of a block's codes and scores together, and the fewest keys of one.
SCRATCH = 2**20
FEWEST = 16
# Scores of a block beside its codes: with more, codes are read again for fewer tiles of queries.
SCORES_BESIDE = 4


@dataclass(frozen=True)
class Scoring:
    """What scores are: scale, then soft-capped, with the mask added before the cap if `sum_capped`."""

    scale: float
    softcap: float | None
    sum_capped: bool

    def scores(self, q_BHTD: Tensor, k: Block, mask: Tensor | None) -> Tensor:
        """Returns the scores (B, H, T, S) of one block, the dtype's least number where masked."""
        B, H, T, D = q_BHTD.shape
        K, S = k.codes.shape[1:3]
        q = q_BHTD.reshape(B, K, -1, D)
        scores = q @ k.codes.transpose(-1, -2)
        if k.scale is not None:
            scores *= (k.scale * self.scale).transpose(-1, -2)
        else:
            scores *= self.scale
        if k.low is not None:
            scores += (q.sum(-1, keepdim=True) * self.scale) * k.low.transpose(-1, -2)
        scores = scores.view(B, H, T, S)
        least = torch.finfo(scores.dtype).min
        if mask is not None and mask.dtype != torch.bool and self.sum_capped:
            mask, scores = ~mask.isneginf(), scores + mask.masked_fill(mask.isneginf(), 0.0)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if mask is None:
            return scores
        return scores.masked_fill_(~mask, least) if mask.dtype == torch.bool else (scores + mask).clamp_(min=least)


def attend_coded(
    q: Tensor,
    k: Coded,
    v: Coded,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sum_capped: bool = False,
) -> Tensor:
    """Returns softmax(scale q k^T, masked) v of shape (B, H, T, width of v), computed in float32 or wider."""
    B, H, T, _ = q.shape
    tokens, keys = tile(B, H, k.shape[1], k.shape[3] + v.shape[3], T)
    scoring = Scoring(scale, softcap, sum_capped)
    y = q.new_empty(B, H, T, v.shape[3])
    for start in range(0, T, tokens):
        end = min(T, start + tokens)
        own = mask
        if isinstance(mask, Tensor) and mask.shape[-2] > 1:
            own = mask[..., start:end, :]
        y[:, :, start:end] = _tile(q[:, :, start:end], k, v, own, scoring, sinks, start, keys)
    return y


def tile(batch: int, heads: int, key_heads: int, width: int, tokens: int) -> tuple[int, int]:
    """Returns how many queries and keys are computed at once: about SCRATCH numbers."""
    codes = batch * key_heads * width
    queries = min(tokens, max(1, SCORES_BESIDE * key_heads * width // heads))
    return queries, max(FEWEST, SCRATCH // (codes + batch * heads * queries))


def _tile(
    q: Tensor, k: Coded, v: Coded, mask: Mask, scoring: Scoring, sinks: Tensor | None, first: int, keys: int
) -> Tensor:
    """Returns the sums of a tile of queries, the first of which is query `first`."""
    B, H, T, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide)
    if k.shape[2] <= keys and sinks is None and not isinstance(mask, str):  # as when decoding: one block, one softmax
        scores = scoring.scores(q, k.block(0, k.shape[2], wide), mask)
        return _mixed(scores.softmax(-1), v.block(0, k.shape[2], wide))
    top = torch.full((B, H, T, 1), torch.finfo(wide).min, dtype=wide, device=q.device)
    total = torch.zeros_like(top)
    if sinks is not None:
        top, total = sinks.to(wide).view(1, H, 1, 1).expand(B, H, T, 1), total + 1
    mixed = q.new_zeros(B, H, T, v.shape[3])
    causal = isinstance(mask, str)
    last = first + T if causal else k.shape[2]
    for start in range(0, last, keys):
        end = min(last, start + keys)
        own = _causal(first, T, start, end, q.device) if causal else None
        if isinstance(mask, Tensor):
            own = mask[..., start:end]
        scores = scoring.scores(q, k.block(start, end, wide), own)
        newest = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = scores.sub_(newest).exp_()
        shrunk = (top - newest).exp_()
        total = total * shrunk + weights.sum(-1, keepdim=True)
        mixed = mixed.mul_(shrunk).add_(_mixed(weights, v.block(start, end, wide)))
        top = newest
    return mixed / total


def _causal(first: int, tokens: int, start: int, end: int, device: torch.device) -> Tensor:
    places = torch.arange(start, end, device=device)
    return places <= torch.arange(first, first + tokens, device=device)[:, None]


def _mixed(weights_BHTS: Tensor, v: Block) -> Tensor:
    """Returns weights times values (B, H, T, V), the values' scales applied to the weights."""
    B, H, T, S = weights_BHTS.shape
    K = v.codes.shape[1]
    weights = weights_BHTS.view(B, K, -1, S)
    scaled = weights if v.scale is None else weights * v.scale.transpose(-1, -2)
    mixed = scaled @ v.codes
    if v.low is not None:
        mixed += weights @ v.low
    return mixed.view(B, H, T, -1)

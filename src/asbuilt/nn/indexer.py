"""Choosing the keys that an attention attends to.

Shapes: batch B, new tokens T, keys S, model width M, width of the queries' latent R, heads H, width D.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asbuilt.kernels.indexer import index_scores, largest
from asbuilt.kernels.rotary import rotate
from asbuilt.nn.cache import KVCache
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.masks import AttentionPattern, seen_keys
from asbuilt.nn.positions import rope_tables
from asbuilt.nn.registry import computes, optional
from asbuilt.nn.step import Step
from asbuilt.spec import indexer as spec


@computes(spec.Indexer)
class Indexer(PartModule):
    """Chooses the keys of largest index scores, and leaves the choice in the step for the layers after it."""

    q: Linear
    k: Linear
    weigh: Linear

    def __init__(self, part: spec.Indexer, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.k_norm = optional(part.k_norm, f"{path}.k_norm")

    @torch.no_grad()
    def forward(self, x_BTM: Tensor, latent_BTR: Tensor, step: Step) -> None:
        """Caches the new tokens' keys, and sets the step's `choice`: (B, T, S), None if all keys are attended to."""
        part = self.part
        step.choice = None
        chooses, layer = max(step.lengths) > part.top_k, None
        if step.cache is not None:
            layer = step.cache.layer(self.path, KVCache)
        if not chooses and layer is None:
            return
        k_BTD = self.keys(x_BTM, step)
        if layer is not None:
            (joined,) = layer.update((k_BTD[:, None],), step)
            k_BTD = joined[:, 0]
        if not chooses:
            return
        weight_BTH = self.weigh(x_BTM) * part.scale
        scores_BTS = index_scores(self.queries(latent_BTR, step), k_BTD, weight_BTH)
        positions = step.key_positions_BT if layer is None else layer.positions(step)
        seen = step.once(("seen", layer is None), lambda: seen_keys(step, AttentionPattern(), positions))
        step.choice = largest(scores_BTS.masked_fill_(~seen, -torch.inf), part.top_k)

    def keys(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns the new tokens' keys (B, T, D), normalised and with RoPE applied."""
        k_BTD = self.k(x_BTM)
        return self.turned((k_BTD if self.k_norm is None else self.k_norm(k_BTD))[:, :, None], step)[:, :, 0]

    def queries(self, latent_BTR: Tensor, step: Step) -> Tensor:
        """Returns the queries (B, T, H, D) with RoPE applied."""
        return self.turned(self.q(latent_BTR).unflatten(-1, (self.part.n_heads, self.part.d_head)), step)

    def turned(self, heads: Tensor, step: Step) -> Tensor:
        """Returns heads with RoPE applied."""
        rotary = self.part.positions
        return heads if rotary is None else rotate(heads, rope_tables(step, rotary, heads.dtype), rotary.pairing)


@computes(spec.SharedChoice)
class SharedChoice(nn.Module):
    """Leaves the step's choice as the last indexer made it."""

    def __init__(self, part: spec.SharedChoice, path: str) -> None:
        super().__init__()
        self.part = part

    def forward(self, x_BTM: Tensor, latent_BTR: Tensor | None, step: Step) -> None:
        """Changes nothing."""

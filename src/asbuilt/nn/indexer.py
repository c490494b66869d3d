"""Choosing the keys that an attention attends to.

Shapes: batch B, new tokens T, keys S, model width M, width of the queries' latent R, heads H, width D.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asbuilt.kernels.indexer import block_scores, chosen_blocks, index_scores, largest
from asbuilt.kernels.rotary import rotate
from asbuilt.nn.cache import KVCache
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.masks import AttentionPattern, seen_keys
from asbuilt.nn.norms import normed
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


@computes(spec.BlockIndexer)
class BlockIndexer(PartModule):
    """Chooses for each token and key head the blocks of keys with the largest scores."""

    q: Linear
    k: Linear

    def __init__(self, part: spec.BlockIndexer, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.q_norm, self.k_norm = (
            optional(norm, f"{path}.{name}") for name, norm in (("q_norm", part.q_norm), ("k_norm", part.k_norm))
        )

    @torch.no_grad()
    def forward(self, x_BTM: Tensor, step: Step) -> Tensor | None:
        """Caches the new tokens' keys; returns which keys are attended to, (B, H, T, S), None for all past ones."""
        part = self.part
        chooses, layer = max(step.lengths) > part.most_keys, None
        if step.cache is not None:
            layer = step.cache.layer(self.path, KVCache)
        if not chooses and layer is None:
            return None
        k_BTD = self.heads(self.k(x_BTM), self.k_norm, step)[:, :, 0]
        if layer is not None:
            (joined,) = layer.update((k_BTD[:, None],), step)
            k_BTD = joined[:, 0]
        if not chooses:
            return None
        q_BTHD = self.heads(self.q(x_BTM), self.q_norm, step)
        if layer is None and not step.uniform:
            return self._of_padded(q_BTHD, k_BTD, step)
        positions = step.key_positions_BT if layer is None else layer.positions(step)
        seen = step.once(("seen", layer is None), lambda: seen_keys(step, AttentionPattern(), positions))
        return self._chosen(q_BTHD, k_BTD, seen, step)

    def _chosen(self, q_BTHD: Tensor, k_BSD: Tensor, seen_BTS: Tensor, step: Step) -> Tensor:
        """Returns the choice among keys that are in the order of their positions, from 0 on."""
        part = self.part
        scores = block_scores(q_BTHD, k_BSD, seen_BTS.expand(q_BTHD.shape[0], -1, -1), part.block)
        own = (step.positions_BT // part.block).clamp(0, scores.shape[-1] - 1)
        chosen = chosen_blocks(scores, own, part.top_k, part.local)
        return chosen.repeat_interleave(part.block, -1)[..., : k_BSD.shape[1]].logical_and_(seen_BTS[:, None])

    def _of_padded(self, q_BTHD: Tensor, k_BTD: Tensor, step: Step) -> Tensor:
        """Returns the choice for texts with padding: made among keys in order, then put in their places."""
        places, T = step.key_positions_BT, step.tokens
        into = torch.where(places < 0, T, places)[:, :, None].expand_as(k_BTD)
        ordered = k_BTD.new_zeros(k_BTD.shape[0], T + 1, k_BTD.shape[2]).scatter(1, into, k_BTD)[:, :T]
        slots = torch.arange(T, device=step.device)[None]
        seen = seen_keys(step, AttentionPattern(), torch.where(slots < step.lengths_B1, slots, -1))
        chosen = self._chosen(q_BTHD, ordered, seen, step)
        found = places.clamp(min=0)[:, None, None].expand_as(chosen)
        chosen = chosen.gather(-1, found) & (places >= 0)[:, None, None]
        chosen[..., 0] |= ~chosen.any(-1)  # padding may attend to nothing, and the softmax of nothing is NaN
        return chosen

    def heads(self, x_BTC: Tensor, norm: nn.Module | None, step: Step) -> Tensor:
        """Returns heads (B, T, any, D), normalised and with RoPE applied."""
        heads, rotary = normed(norm, x_BTC.unflatten(-1, (-1, self.part.d_head))), self.part.positions
        return heads if rotary is None else rotate(heads, rope_tables(step, rotary, heads.dtype), rotary.pairing)


@computes(spec.SharedChoice)
class SharedChoice(nn.Module):
    """Leaves the step's choice as the last indexer made it."""

    def __init__(self, part: spec.SharedChoice, path: str) -> None:
        super().__init__()
        self.part = part

    def forward(self, x_BTM: Tensor, latent_BTR: Tensor | None, step: Step) -> None:
        """Changes nothing."""

"""Attention to the last tokens and to entries of earlier blocks, with both in the cache.

Shapes: batch B, new tokens T, keys S, entries E, blocks N, model width M, heads H, head width D, groups G, width of kv
and gate W.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.attention import attend
from asbuilt.kernels.compressed import compress
from asbuilt.kernels.indexer import index_scores, largest, places
from asbuilt.kernels.rotary import RopeTables, rotate_tail, tables
from asbuilt.nn.cache import CACHES, LayerCache, RingCache
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.masks import AttentionPattern, seen_keys
from asbuilt.nn.positions import rope_tables
from asbuilt.nn.registry import computes, optional
from asbuilt.nn.step import Step
from asbuilt.spec import compressed as spec
from asbuilt.spec.part import Remembered
from asbuilt.spec.positions import Rotary


class Blocks(NamedTuple):
    """kv and gate of the tokens of blocks that are now full: each row's from its block `first_B` on, `full` of them.

    Both (B, N * ratio, W); with overlap after those of the block before. Rows may have fewer full blocks.
    """

    kv: Tensor
    gate: Tensor
    first_B: Tensor
    full: int


class EntryCache(LayerCache):
    """Entries (B, 1, blocks, D), and kv and gate of the last tokens (B, 1, open tokens, 2 W), at their positions."""

    def __init__(
        self, remembered: tuple[Remembered, ...], batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.tensors = [
            torch.zeros(batch, 1, r.tokens_kept(capacity), r.shape[1], dtype=dtype, device=device) for r in remembered
        ]

    @property
    def rings(self) -> list[Tensor] | None:
        """kv and gate of the last tokens; entries of blocks that are no longer full are made again."""
        return self.tensors[1:]

    def open(self, places_BS: Tensor) -> Tensor:
        """Returns kv and gate (B, S, 2 W) of tokens at these positions, which are among the last."""
        held = self.tensors[1][:, 0]
        index = (places_BS % held.shape[1])[:, :, None].expand(held.shape[0], -1, held.shape[2])
        return held.gather(1, index)

    def store(self, both_BTW: Tensor, step: Step) -> None:
        """Stores kv and gate of the last of the new tokens."""
        held = self.tensors[1][:, 0]
        if step.uniform:
            kept = min(step.tokens, held.shape[1])
            end = step.lengths[0]
            held[:, torch.arange(end - kept, end, device=held.device) % held.shape[1]] = both_BTW[
                :, step.tokens - kept :
            ]
            return
        kept = (step.key_positions_BT >= step.lengths_B1 - held.shape[1]) & (step.key_positions_BT >= 0)
        row, t = kept.nonzero(as_tuple=True)
        held[row, step.positions_BT[row, t] % held.shape[1]] = both_BTW[row, t]

    def append(self, made_BND: Tensor, first_B: Tensor, step: Step, ratio: int) -> Tensor:
        """Stores the new entries, and returns all."""
        held = self.tensors[0][:, 0]
        if step.uniform:
            first = step.past[0] // ratio
            held[:, first : first + made_BND.shape[1]] = made_BND
            return held[:, : step.lengths[0] // ratio]
        number_BN = first_B[:, None] + torch.arange(made_BND.shape[1], device=first_B.device)
        row, n = (number_BN < step.lengths_B1 // ratio).nonzero(as_tuple=True)
        held[row, number_BN[row, n]] = made_BND[row, n]
        return held[:, : max(step.lengths) // ratio]


CACHES[spec.Compressor] = EntryCache


@computes(spec.Compressor)
class Compressor(PartModule):
    """Entries of full blocks."""

    kv: Linear
    gate: Linear
    bias: Tensor

    def __init__(self, part: spec.Compressor, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.norm = optional(part.norm, f"{path}.norm")

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns the entries (B, E, D) of all blocks that are full after the pass; rows may have fewer."""
        part = self.part
        layer = None if step.cache is None else step.cache.layer(self.path, EntryCache)
        blocks = self.blocks(self.kv(x_BTM), self.gate(x_BTM), step, layer)
        made = self.entries(blocks, step) if blocks.full else blocks.kv.new_zeros(len(x_BTM), 0, part.d_head)
        if layer is None:
            return made[:, : max(step.lengths) // part.ratio]
        return layer.append(made, blocks.first_B, step, part.ratio)

    def entries(self, blocks: Blocks, step: Step) -> Tensor:
        """Returns the entries of the blocks (B, N, D)."""
        kv, gate = (y.unflatten(1, (-1, self.part.ratio)) for y in (blocks.kv, blocks.gate))
        made = compress(kv, gate, self.bias, blocks.first_B, self.part.overlap)
        return self.placed(made if self.norm is None else self.norm(made), blocks, step)

    def placed(self, made_BND: Tensor, blocks: Blocks, step: Step) -> Tensor:
        """Returns entries with RoPE applied, at the positions of their blocks' first tokens."""
        rotary, ratio = self.part.positions, self.part.ratio
        if rotary is None:
            return made_BND

        def turn() -> RopeTables:
            number_BN = blocks.first_B[:, None] + torch.arange(blocks.full, device=step.device)
            return tables(rotary, number_BN * ratio, step.reach, made_BND.dtype)

        found = step.once((rotary, ratio, made_BND.dtype), turn)
        return rotate_tail(made_BND[:, :, None], found, rotary.pairing)[:, :, 0]

    def blocks(self, kv_BTW: Tensor, gate_BTW: Tensor, step: Step, layer: EntryCache | None) -> Blocks:
        """Returns kv and gate of full blocks, of cached and of new tokens; stores the new ones."""
        ratio, lead = self.part.ratio, self.part.open_tokens - self.part.ratio
        both = torch.cat((kv_BTW, gate_BTW), -1)
        rows = step.past[:1] if step.uniform else step.past
        first_B = torch.tensor([past // ratio for past in rows], device=step.device)
        if step.uniform:
            count = step.lengths[0] // ratio - step.past[0] // ratio
            found = self.after_old(both, step.past[0] % ratio + lead, step, layer)[:, : lead + count * ratio]
        else:
            count = (ratio - 1 + step.tokens) // ratio
            found = self.by_row(both, first_B * ratio - lead, lead + count * ratio, step, layer)
        if layer is not None:
            layer.store(both, step)
        kv, gate = found.chunk(2, -1)
        return Blocks(kv, gate, first_B, count)

    def after_old(self, both_BTW: Tensor, old: int, step: Step, layer: EntryCache | None) -> Tensor:
        """Returns the new tokens after `old` ones, which are zeros before the text."""
        if not old:
            return both_BTW
        if layer is None or not step.past[0]:
            return F.pad(both_BTW, (0, 0, old, 0))
        places = step.past[0] - old + torch.arange(old, device=step.device)[None]
        return torch.cat((layer.open(places.clamp(min=0)), both_BTW), 1)

    def by_row(self, both_BTW: Tensor, start_B: Tensor, size: int, step: Step, layer: EntryCache | None) -> Tensor:
        """Returns (B, size, 2 W): each row's tokens from its own position `start_B` on, zeros where there is none."""
        found = both_BTW.new_zeros(len(both_BTW), size, both_BTW.shape[-1])
        if layer is not None:
            places_BS = start_B[:, None] + torch.arange(size, device=step.device)
            past = (places_BS >= 0) & (places_BS < step.past_B1)
            found = torch.where(past[:, :, None], layer.open(places_BS.clamp(min=0)), found)
        index_BT = step.positions_BT - start_B[:, None]
        row, t = ((step.key_positions_BT >= 0) & (index_BT < size)).nonzero(as_tuple=True)
        return found.index_put((row, index_BT[row, t]), both_BTW[row, t])


@computes(spec.EntryIndexer)
class EntryIndexer(PartModule):
    """Chooses entries by index scores."""

    q: Linear
    weigh: Linear

    def __init__(self, part: spec.EntryIndexer, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.compressor = Compressor(part.compressor, f"{path}.compressor")

    @torch.no_grad()
    def forward(self, x_BTM: Tensor, latent_BTR: Tensor, past_BTE: Tensor, step: Step) -> Tensor | None:
        """Returns the chosen ones of the past entries, (B, T, E); None for all of them."""
        part, rotary = self.part, self.part.compressor.positions
        keys_BED = self.compressor(x_BTM, step)
        if keys_BED.shape[1] <= part.top_k:
            return None
        q_BTHD = self.q(latent_BTR).unflatten(-1, (part.n_heads, part.d_head))
        if rotary is not None:
            q_BTHD = rotate_tail(q_BTHD, rope_tables(step, rotary, q_BTHD.dtype), rotary.pairing)
        scores_BTE = index_scores(q_BTHD, keys_BED, self.weigh(x_BTM) * part.scale)
        return largest(scores_BTE.masked_fill_(~past_BTE, -torch.inf), part.top_k)


@computes(spec.CompressedAttention)
class CompressedAttention(PartModule):
    """softmax(q k^T / sqrt(d_head)) k over the last tokens and past entries, with a sink."""

    q_down: Linear
    q_up: Linear
    kv: Linear
    o_up: Linear
    o_down: Tensor
    sinks: Tensor

    def __init__(self, part: spec.CompressedAttention, path: str) -> None:
        super().__init__(part, path)
        self.part, self.pattern = part, AttentionPattern(window=part.window)
        self.q_norm, self.head_norm, self.kv_norm, self.compressor, self.indexer = (
            optional(getattr(part, name), f"{path}.{name}")
            for name in ("q_norm", "head_norm", "kv_norm", "compressor", "indexer")
        )

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        part = self.part
        latent_BTR = self.q_down(x_BTM)
        latent_BTR = latent_BTR if self.q_norm is None else self.q_norm(latent_BTR)
        q_BTHD = self.q_up(latent_BTR).unflatten(-1, (part.n_heads, part.d_head))
        q_BTHD = self.turned(q_BTHD if self.head_norm is None else self.head_norm(q_BTHD), step)
        k_BTD = self.kv(x_BTM)
        k_BTD = self.turned((k_BTD if self.kv_norm is None else self.kv_norm(k_BTD))[:, :, None], step)[:, :, 0]
        keys_BSD, mask = self.keys(k_BTD, step)
        if self.compressor is not None:
            keys_BSD, mask = self.with_entries(keys_BSD, mask, x_BTM, latent_BTR, step)
        keys = keys_BSD[:, None]
        y_BHTD = attend(
            q_BTHD.transpose(1, 2),
            keys,
            keys,
            None if mask is None else mask[:, None],
            scale=part.d_head**-0.5,
            sinks=self.sinks,
            kernel=step.kernel,
        )
        return self.output(self.turned(y_BHTD.transpose(1, 2), step, back=True))

    def keys(self, k_BTD: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """Returns the keys of the window (B, S, D) and the mask (B or 1, T, S), None where all are attended to."""
        layer = None if step.cache is None else step.cache.layer(self.path, RingCache)
        if layer is not None:
            (joined,) = layer.update((k_BTD[:, None],), step)
            k_BTD = joined[:, 0]
        if step.uniform and step.tokens == 1:
            return k_BTD, None

        def seen() -> Tensor:
            places = step.key_positions_BT if layer is None else layer.positions(step)
            return seen_keys(step, self.pattern, places)

        return k_BTD, step.once(("window", self.pattern), seen)

    def with_entries(
        self, keys_BSD: Tensor, mask: Tensor | None, x_BTM: Tensor, latent_BTR: Tensor, step: Step
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the keys of window and entries, and the mask of both."""
        compressor, indexer = self.part.compressor, self.part.indexer
        assert compressor is not None
        assert self.compressor is not None
        entries_BED = self.compressor(x_BTM, step)
        numbers = torch.arange(entries_BED.shape[1], device=step.device)
        past_BTE = numbers < ((step.positions_BT + 1) // compressor.ratio)[:, :, None]
        chosen_BTE = None if self.indexer is None else self.indexer(x_BTM, latent_BTR, past_BTE, step)
        if indexer is not None and chosen_BTE is not None and step.tokens == 1:
            index_Bk, there_Bk = (y[:, 0] for y in places(chosen_BTE, indexer.top_k))
            entries_BED = entries_BED.gather(1, index_Bk[:, :, None].expand(-1, -1, entries_BED.shape[-1]))
            past_BTE = there_Bk[:, None]
        elif chosen_BTE is not None:
            past_BTE = chosen_BTE
        joined = torch.cat((keys_BSD, entries_BED), 1)
        if mask is None:
            return joined, None
        rows = max(len(mask), len(past_BTE))
        return joined, torch.cat((mask.expand(rows, -1, -1), past_BTE.expand(rows, -1, -1)), -1)

    def output(self, y_BTHD: Tensor) -> Tensor:
        """Returns (B, T, M): each group of heads mapped, and all of them back to the stream."""
        part, (B, T) = self.part, y_BTHD.shape[:2]
        grouped = y_BTHD.reshape(B * T, part.groups, -1).transpose(0, 1)
        maps = self.o_down.view(part.groups, part.o_rank, -1).transpose(1, 2)
        return self.o_up(torch.bmm(grouped, maps).transpose(0, 1).reshape(B, T, -1))

    def turned(self, heads: Tensor, step: Step, *, back: bool = False) -> Tensor:
        """Returns heads (B, T, any, D) with RoPE applied to their last numbers, or undone."""
        rotary: Rotary | None = self.part.positions
        if rotary is None:
            return heads
        turn = rope_tables(step, rotary, heads.dtype)
        if back:
            turn = step.once((rotary, heads.dtype, "back"), lambda: RopeTables(turn.cos, -turn.sin))
        return rotate_tail(heads, turn, rotary.pairing)

"""What all layers share in one forward pass: where each token stands, which keys it may see, the rotary tables."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.attention import Mask
from asbuilt.kernels.relative import buckets
from asbuilt.kernels.rotary import RopeTables, tables, widest
from asbuilt.spec.part import Kernel
from asbuilt.spec.positions import Alibi, QueryTemperature, RelativeBuckets, Rotary

if TYPE_CHECKING:
    from asbuilt.generate.cache import Cache


class AttentionPattern(NamedTuple):
    """Which keys a layer's tokens see, and what their distance adds to the scores: by slope, or by learned bucket."""

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    alibi: Alibi | None = None
    relative: RelativeBuckets | None = None

    @property
    def reach(self) -> int | None:
        """How many tokens the layer's cache keeps."""
        return self.window if self.chunk is None else self.chunk


class Step:
    """One forward pass over (B, T) tokens, `past[b]` of row b's tokens already cached.

    `valid_BT` marks real tokens; None says that every token is real. A row's tokens are numbered by counting its real
    ones, and a cached key lies at its own position, so padding on either side changes nothing for the others.
    `reach` is how long each row's text is taken to be by rotary positions that ask: as long as it is after this pass,
    unless more of it is known to come.
    `types_BT` are the tokens' types where they have other than 0. A stack may lend its layers `relative_BH`, the
    numbers of its relative buckets, and `table_VM`, vectors of tokens; `source_BSM` is what an encoder made, None once
    the layers remember it, `source_mask` tells its real tokens.
    `images_NPM` take the places of tokens; `ends_BT` is the last position that each token sees, where that is not its
    own.
    """

    types_BT: Tensor | None = None
    relative_BH: Tensor | None = None
    table_VM: Tensor | None = None
    source_BSM: Tensor | None = None
    source_mask: Mask = None
    images_NPM: Tensor | None = None
    ends_BT: Tensor | None = None

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        *,
        past: tuple[int, ...] | None = None,
        valid_BT: Tensor | None = None,
        cache: Cache | None = None,
        kernel: Kernel = "fused",
        reach: tuple[int, ...] | None = None,
    ) -> None:
        self._reach = reach
        self.batch, self.tokens = shape
        self.past = past or (0,) * self.batch
        self.valid_BT, self.cache, self.device = valid_BT, cache, device
        self.kernel: Kernel = kernel
        self._rope_tables: dict[tuple[Rotary, torch.dtype], RopeTables] = {}
        self._masks: dict[AttentionPattern, Mask] = {}
        self._sinusoids: dict[tuple[int, torch.dtype], Tensor] = {}
        self._temperatures: dict[tuple[QueryTemperature, torch.dtype], Tensor] = {}

    @cached_property
    def uniform(self) -> bool:
        """Whether all rows stand at the same place, so that no mask by row is needed."""
        return self.valid_BT is None and len(set(self.past)) == 1

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row once this pass is done."""
        if self.valid_BT is None:
            return tuple(n + self.tokens for n in self.past)
        return tuple(n + m for n, m in zip(self.past, self.valid_BT.sum(1).tolist(), strict=True))

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Tokens that each row's text is taken to have, no fewer than `lengths`."""
        return self.lengths if self._reach is None else tuple(map(max, self._reach, self.lengths))

    @cached_property
    def past_B1(self) -> Tensor:
        """`past` as a column."""
        return torch.tensor(self.past, device=self.device)[:, None]

    @cached_property
    def lengths_B1(self) -> Tensor:
        """`lengths` as a column."""
        return torch.tensor(self.lengths, device=self.device)[:, None]

    @cached_property
    def positions_BT(self) -> Tensor:
        """Each token's place in its row, (1, T) when all rows agree; padding stands at the nearest real place."""
        if self.uniform:
            return torch.arange(self.past[0], self.past[0] + self.tokens, device=self.device)[None]
        if self.valid_BT is None:
            return self.past_B1 + torch.arange(self.tokens, device=self.device)
        return (self.past_B1 + self.valid_BT.cumsum(1) - 1).clamp(min=0)

    @cached_property
    def key_positions_BT(self) -> Tensor:
        """`positions_BT` with -1 for padding, as a key that nobody sees."""
        return self.positions_BT if self.valid_BT is None else self.positions_BT.masked_fill(~self.valid_BT, -1)

    def turn(self, rotary: Rotary, dtype: torch.dtype) -> RopeTables:
        """Returns the rotary tables for this pass's tokens, made once for all layers."""
        key = (rotary, dtype)
        if key not in self._rope_tables:
            self._rope_tables[key] = tables(rotary, self.positions_BT, self.reach, dtype)
        return self._rope_tables[key]

    def temperature(self, part: QueryTemperature, dtype: torch.dtype) -> Tensor:
        """Returns what each token's queries are multiplied by, (B or 1, T, 1, 1), made once for all layers."""
        if (part, dtype) not in self._temperatures:
            steps = torch.floor((self.positions_BT + 1).float() / part.floor)
            self._temperatures[part, dtype] = (1 + part.scale * torch.log1p(steps)).to(dtype)[:, :, None, None]
        return self._temperatures[part, dtype]

    @cached_property
    def distances(self) -> tuple[Tensor, Tensor]:
        """How far before each query each key lies, and which keys are hidden, both (B or 1, T, S); no window."""
        behind = self.positions_BT[:, :, None] - self.keys(None)[:, None, :]
        return behind.clamp(0, max(self.lengths) - 1), ~self._seen(AttentionPattern())

    def sinusoids(self, width: int, dtype: torch.dtype) -> Tensor:
        """Returns sines and then cosines of every distance up to the longest row (L, width), made once for all layers.

        Distance d and pair i have the angle d / 10000^(2i / width).
        """
        if (width, dtype) not in self._sinusoids:
            pairs = torch.arange(0, width, 2, device=self.device, dtype=widest(self.device))
            angles = torch.arange(max(self.lengths), device=self.device)[:, None] / 10000 ** (pairs / width)
            self._sinusoids[width, dtype] = torch.cat((angles.sin(), angles.cos()), -1).to(dtype)
        return self._sinusoids[width, dtype]

    def keys(self, window: int | None) -> Tensor:
        """Returns the positions (B or 1, S) of the keys a layer with this window multiplies, -1 where there is none."""
        if self.cache is None or (self.uniform and self.past[0] == 0 and (window is None or self.tokens > 1)):
            return self.key_positions_BT
        if window is None:
            slots = torch.arange(max(self.lengths), device=self.device)[None]
            return slots if self.uniform else torch.where(slots < self.lengths_B1, slots, -1)
        if self.tokens == 1:
            return self._ring(window, self.lengths)
        return torch.cat(
            (self._ring(window, self.past).expand(self.positions_BT.shape[0], -1), self.key_positions_BT), 1
        )

    def _ring(self, window: int, lengths: tuple[int, ...]) -> Tensor:
        """The position in each slot of a ring that has taken `lengths` tokens: the newest that falls on the slot."""
        rows = lengths[:1] if self.uniform else lengths
        last = torch.tensor(rows, device=self.device)[:, None] - 1
        slots = torch.arange(min(max(lengths), window), device=self.device)[None]
        return (last - (last - slots) % window).clamp(min=-1)

    def mask(self, pattern: AttentionPattern, dtype: torch.dtype) -> Mask:
        """Returns which keys each token sees, made once for all layers of the same pattern."""
        if pattern not in self._masks:
            self._masks[pattern] = self._mask(pattern, dtype)
        return self._masks[pattern]

    def _mask(self, pattern: AttentionPattern, dtype: torch.dtype) -> Mask:
        near = pattern.reach is None or self.tokens <= pattern.reach
        distant = pattern.alibi is not None or pattern.relative is not None
        ahead = self.ends_BT is not None and pattern.causal
        if self.uniform and not distant and not ahead:
            if self.tokens == 1 and pattern.chunk is None:
                return None  # the cache holds no more than the window, and all of it came before
            if not pattern.causal and near:
                return None
            if self.past[0] == 0 and near:
                return "causal"
        seen = self._seen(pattern)
        if pattern.relative is not None:
            every = self.uniform and near and pattern.chunk is None and (self.tokens == 1 or not pattern.causal)
            return self._relative(pattern, pattern.relative, None if every else ~seen[:, None])
        if pattern.alibi is None:
            return seen[:, None]
        keys = self.keys(pattern.reach)
        distance = (self.positions_BT[:, :, None] - keys[:, None, :]).abs()
        slopes = torch.tensor(pattern.alibi.slopes, dtype=torch.float32, device=self.device)
        bias = -slopes[:, None, None] * distance[:, None]
        return bias.masked_fill_(~seen[:, None], -torch.inf).to(dtype)

    def _relative(self, pattern: AttentionPattern, part: RelativeBuckets, hidden: Tensor | None) -> Tensor:
        """(B or 1, H, T, S): the stack's number for each head and distance, -inf where the key is hidden."""
        assert self.relative_BH is not None, "the stack has no numbers for its buckets"
        ahead = self.keys(pattern.reach)[:, None, :] - self.positions_BT[:, :, None]
        bias = F.embedding(buckets(part, ahead), self.relative_BH).permute(0, 3, 1, 2)
        return bias if hidden is None else bias.masked_fill(hidden, -torch.inf)

    def _seen(self, pattern: AttentionPattern) -> Tensor:
        """(B or 1, T, S), True where the key is seen."""
        queries, keys = self.positions_BT[:, :, None], self.keys(pattern.reach)[:, None, :]
        distance = queries - keys
        ends = queries if self.ends_BT is None else self.ends_BT[:, :, None]
        seen = (keys >= 0) & (keys <= ends if pattern.causal else torch.ones_like(distance, dtype=torch.bool))
        if pattern.window is not None:  # what lies ahead and is seen all the same is seen however far it is
            seen &= (distance if pattern.causal else distance.abs()) < pattern.window
        if pattern.chunk is not None:
            seen &= queries // pattern.chunk == keys // pattern.chunk
        # padding may see nothing, and softmax over nothing is not a number: let it look at the first key
        seen[:, :, 0] |= ~seen.any(-1)
        return seen

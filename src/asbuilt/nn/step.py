"""What all layers share in one forward pass: where each token stands, which keys it may see, the rotary tables."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asbuilt.kernels.attention import Mask
from asbuilt.kernels.rotary import Turn, tables
from asbuilt.spec.part import Kernel
from asbuilt.spec.positions import Rotary

if TYPE_CHECKING:
    from asbuilt.generate.cache import Cache


class Step:
    """One forward pass over (B, T) tokens, `past[b]` of row b's tokens already cached.

    `valid_BT` marks real tokens; None says that every token is real. A row's tokens are numbered by counting its real
    ones, and a cached key lies at its own position, so padding on either side changes nothing for the others.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        *,
        past: tuple[int, ...] | None = None,
        valid_BT: Tensor | None = None,
        cache: Cache | None = None,
        kernel: Kernel = "fused",
    ) -> None:
        self.batch, self.tokens = shape
        self.past = past or (0,) * self.batch
        self.valid_BT, self.cache, self.device = valid_BT, cache, device
        self.kernel: Kernel = kernel
        self._turns: dict[tuple[Rotary, torch.dtype], Turn] = {}
        self._masks: dict[int | None, Mask] = {}

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

    def turn(self, rotary: Rotary, dtype: torch.dtype) -> Turn:
        """Returns the rotary tables for this pass's tokens, made once for all layers."""
        key = (rotary, dtype)
        if key not in self._turns:
            self._turns[key] = tables(rotary, self.positions_BT, self.lengths, dtype)
        return self._turns[key]

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

    def mask(self, window: int | None) -> Mask:
        """Returns which keys each token sees, made once for all layers of the same window."""
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return self._masks[window]

    def _mask(self, window: int | None) -> Mask:
        if self.uniform and self.tokens == 1:
            return None  # the cache holds no more than the window, and all of it came before
        if self.uniform and self.past[0] == 0 and (window is None or self.tokens <= window):
            return "causal"
        distance = self.positions_BT[:, :, None] - self.keys(window)[:, None, :]
        seen = (distance >= 0) & (self.keys(window)[:, None, :] >= 0)
        if window is not None:
            seen &= distance < window
        # padding may see nothing, and softmax over nothing is not a number: let it look at the first key
        seen[:, :, 0] |= ~seen.any(-1)
        return seen[:, None]

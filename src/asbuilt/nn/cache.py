"""Caches: one object per layer, allocated from what the part declares to remember, so its bytes are as predicted.

Keys and values may be held in fewer bits than are computed with (`kernels.codes`): a layer then attends to what is
stored, its new tokens too, so that a pass of one token, of several and of all agree. States are never codes.

Regardless of padding, a token is stored at its own position in its row. If RoPE frequencies depend on the text's
length, the token ids are stored too (8 bytes per token, not counted by `nbytes`, since they are input rather than
activations), so that the cache can be recomputed when the frequencies change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

import torch
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.kernels.codes import Code, Coded, code, expanded
from asbuilt.nn.registry import registered
from asbuilt.nn.step import Step
from asbuilt.spec.part import Part, Remembered, walk
from asbuilt.spec.positions import rotaries_by_length

L = TypeVar("L", bound="LayerCache")


def _dtype(r: Remembered, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of what is remembered, in a cache of `dtype`."""
    return dtype if r.dtype is None else torch.promote_types(dtype, getattr(torch, r.dtype))


class LayerCache:
    """The cache of one layer: tensors whose first dimension is the batch."""

    tensors: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def row(self, row: int) -> Self:
        """Returns one row, sharing memory."""
        alone = copy(self)
        alone.tensors = [tensor[row : row + 1] for tensor in self.tensors]
        return alone

    def keep(self, rows: list[int]) -> None:
        """Drops all other rows."""
        self.tensors = [tensor[rows] for tensor in self.tensors]

    @property
    def rings(self) -> list[Tensor] | None:
        """The tensors (B, heads, slots, width) in which new tokens take the places of earlier ones, [] for none.

        Other tensors change only beyond the tokens so far; None if every tensor changes as a whole.
        """
        return None


class CodedCache(LayerCache):
    """A layer's cache whose tensors are (B, heads, slots, width), or rows of codes of as many numbers."""

    def __init__(
        self,
        remembered: tuple[Remembered, ...],
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        code: Code | None = None,
    ) -> None:
        self.code, self.dtype, self.widths = code, dtype, [r.width for r in remembered]
        # zeros: a masked slot is still multiplied by zero, and zero times garbage may be NaN
        self.tensors = [
            torch.zeros(batch, r.shape[0], self._slots_of(r, capacity), *size, dtype=held, device=device)
            for r, (size, held) in ((r, self._rows(r, dtype)) for r in remembered)
        ]

    def _slots_of(self, r: Remembered, capacity: int) -> int:
        return r.tokens_kept(capacity)

    def _rows(self, r: Remembered, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        """Returns the shape and dtype of what is stored of one token and head."""
        if self.code is None:
            return r.shape[1:], _dtype(r, dtype)
        return (*r.shape[1:-1], self.code.row_size(r.width)), self.code.dtype

    def packed(self, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns the tensors as they are stored."""
        return new if self.code is None else tuple(self.code.pack(x) for x in new)

    def read_as(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor | Coded, ...]:
        """Returns stored tensors with what is needed to read them."""
        if self.code is None:
            return tensors
        return tuple(Coded(x, self.code, width, self.dtype) for x, width in zip(tensors, self.widths, strict=True))


class KVCache(CodedCache):
    """A layer's cache of all tokens, each tensor (B, heads, slots, width); a key is stored at its position."""

    def update(self, new: tuple[Tensor, ...], step: Step) -> tuple[Tensor, ...]:
        """Stores the tokens' tensors (B, heads, T, width) and returns all that the layer attends to, new ones too.

        The result is in the order of `positions`. Codes are expanded, all of them.
        """
        return tuple(expanded(x) for x in self.attended(new, step))

    def attended(self, new: tuple[Tensor, ...], step: Step) -> tuple[Tensor | Coded, ...]:
        """See `update`; codes are left as they are, except those of a first pass, which are no more than `new`."""
        found = self.read_as(self._update(self.packed(new), step))
        return tuple(expanded(x) for x in found) if step.first and step.tokens > 1 else found

    def _update(self, new: tuple[Tensor, ...], step: Step) -> tuple[Tensor, ...]:
        """Stores the tokens' tensors as they are and returns all that the layer attends to."""
        self._write(new, step)
        if step.first and step.tokens > 1:
            return new
        return tuple(tensor[:, :, : self._held(step.lengths)] for tensor in self.tensors)

    def positions(self, step: Step) -> Tensor:
        """Returns the positions (B or 1, S) of the keys of a pass, -1 for empty slots."""
        slots = torch.arange(max(step.lengths), device=step.device)[None]
        return slots if step.uniform else torch.where(slots < step.lengths_B1, slots, -1)

    @property
    def rings(self) -> list[Tensor] | None:
        """[], since every token has its own place."""
        return []

    def _held(self, lengths: tuple[int, ...]) -> int:
        return max(lengths)

    def _kept(self, step: Step) -> Tensor:
        """Returns which of a ragged pass's tokens (B, T) are written."""
        return step.key_positions_BT >= 0

    def _write(self, new: tuple[Tensor, ...], step: Step) -> None:
        if step.uniform:
            self._write_run(new, step.past[0], step.tokens)
            return
        if step.tokens == 1 and step.valid_BT is None:
            row_B = torch.arange(step.batch, device=step.device)
            slot_B = step.positions_BT[:, 0] % self.tensors[0].shape[2]
            for tensor, fresh in zip(self.tensors, new, strict=True):
                tensor[row_B, :, slot_B] = fresh[:, :, 0]
            return
        row, t = self._kept(step).nonzero(as_tuple=True)
        slot = step.positions_BT[row, t] % self.tensors[0].shape[2]
        for tensor, fresh in zip(self.tensors, new, strict=True):
            tensor[row, :, slot] = fresh[row, :, t]

    def _write_run(self, new: tuple[Tensor, ...], start: int, count: int) -> None:
        for tensor, fresh in zip(self.tensors, new, strict=True):
            tensor.narrow(2, start, count).copy_(fresh)


class RingCache(KVCache):
    """A layer's cache of the last `window` tokens; a key is stored at its position modulo the window."""

    def __init__(
        self,
        remembered: tuple[Remembered, ...],
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        code: Code | None = None,
    ) -> None:
        super().__init__(remembered, batch, capacity, dtype, device, code)
        assert remembered[0].window is not None
        self.window = remembered[0].window

    def _update(self, new: tuple[Tensor, ...], step: Step) -> tuple[Tensor, ...]:
        """Several tokens are appended to the cached ones."""
        if step.tokens == 1:
            return super()._update(new, step)
        everything = new
        if not step.first:
            held = self._held(step.past)
            everything = tuple(torch.cat((t[:, :, :held], n), 2) for t, n in zip(self.tensors, new, strict=True))
        self._write(new, step)
        return everything

    def positions(self, step: Step) -> Tensor:
        """See `KVCache.positions`: those in the ring, followed by those of several new tokens."""
        if step.tokens == 1:
            return self._slots(step, step.lengths, step.lengths_B1)
        if step.first:
            return step.key_positions_BT
        before = self._slots(step, step.past, step.past_B1)
        return torch.cat((before.expand(step.positions_BT.shape[0], -1), step.key_positions_BT), 1)

    @property
    def rings(self) -> list[Tensor] | None:
        """All tensors."""
        return self.tensors

    def _slots(self, step: Step, lengths: tuple[int, ...], lengths_B1: Tensor) -> Tensor:
        """Returns the position in each slot after `lengths` tokens: the newest one that maps to it."""
        last = (lengths_B1[:1] if step.uniform else lengths_B1) - 1
        slots = torch.arange(self._held(lengths), device=step.device)[None]
        return (last - (last - slots) % self.window).clamp(min=-1)

    def _held(self, lengths: tuple[int, ...]) -> int:
        return min(max(lengths), self.window)

    def _kept(self, step: Step) -> Tensor:
        # of the tokens that map to one slot only the last may be written
        return super()._kept(step) & (step.key_positions_BT >= step.lengths_B1 - self.window)

    def _write_run(self, new: tuple[Tensor, ...], start: int, count: int) -> None:
        slots = self.tensors[0].shape[2]
        if start + count <= slots:
            super()._write_run(new, start, count)
            return
        kept = min(count, slots)
        places = torch.arange(start + count - kept, start + count, device=new[0].device) % slots
        for tensor, fresh in zip(self.tensors, new, strict=True):
            tensor[:, :, places] = fresh[:, :, count - kept :]


class SourceCache(CodedCache):
    """A layer's cache of an encoder's source, each tensor (B, heads, S, width); its capacity is the source's."""

    def _slots_of(self, r: Remembered, capacity: int) -> int:
        return capacity

    @property
    def rings(self) -> list[Tensor] | None:
        """[], since the text's tokens change nothing."""
        return []

    def write(self, new: tuple[Tensor, ...]) -> None:
        """Stores the source's tensors."""
        for tensor, fresh in zip(self.tensors, self.packed(new), strict=True):
            tensor[:, :, : fresh.shape[2]].copy_(fresh)

    def read(self, tokens: int) -> tuple[Tensor | Coded, ...]:
        """Returns the stored tensors of a source of `tokens` tokens."""
        return self.read_as(tuple(tensor[:, :, :tokens] for tensor in self.tensors))


class StateCache(LayerCache):
    """A layer's state of a sequence, independent of its length, each tensor (B, *shape)."""

    def __init__(
        self, remembered: tuple[Remembered, ...], batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.tensors = [torch.zeros(batch, *r.shape, dtype=_dtype(r, dtype), device=device) for r in remembered]

    def read(self) -> tuple[Tensor, ...]:
        """Returns the current state, initially zeros."""
        return tuple(self.tensors)

    def write(self, new: tuple[Tensor, ...]) -> None:
        """Stores the state after a pass."""
        for tensor, fresh in zip(self.tensors, new, strict=True):
            tensor.copy_(fresh)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What is needed to drop up to `tokens` tokens that follow the `length` of a cache.

    `saved` are copies, by layer: of the places in rings that the tokens take, or of whole tensors. Then, unless
    `partly`, all tokens are dropped or none: a state cannot be taken back by single tokens.
    """

    length: int
    tokens: int
    partly: bool
    saved: dict[str, list[Tensor]]


# Arguments: what is remembered, rows, capacity, compute dtype, device; and a CodedCache's format, if not that dtype.
Makes = Callable[..., LayerCache]
# Caches of parts with their own cache class, by type of part.
CACHES: dict[type[Part], Makes] = {}


def usual_cache(remembered: tuple[Remembered, ...]) -> Makes:
    """Returns the constructor of the standard cache for what a layer remembers."""
    if remembered[0].of == "source":
        return SourceCache
    if remembered[0].per == "sequence":
        return StateCache
    return KVCache if remembered[0].window is None else RingCache


def _made(path: str, kind: type[Part], remembered: tuple[Remembered, ...], held: Code | None) -> Makes:
    """Returns what makes a layer's cache, with keys and values in codes if these are given."""
    registered(kind)  # imports its module, which may have a cache class of its own
    made = CACHES.get(kind, usual_cache(remembered))
    if held is None or made is StateCache:
        return made
    if not (isinstance(made, type) and issubclass(made, CodedCache)):
        raise InputError(
            f"{kind.__name__} at {path} holds its cache in the compute dtype alone",
            field="kv-dtype",
            value=held.name,
            fix="leave --kv-dtype out",
        )
    return partial(made, code=held)


def _remembering(spec: Part, path: str = "") -> Iterator[tuple[str, type[Part], tuple[Remembered, ...]]]:
    """Yields path, type and what it remembers, of every part that does."""
    for at, part in walk(spec, path):
        if remembered := part.remembers():
            yield at, type(part), remembered


def require_cache(spec: Part, kv: str, dtype: torch.dtype) -> None:
    """Raises InputError for an unknown format, or a layer that cannot hold its cache in it."""
    held = code(kv, dtype)
    for path, kind, remembered in _remembering(spec):
        _made(path, kind, remembered, held)


class Cache:
    """Every layer's cache by path, for `batch` rows of up to `capacity` tokens, and up to `source` encoder tokens.

    `dtype` is that of computing; keys and values are held in it, or in the format `kv`: a narrower float, or int8:head,
    fp8:head or int4:head, with scales for each token and head.
    `lengths[b]` is the number of row b's tokens so far; `source` None means `capacity`. A text that must be recomputed
    is processed in chunks of `chunk` tokens, None for all at once; `reread` counts recomputed tokens. `shifts[b]` is
    how far the coordinates of row b's next token are from its position, after images. `path` is that of `spec` in its
    model. Raises InputError if the capacity is exceeded.
    """

    def __init__(
        self,
        spec: Part,
        *,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        source: int | None = None,
        chunk: int | None = None,
        path: str = "",
        kv: str | None = None,
    ) -> None:
        self.chunk, self.reread = chunk, 0
        self.capacity, self.source_capacity = capacity, capacity if source is None else source
        self.lengths: tuple[int, ...] = (0,) * batch
        self.shifts = self.lengths
        self.source_tokens = 0
        self.source_valid_BS: Tensor | None = None
        device = torch.device(device)
        held = None if kv is None else code(kv, dtype)
        self.layers = {
            path: _made(path, kind, remembered, held)(
                remembered,
                batch,
                (remembered[0].n_source or self.source_capacity) if remembered[0].of == "source" else capacity,
                dtype,
                device,
            )
            for path, kind, remembered in _remembering(spec, path)
        }
        self.rotaries = rotaries_by_length(spec)
        # per row: the length that determined its keys' angles, 0 initially; its token ids, types and images
        self._rope_lengths: tuple[int, ...] = (0,) * batch
        self._text_BN = torch.zeros(batch, capacity if self.rotaries else 0, dtype=torch.long, device=device)
        self._types_BN: Tensor | None = None
        self._images: list[list[Tensor]] = [[] for _ in range(batch)]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' tensors."""
        return sum(layer.nbytes for layer in self.layers.values())

    def layer(self, path: str, kind: type[L]) -> L:
        """Returns the cache of the layer at a path, which must be of this kind."""
        found = self.layers[path]
        assert isinstance(found, kind), path
        return found

    def mark(self, tokens: int) -> Mark:
        """Returns what `rewind` needs after `tokens` more tokens of the cache's only row."""
        (length,) = self.lengths
        saved: dict[str, list[Tensor]] = {}
        partly = True
        for path, layer in self.layers.items():
            rings = layer.rings
            if rings is None or any(ring.shape[2] < tokens for ring in rings):
                saved[path], partly = [tensor.clone() for tensor in layer.tensors], False
            elif rings:
                saved[path] = [ring[:, :, _places(ring, length, tokens)] for ring in rings]
        return Mark(length=length, tokens=tokens, partly=partly, saved=saved)

    def rewind(self, mark: Mark, length: int) -> None:
        """Drops the tokens after `length`, which is at least the mark's; without `partly` all since the mark."""
        length = length if mark.partly else mark.length
        assert mark.length <= length <= self.lengths[0] <= mark.length + mark.tokens
        for path, saved in mark.saved.items():
            layer = self.layers[path]
            rings = layer.rings
            if rings is None or any(ring.shape[2] < mark.tokens for ring in rings):
                for tensor, old in zip(layer.tensors, saved, strict=True):
                    tensor.copy_(old)
                continue
            kept = length - mark.length
            for ring, old in zip(rings, saved, strict=True):
                ring[:, :, _places(ring, length, mark.tokens - kept)] = old[:, :, kept:]
        self.lengths = (length,)

    def moved(self, path: str, to: str) -> Cache:
        """Returns this cache with the layers below `path` alone, as if they were below `to`."""
        elsewhere = copy(self)
        below = ((at, layer) for at, layer in self.layers.items() if at.startswith(f"{path}."))
        elsewhere.layers = {to + at.removeprefix(path): layer for at, layer in below}
        return elsewhere

    def begin_source(self, tokens: int, valid_BS: Tensor | None) -> None:
        """Records the source that the layers are about to store; `valid_BS` marks its valid tokens."""
        if tokens > self.source_capacity:
            raise InputError(
                "the source exceeds the cache's capacity",
                field="source",
                value=tokens,
                allowed=f"at most {self.source_capacity}",
                fix="shorten it, or allocate a larger cache",
            )
        self.source_tokens, self.source_valid_BS = tokens, valid_BS

    def advance(self, lengths: tuple[int, ...]) -> None:
        """Records the rows' new lengths, before the layers store their tokens."""
        if max(lengths) > self.capacity:
            raise InputError(
                "the sequence exceeds the cache's capacity",
                field="tokens",
                value=max(lengths),
                allowed=f"at most {self.capacity}",
                fix="shorten the prompt, or allocate a larger cache",
            )
        self.lengths = lengths

    def outdated(self, past: Sequence[int], reach: Sequence[int]) -> list[int]:
        """Returns the rows whose `past` tokens were cached with other frequencies than those of `reach` tokens."""
        old_lengths = [used or length for used, length in zip(self._rope_lengths, past, strict=True)]
        return [
            row
            for row, (length, old, new) in enumerate(zip(past, old_lengths, reach, strict=True))
            if length and any(rotary.length_class(old) != rotary.length_class(new) for rotary in self.rotaries)
        ]

    def record(self, tokens_BT: Tensor, step: Step, images: Sequence[Tensor] | None) -> None:
        """Stores the pass's token ids, and the lengths that determine its RoPE frequencies."""
        self._rope_lengths = step.reach
        self._write_text(self._text_BN, tokens_BT, step)
        if step.types_BT is not None:
            self._types_BN = torch.zeros_like(self._text_BN) if self._types_BN is None else self._types_BN
            self._write_text(self._types_BN, step.types_BT, step)
        for kept, new in zip(self._images, images or (), strict=images is not None):
            kept.append(new)

    def _write_text(self, kept_BN: Tensor, new_BT: Tensor, step: Step) -> None:
        if step.uniform:
            kept_BN[:, step.past[0] : step.past[0] + step.tokens] = new_BT
            return
        row, t = (step.key_positions_BT >= 0).nonzero(as_tuple=True)
        kept_BN[row, step.positions_BT[row, t]] = new_BT[row, t]

    def row(self, row: int, length: int) -> tuple[Tensor, Tensor | None, Tensor | None, Cache]:
        """Returns a row's token ids (1, length), its types and images, and its cache, emptied, sharing memory."""
        alone = copy(self)
        alone.lengths = (0,)
        alone.layers = {path: layer.row(row) for path, layer in self.layers.items()}
        if self.source_valid_BS is not None:
            alone.source_valid_BS = self.source_valid_BS[row : row + 1]
        self.reread += length
        images = torch.cat(self._images[row]) if self._images[row] else None
        types = None if self._types_BN is None else self._types_BN[row : row + 1, :length]
        return self._text_BN[row : row + 1, :length], types, images, alone

    def keep(self, rows: list[int]) -> None:
        """Drops all other rows; one layer at a time is temporarily held twice."""
        self.lengths = tuple(self.lengths[row] for row in rows)
        self.shifts = tuple(self.shifts[row] for row in rows)
        self._rope_lengths = tuple(self._rope_lengths[row] for row in rows)
        self._text_BN, self._images = self._text_BN[rows], [self._images[row] for row in rows]
        if self._types_BN is not None:
            self._types_BN = self._types_BN[rows]
        if self.source_valid_BS is not None:
            self.source_valid_BS = self.source_valid_BS[rows]
        for layer in self.layers.values():
            layer.keep(rows)


def _places(ring: Tensor, start: int, tokens: int) -> Tensor:
    """Returns the places in a ring of `tokens` tokens from position `start` on."""
    return torch.arange(start, start + tokens, device=ring.device) % ring.shape[2]

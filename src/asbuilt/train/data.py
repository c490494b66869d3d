"""Batches from shards: which rows a step reads is a pure function of the seed and the step.

Rows are numbered over the whole run: batch s has rows s*B to s*B + B - 1. Each pass over the data (an epoch) visits all
its rows once, in an order that is computed from the seed and the epoch without holding it, so that resuming needs no
more than the step, and ranks take their share of the same rows. A row's draws, such as which tokens are masked, come
from a generator of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Generator, Tensor

from asbuilt.errors import InputError, one_of
from asbuilt.train.batch import Batch
from asbuilt.train.draws import draw, drawing
from asbuilt.train.objectives import PADDING, Objective
from asbuilt.train.settings import PACKINGS, Packing
from asbuilt.train.shards import Shards

R = TypeVar("R")
ROUNDS = 6
TRAINING, VALIDATION, ORDER = "training", "validation", "order"


@dataclass(frozen=True, kw_only=True)
class ShardData:
    """Batches of an objective from the tokens `start` to before `stop` of shards.

    With `packing="stream"` rows are cut from the documents one after another, wherever a row ends. With "documents" a
    row holds as many whole documents as fit and is filled with padding; only documents longer than a row are cut. With
    "single" a row holds no more than one document, so that no token attends to another one.
    """

    shards: Shards
    objective: Objective
    batch_size: int
    """Rows of a batch, over all ranks."""
    seed: int
    """Of the order of the rows, and of the draws within each."""
    start: int
    stop: int
    validated: range = range(0)
    """The tokens that are only validated on."""
    packing: Packing = "stream"
    pad_id: int = 0
    """What fills rows of whole documents."""

    def __post_init__(self) -> None:
        if self.packing not in PACKINGS:
            raise InputError(field="packing", value=self.packing, allowed=one_of(PACKINGS))
        _require_batch(self.batch_size)
        if not self.n_rows:
            raise InputError(
                f"the text has {self.stop - self.start:,} tokens and a sequence takes {self.objective.length:,}",
                field="context",
                allowed="no longer than the text",
                fix="use a shorter context or more text",
            )

    @cached_property
    def _rows(self) -> _Rows:
        return _Rows.of(self.shards, self.objective, range(self.start, self.stop), self.packing)

    @property
    def n_rows(self) -> int:
        """Rows of an epoch."""
        return len(self._rows)

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Returns the batch of one step, or a rank's share of it; raises InputError if it has no equal shares."""
        numbers = _share(step, self.batch_size, rank, ranks)
        rows = [shuffled(number, self.n_rows, self.seed) for number in numbers]
        return self._batch(self._rows, rows, (drawing(self.seed, TRAINING, number) for number in numbers))

    def rows(self, step: int, rank: int = 0, ranks: int = 1) -> list[int]:
        """Returns which rows of the data a step, or a rank in it, reads."""
        return [shuffled(number, self.n_rows, self.seed) for number in _share(step, self.batch_size, rank, ranks)]

    def documents(self, step: int, rank: int = 0, ranks: int = 1) -> Tensor:
        """Returns the number of the document of each token (B, L) of a batch's rows, `PADDING` where there is none.

        Without `apart` of the objective a token attends to earlier documents of its row too.
        """
        return torch.stack([self._cut(self._rows, row)[1] for row in self.rows(step, rank, ranks)])

    def validation(self) -> Iterator[Batch]:
        """Yields the validation rows in order, with the same draws at each call; the last batch may be smaller."""
        rows = _Rows.of(self.shards, self.objective, self.validated, self.packing)
        for first in range(0, len(rows), self.batch_size):
            some = range(first, min(first + self.batch_size, len(rows)))
            yield self._batch(rows, some, (drawing(self.seed, VALIDATION, row) for row in some))

    def _batch(self, rows: _Rows, numbers: Sequence[int], generators: Iterator[Generator]) -> Batch:
        made = []
        for number, generator in zip(numbers, generators, strict=True):
            ids_L, documents_L = self._cut(rows, number)
            told = documents_L[None] if self._told else None
            made.append(self.objective(ids_L[None], generator, told))
        return joined(made)

    @property
    def _told(self) -> bool:
        asked = any(getattr(self.objective, name, False) for name in ("separate", "apart"))
        return self.packing != "stream" or asked

    def _cut(self, rows: _Rows, number: int) -> tuple[Tensor, Tensor]:
        """Returns the ids (L,) of a row and the documents of its tokens, with padding."""
        start, stop = rows[number]
        lacking = self.objective.length - (stop - start)
        ids, documents = self.shards.tokens(start, stop), self.shards.documents(start, stop)
        if not lacking:
            return ids, documents
        filled = torch.nn.functional.pad
        return filled(ids, (0, lacking), value=self.pad_id), filled(documents, (0, lacking), value=PADDING)


@dataclass(frozen=True)
class _Rows:
    """Where rows begin and end: at equal distances, or as listed."""

    within: range
    length: int
    stride: int
    bounds: np.ndarray | None = None  # (rows, 2)

    @staticmethod
    def of(shards: Shards, objective: Objective, within: range, packing: Packing) -> _Rows:
        single = packing == "single"
        bounds = None if packing == "stream" else pack(shards.ends, within, objective.length, single=single)
        return _Rows(within, objective.length, objective.stride, bounds)

    def __len__(self) -> int:
        if self.bounds is not None:
            return len(self.bounds)
        return max(0, (len(self.within) - self.length) // self.stride + 1)

    def __getitem__(self, number: int) -> tuple[int, int]:
        if self.bounds is not None:
            start, stop = self.bounds[number]
            return int(start), int(stop)
        start = self.within.start + number * self.stride
        return start, start + self.length


@dataclass(frozen=True, kw_only=True)
class PairData(Generic[R]):
    """Batches of rows in memory: pairs of texts of which one is read and the other written, or chats."""

    pairs: Sequence[R]
    """The rows, such as the token ids of what is read and what is written."""
    objective: Callable[[Sequence[R]], Batch]
    batch_size: int
    """Pairs of a batch, over all ranks."""
    seed: int
    """Of the order of the pairs."""
    held_out: Sequence[R] = ()
    """Pairs that are only validated on."""

    def __post_init__(self) -> None:
        _require_batch(self.batch_size)
        if not self.pairs:
            raise InputError("empty", field="pairs", allowed="at least one pair of texts")

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Returns the batch of one step, or a rank's share of it; raises InputError if it has no equal shares."""
        numbers = _share(step, self.batch_size, rank, ranks)
        return self.objective([self.pairs[shuffled(number, len(self.pairs), self.seed)] for number in numbers])

    def validation(self) -> Iterator[Batch]:
        """Yields the validation pairs in order; the last batch may be smaller."""
        for first in range(0, len(self.held_out), self.batch_size):
            yield self.objective(self.held_out[first : first + self.batch_size])


def shard_data(
    shards: Shards,
    objective: Objective,
    *,
    batch_size: int,
    seed: int,
    validation: float = 0.0,
    packing: Packing = "stream",
    pad_id: int = 0,
) -> ShardData:
    """Returns the data of shards, of which the share `validation`, at the end, is only validated on.

    The division is where a document ends, if the last documents are no more than twice the share, and within a document
    otherwise. Raises InputError where either part is too short for a sequence.
    """
    at = divided(shards, validation)
    made = ShardData(
        shards=shards,
        objective=objective,
        batch_size=batch_size,
        seed=seed,
        start=0,
        stop=at,
        validated=range(at, len(shards)),
        packing=packing,
        pad_id=pad_id,
    )
    if validation and not len(_Rows.of(shards, objective, made.validated, packing)):
        raise InputError(
            f"{len(shards) - at:,} tokens, and a sequence takes {objective.length:,}",
            field="validation",
            value=validation,
            allowed="a larger share, or 0",
            fix="or use a shorter context",
        )
    return made


def divided(shards: Shards, validation: float) -> int:
    """Returns at which token the validation part begins; the end if there is none."""
    if not 0.0 <= validation < 1.0:
        raise InputError(field="validation", value=validation, allowed="from 0 to below 1")
    whole = len(shards)
    wanted = round(whole * validation)
    if not wanted:
        return whole
    # The last document that ends before, with which the part is no shorter than was asked for.
    before = int(np.searchsorted(shards.ends, whole - wanted, side="right"))
    at = int(shards.ends[before - 1]) if before else 0
    return at if whole - at <= 2 * wanted and at else whole - wanted


def pack(ends: np.ndarray, within: range, length: int, *, single: bool = False) -> np.ndarray:
    """Returns where rows of whole documents begin and end, (rows, 2): in order, each as many as fit.

    Documents longer than a row are cut into rows of their own, of which the last may hold further documents. With
    `single` no row holds more than one.
    """
    rows, start = [], within.start
    while start < within.stop:
        most = min(start + length, within.stop)
        last = int(np.searchsorted(ends, start if single else most, side="right"))
        if single:
            stop = min(most, int(ends[last]))
        else:
            stop = int(ends[last - 1]) if last and ends[last - 1] > start else most
        rows.append((start, stop))
        start = stop
    return np.array(rows, np.int64).reshape(-1, 2)


def joined(batches: Sequence[Batch]) -> Batch:
    """Returns batches of the same shapes as one; a mask that some lack is all true there."""
    made: dict[str, Tensor] = {}
    for field in fields(Batch):
        held = [getattr(batch, field.name) for batch in batches]
        given = next((one for one in held if one is not None), None)
        if given is not None:
            made[field.name] = torch.cat([_all_true(given) if one is None else one for one in held])
    return Batch(**made)


def _all_true(like: Tensor) -> Tensor:
    assert like.dtype == torch.bool
    return torch.ones_like(like)


def _require_batch(batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(field="batch_size", value=batch_size, allowed="at least 1")


def _share(step: int, batch_size: int, rank: int, ranks: int) -> range:
    """Returns the numbers, over the whole run, of the rows of a rank's share of a batch."""
    if batch_size % ranks or not 0 <= rank < ranks:
        allowed = f"a multiple of {ranks}"
        raise InputError("ranks have no equal shares", field="batch_size", value=batch_size, allowed=allowed)
    share = batch_size // ranks
    first = step * batch_size + rank * share
    return range(first, first + share)


def shuffled(number: int, n: int, seed: int) -> int:
    """Returns which of `n` rows comes at a place of the whole run: each once an epoch, in another order each time."""
    epoch, place = divmod(number, n)
    return permuted(place, n, [draw(seed, ORDER, epoch, i) for i in range(ROUNDS)])


def permuted(place: int, n: int, keys: Sequence[int]) -> int:
    """Returns where a permutation of 0 ... n - 1, which the keys choose, sends a number.

    A Feistel network permutes the numbers of an even number of bits: each round makes (right, left xor f(right)) of
    (left, right), which can be undone whatever f is. Numbers from n on are sent on until one is below n.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for key in keys:
            mixed = ((right ^ key) * 0x9E3779B97F4A7C15 + (key >> 17)) & (1 << 64) - 1
            mixed = ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
            left, right = right, left ^ (mixed >> 32) & mask
        place = left << half | right
        if place < n:
            return place

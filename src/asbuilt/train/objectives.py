"""What a model learns to predict: the next token, masked tokens, cut-out spans, the rest of a text, or another text.

Each objective is a pure function of token ids, a generator and, where rows hold several documents, the document of
each token (`PADDING` where there is none). The same generator gives the same batch; shapes never depend on the draws.

Shapes: batch B, tokens of a row L, tokens that the model reads T, source tokens S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Generator, Tensor

from asbuilt.errors import InputError
from asbuilt.train.batch import IGNORED, Batch

PADDING = -1  # the document of a token that only fills a row


class Objective(Protocol):
    """Makes a batch of rows of tokens."""

    @property
    def length(self) -> int:
        """Tokens of a row, L."""
        ...

    @property
    def stride(self) -> int:
        """Tokens from the beginning of a row to that of the next, where rows are cut from one text."""
        ...

    def __call__(self, ids_BL: Tensor, generator: Generator, documents_BL: Tensor | None = None) -> Batch:
        """Returns the batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class NextToken:
    """The target of each token is the next one. A row has one token more than the model reads."""

    context: int
    """Tokens that the model reads, T."""
    separate: bool = False
    """Whether the last token of a document has no loss, rather than the next document's first token as its target."""
    apart: bool = False
    """Whether the documents of a row do not attend to each other."""

    def __post_init__(self) -> None:
        _require("context", self.context, 1)

    @property
    def length(self) -> int:
        """Tokens of a row: T + 1."""
        return self.context + 1

    @property
    def stride(self) -> int:
        """Rows overlap by a token, so that each but a text's first is a target once."""
        return self.context

    def __call__(self, ids_BL: Tensor, generator: Generator, documents_BL: Tensor | None = None) -> Batch:
        """Returns the batch; nothing is drawn."""
        targets_BT, valid_BT, told_BT = ids_BL[:, 1:], None, None
        if documents_BL is not None:
            before_BT, after_BT = documents_BL[:, :-1], documents_BL[:, 1:]
            wrong_BT = after_BT == PADDING
            if self.separate:
                wrong_BT = wrong_BT | (before_BT != after_BT)
            targets_BT = targets_BT.masked_fill(wrong_BT, IGNORED)
            valid_BT = _unless_all(before_BT != PADDING)
            told_BT = before_BT if self.apart else None
        return Batch(ids=ids_BL[:, :-1], targets=targets_BT, valid=valid_BT, documents=told_BT)


@dataclass(frozen=True, kw_only=True)
class Masked:
    """Some tokens are hidden and are their own targets: 80% show the mask, 10% a random token, 10% themselves.

    Devlin et al. 2018 (arXiv 1810.04805).
    """

    context: int
    """Tokens that the model reads, T."""
    mask_id: int
    """The token that hides others."""
    n_vocab: int
    """Random tokens are drawn from the ids below, all equally likely."""
    rate: float = 0.15
    """Probability that a token is a target."""
    never: tuple[int, ...] = ()
    """Ids that are no targets, such as those of [CLS] and [SEP]."""
    apart: bool = False
    """Whether the documents of a row do not attend to each other."""

    def __post_init__(self) -> None:
        _require("context", self.context, 1)
        _require("n_vocab", self.n_vocab, 1)
        if not 0 < self.rate <= 1:
            raise InputError(field="rate", value=self.rate, allowed="above 0 and at most 1")

    @property
    def length(self) -> int:
        """Tokens of a row: T."""
        return self.context

    @property
    def stride(self) -> int:
        """Rows lie side by side."""
        return self.context

    def __call__(self, ids_BL: Tensor, generator: Generator, documents_BL: Tensor | None = None) -> Batch:
        """Returns the batch: each token is chosen, and then shown, independently of all others."""
        chosen_BT = torch.rand(ids_BL.shape, generator=generator) < self.rate
        shown_BT = torch.rand(ids_BL.shape, generator=generator)
        random_BT = torch.randint(self.n_vocab, ids_BL.shape, generator=generator)
        chosen_BT &= ~torch.isin(ids_BL, torch.tensor(self.never, dtype=ids_BL.dtype))
        valid_BT = None
        if documents_BL is not None:
            valid_BT = documents_BL != PADDING
            chosen_BT &= valid_BT
        read_BT = torch.where(chosen_BT & (shown_BT < 0.8), self.mask_id, ids_BL)
        read_BT = torch.where(chosen_BT & (shown_BT >= 0.9), random_BT, read_BT)
        targets_BT = ids_BL.masked_fill(~chosen_BT, IGNORED)
        return Batch(
            ids=read_BT,
            targets=targets_BT,
            valid=None if valid_BT is None else _unless_all(valid_BT),
            documents=documents_BL if self.apart else None,
        )


@dataclass(frozen=True, kw_only=True)
class SpanCorruption:
    """Spans are cut out of a text; the encoder reads a sentinel for each, and the decoder writes what was cut.

    Of `a b c d e f g` it may read `a <0> d e <1> </s>` and have to write `<0> b c <1> f g </s>`. How many tokens are
    cut, and in how many spans, follows from the length, so all rows have the same shape; the lengths of the spans and
    of what is between them are random compositions, all equally likely. A row begins with a kept token and ends with a
    span. Raffel et al. 2019 (arXiv 1910.10683).
    """

    length: int
    """Tokens of a row, L."""
    sentinels: tuple[int, ...]
    """Ids of the sentinels, in the order of use."""
    end_id: int
    """The token that ends source and target."""
    start_id: int
    """The token that the decoder begins with; T5's is its padding token."""
    density: float = 0.15
    """Share of the tokens that are cut out."""
    mean_span: float = 3.0
    """Mean number of tokens of a span."""

    def __post_init__(self) -> None:
        _require("length", self.length, 2)
        if not 0 < self.density < 1:
            raise InputError(field="density", value=self.density, allowed="between 0 and 1")
        if self.mean_span < 1:
            raise InputError(field="mean_span", value=self.mean_span, allowed="at least 1")
        if self.n_spans > len(self.sentinels):
            fix = "shorten the rows, or train a tokenizer with more (--sentinels)"
            raise InputError(
                "too few", field="sentinels", value=len(self.sentinels), allowed=f"{self.n_spans}", fix=fix
            )

    @property
    def stride(self) -> int:
        """Rows lie side by side."""
        return self.length

    @property
    def n_cut(self) -> int:
        """Tokens that are cut out of a row."""
        return _cut(self.length, self.density, self.mean_span)[0]

    @property
    def n_spans(self) -> int:
        """Spans of a row."""
        return _cut(self.length, self.density, self.mean_span)[1]

    @property
    def source_length(self) -> int:
        """Tokens that the encoder reads, S: those kept, the sentinels, and the end."""
        return self.length - self.n_cut + self.n_spans + 1

    @property
    def target_length(self) -> int:
        """Tokens that the decoder writes, T."""
        return self.n_cut + self.n_spans + 1

    @classmethod
    def reading(
        cls,
        source: int,
        target: int | None = None,
        *,
        sentinels: tuple[int, ...],
        end_id: int,
        start_id: int,
        density: float = 0.15,
        mean_span: float = 3.0,
    ) -> SpanCorruption:
        """Returns the objective of the longest rows of which the encoder reads `source` tokens at most.

        With `target`, the decoder writes so many at most. Raises InputError if even rows of two tokens are longer.
        """

        def fits(length: int) -> bool:
            n_cut, n_spans = _cut(length, density, mean_span)
            return length - n_cut + n_spans < source and (target is None or n_cut + n_spans < target)

        like = cls(
            length=2,
            sentinels=sentinels,
            end_id=end_id,
            start_id=start_id,
            density=density,
            mean_span=mean_span,
        )
        if not fits(2):
            raise InputError("too short", field="source, target", value=(source, target), allowed="at least 3 each")
        low, high = 2, 3
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return replace(like, length=low)

    def __call__(self, ids_BL: Tensor, generator: Generator, documents_BL: Tensor | None = None) -> Batch:
        """Returns the batch; documents make no difference, and padding is refused."""
        if documents_BL is not None and bool((documents_BL == PADDING).any()):
            raise InputError("rows are cut from one text", field="packing", value="documents", allowed="stream")
        made = [self._row(ids_L, generator) for ids_L in ids_BL]
        targets_BT = torch.stack([target_T for _, target_T in made])
        ids_BT = torch.cat([torch.full_like(targets_BT[:, :1], self.start_id), targets_BT[:, :-1]], dim=1)
        return Batch(ids=ids_BT, targets=targets_BT, source=torch.stack([source_S for source_S, _ in made]))

    def _row(self, ids_L: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """Returns what the encoder reads (S,) and the decoder writes (T,)."""
        kept = composition(self.length - self.n_cut, self.n_spans, generator)
        cut = composition(self.n_cut, self.n_spans, generator)
        parts = ids_L.split(torch.stack([kept, cut], dim=1).flatten().tolist())
        *sentinels, end = ids_L.new_tensor([*self.sentinels[: self.n_spans], self.end_id]).split(1)
        source = [part for pair in zip(parts[::2], sentinels, strict=True) for part in pair]
        target = [part for pair in zip(sentinels, parts[1::2], strict=True) for part in pair]
        return torch.cat([*source, end]), torch.cat([*target, end])

    def undo(self, source_S: Tensor, target_T: Tensor) -> Tensor:
        """Returns the row of tokens that a source and its target were made of."""
        made: list[int] = []
        written = target_T.tolist()[:-1]
        ends = [*(written.index(sentinel) for sentinel in self.sentinels[: self.n_spans]), len(written)]
        spans = {written[start]: written[start + 1 : end] for start, end in pairwise(ends)}
        for id_ in source_S.tolist()[:-1]:
            made += spans.get(id_, [id_])
        return source_S.new_tensor(made)


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """A text is continued from a random place on: the part before it is read without loss.

    Without `start_id` the model is a decoder, which reads both parts, with its own attention mask. With it, the encoder
    of an encoder-decoder reads the part before, with right padding, and the decoder writes the rest.
    """

    context: int
    """Tokens that a decoder reads, T; an encoder-decoder's two parts have one more together."""
    shortest: int = 1
    """Fewest tokens of either part."""
    start_id: int | None = None
    """The token that an encoder-decoder's decoder begins with."""
    pad_id: int = 0
    """What fills the rows of an encoder-decoder."""

    def __post_init__(self) -> None:
        _require("shortest", self.shortest, 1)
        _require("context", self.context, 2 * self.shortest - 1)

    @property
    def length(self) -> int:
        """Tokens of a row: T + 1."""
        return self.context + 1

    @property
    def stride(self) -> int:
        """Rows lie side by side."""
        return self.length

    def __call__(self, ids_BL: Tensor, generator: Generator, documents_BL: Tensor | None = None) -> Batch:
        """Returns the batch; the place is drawn for each row, all that are allowed equally likely."""
        B, L = ids_BL.shape
        draws_B = torch.randint(self.shortest, L - self.shortest + 1, (B, 1), generator=generator)
        places_L = torch.arange(L)
        if self.start_id is None:
            made = NextToken(context=L - 1)(ids_BL, generator, documents_BL)
            targets_BT = made.targets.masked_fill(places_L[1:] < draws_B, IGNORED)
            return replace(made, targets=targets_BT)
        if documents_BL is not None and bool((documents_BL == PADDING).any()):
            raise InputError("rows are cut from one text", field="packing", value="documents", allowed="stream")
        most = L - self.shortest
        source_BS = ids_BL[:, :most].masked_fill(places_L[:most] >= draws_B, self.pad_id)
        there_BT = places_L[:most] < L - draws_B
        written_BT = ids_BL.gather(1, (draws_B + places_L[:most]).clamp(max=L - 1))
        before_BT = torch.cat([torch.full((B, 1), self.start_id), written_BT[:, :-1]], dim=1)
        return Batch(
            ids=before_BT.masked_fill(~there_BT, self.pad_id),
            targets=written_BT.masked_fill(~there_BT, IGNORED),
            valid=_unless_all(there_BT),
            source=source_BS,
            source_valid=_unless_all(places_L[:most] < draws_B),
        )


@dataclass(frozen=True, kw_only=True)
class SequenceToSequence:
    """One text is read and another written: pairs of token ids, each ended by `end_id`, with right padding.

    All batches have the same shape. Texts that are too long are cut before their end token.
    """

    source_length: int
    """Tokens that the encoder reads, S."""
    target_length: int
    """Tokens that the decoder writes, T."""
    end_id: int
    """The token that ends both."""
    start_id: int
    """The token that the decoder begins with."""
    pad_id: int = 0
    """What fills the rows."""

    def __post_init__(self) -> None:
        _require("source_length", self.source_length, 2)
        _require("target_length", self.target_length, 2)

    def __call__(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
        """Returns the batch of some pairs; nothing is drawn."""
        source_BS, source_valid_BS = self._rows([source for source, _ in pairs], self.source_length)
        written_BT, valid_BT = self._rows([target for _, target in pairs], self.target_length)
        before_BT = torch.cat([torch.full_like(written_BT[:, :1], self.start_id), written_BT[:, :-1]], dim=1)
        return Batch(
            ids=before_BT.masked_fill(~valid_BT, self.pad_id),
            targets=written_BT.masked_fill(~valid_BT, IGNORED),
            valid=_unless_all(valid_BT),
            source=source_BS,
            source_valid=_unless_all(source_valid_BS),
        )

    def _rows(self, texts: Sequence[Sequence[int]], length: int) -> tuple[Tensor, Tensor]:
        ended = [[*text[: length - 1], self.end_id] for text in texts]
        ids = torch.tensor([[*text, *[self.pad_id] * (length - len(text))] for text in ended], dtype=torch.int64)
        return ids, torch.arange(length) < torch.tensor([[len(text)] for text in ended])


def composition(whole: int, parts: int, generator: Generator) -> Tensor:
    """Returns positive numbers (parts,) that sum to `whole`: one of all such lists, all equally likely."""
    cuts = torch.randperm(whole - 1, generator=generator)[: parts - 1].sort().values + 1
    return torch.diff(cuts, prepend=cuts.new_zeros(1), append=cuts.new_tensor([whole]))


def _cut(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """Returns how many tokens are cut out of a row, and in how many spans, between as many kept parts."""
    n_cut = min(max(round(length * density), 1), length - 1)
    return n_cut, min(max(round(n_cut / mean_span), 1), n_cut, length - n_cut)


def _require(field: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(field=field, value=value, allowed=f"at least {least}")


def _unless_all(valid: Tensor) -> Tensor | None:
    """Returns a mask, or None where it says nothing: attention without one is faster."""
    return None if bool(valid.all()) else valid

"""Byte pair encoding in plain Python: counting pairs, one merge, learning merges, applying them in the order of rank.

This is the definition that the `tokenizers` library is compared with, and small enough to read in a lesson; training
on more than a few hundred kilobytes is for `asbuilt.text.train`. A token is bytes, or a string; a word is a sequence of
tokens that no merge leaves, and a pair of tokens merges into their concatenation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

Token = TypeVar("Token", bytes, str)


def byte_order() -> list[bytes]:
    """Returns the 256 bytes in the order of their ids in byte-level vocabularies: printable ones first, as in GPT-2."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [bytes([byte]) for byte in (*prints, *(byte for byte in range(256) if byte not in prints))]


def pair_counts(words: Mapping[tuple[Token, ...], int]) -> Counter[tuple[Token, Token]]:
    """Counts adjacent pairs of tokens, each word as often as it occurs. Overlapping pairs count: `aaa` has two `aa`."""
    counts: Counter[tuple[Token, Token]] = Counter()
    for word, times in words.items():
        for pair in pairwise(word):
            counts[pair] += times
    return counts


def merge(word: Sequence[Token], pair: tuple[Token, Token]) -> tuple[Token, ...]:
    """Joins every occurrence of the pair, from left to right: `aaa` becomes `aa a`."""
    made: list[Token] = []
    at = 0
    while at < len(word):
        step = 2 if tuple(word[at : at + 2]) == pair else 1
        made.append(word[at] if step == 1 else pair[0] + pair[1])
        at += step
    return tuple(made)


def words_of(pieces: Iterable[bytes]) -> Counter[tuple[bytes, ...]]:
    """Counts pre-tokens as words of single bytes."""
    return Counter(tuple(bytes([byte]) for byte in piece) for piece in pieces)


def learn(words: Mapping[tuple[bytes, ...], int], n_vocab: int, *, min_count: int = 2) -> list[tuple[bytes, bytes]]:
    """Returns the merges that training adds to the 256 bytes, in the order of rank, until there are `n_vocab` tokens.

    Each is the most frequent pair of the words as merged so far; of equally frequent ones, that whose tokens are older,
    the left one first. Fewer are returned if no pair is left that occurs `min_count` times.
    """
    ids = {token: id_ for id_, token in enumerate(byte_order())}
    merges: list[tuple[bytes, bytes]] = []
    while len(ids) < n_vocab:
        counts = pair_counts(words)
        best = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]), default=None)
        if best is None or counts[best] < max(1, min_count):
            break
        merges.append(best)
        ids.setdefault(best[0] + best[1], len(ids))
        joined: Counter[tuple[bytes, ...]] = Counter()
        for word, times in words.items():
            joined[merge(word, best)] += times
        words = joined
    return merges


def vocabulary(merges: Iterable[tuple[bytes, bytes]]) -> dict[bytes, int]:
    """Returns the ids of the 256 bytes and of what the merges make. Without merges it is the vocabulary of bytes."""
    ids = {token: id_ for id_, token in enumerate(byte_order())}
    for left, right in merges:
        ids.setdefault(left + right, len(ids))
    return ids


@dataclass(frozen=True)
class Step(Generic[Token]):
    """One merge of a word: its rank, the pair, and the word afterwards."""

    rank: int
    pair: tuple[Token, Token]
    word: tuple[Token, ...]


def steps(word: Sequence[Token], ranks: Mapping[tuple[Token, Token], int]) -> list[Step[Token]]:
    """Returns the merges that encode a word, one by one: always the pair of the lowest rank, the leftmost of equals."""
    made: list[Step[Token]] = []
    held = tuple(word)
    while True:
        known = [(ranks[pair], at) for at, pair in enumerate(pairwise(held)) if pair in ranks]
        if not known:
            return made
        rank, at = min(known)
        pair = (held[at], held[at + 1])
        held = (*held[:at], pair[0] + pair[1], *held[at + 2 :])
        made.append(Step(rank, pair, held))


def encode(word: Sequence[Token], ranks: Mapping[tuple[Token, Token], int]) -> tuple[Token, ...]:
    """Returns the tokens of a word."""
    taken = steps(word, ranks)
    return taken[-1].word if taken else tuple(word)

"""How a tokenizer encodes a text, step by step: pre-tokens, the bytes of each, and merges in their order."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from asbuilt.errors import InputError
from asbuilt.text import bpe
from asbuilt.text.tokenizer import Tokenizer

MOST = 1 << 16  # characters


@dataclass(frozen=True)
class Cut:
    """A pre-token: its spelling in the vocabulary, the merges one by one, its tokens and their ids.

    `whole` marks a pre-token that is a token without any merge: an added token, or one that a tokenizer takes first.
    """

    piece: str
    steps: tuple[bpe.Step[str], ...]
    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    whole: bool = False


def cut(tokenizer: Tokenizer, text: str) -> list[Cut]:
    """Returns the pre-tokens of a text with their merges; their ids together are those of `encode`.

    Raises InputError for a tokenizer that does not merge pairs, or that does more to a text than this follows.
    """
    if len(text) > MOST:
        raise InputError("too long", field="TEXT", value=len(text), allowed=f"at most {MOST:,} characters")
    said = json.loads(tokenizer.saved())
    model = said["model"]
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise InputError("does not merge pairs", value=model.get("type"), allowed="a BPE tokenizer")
    ids: dict[str, int] = model["vocab"]
    ranks = {_pair(one): rank for rank, one in reversed([*enumerate(model["merges"])])}
    plain = {token.content: id_ for id_, token in tokenizer.added_tokens.items() if not token.special}
    made = []
    for part, id_ in _parts(text, plain):
        if id_ is not None:
            made.append(Cut(part, (), (part,), (id_,), whole=True))
        else:
            made += [_word(piece, ids, ranks, model) for piece in tokenizer.pieces(part)]
    if [id_ for one in made for id_ in one.ids] != tokenizer.encode(text):
        raise InputError("does more to this text than merging pairs of its pre-tokens", value=text)
    return made


def _parts(text: str, plain: dict[str, int]) -> list[tuple[str, int | None]]:
    """Returns the text cut at added tokens, which are matched first, with their ids."""
    if not plain:
        return [(text, None)] if text else []
    longest_first = sorted(plain, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return [(part, plain[part] if at % 2 else None) for at, part in enumerate(parts) if part]


def _word(piece: str, ids: dict[str, int], ranks: dict[tuple[str, str], int], model: dict[str, Any]) -> Cut:
    if model.get("ignore_merges") and piece in ids:
        return Cut(piece, (), (piece,), (ids[piece],), whole=True)
    taken = tuple(bpe.steps(tuple(piece), ranks))
    tokens = taken[-1].word if taken else tuple(piece)
    unknown = next((token for token in tokens if token not in ids), None)
    if unknown is not None:
        raise InputError("has no token for a character", value=unknown, allowed="a byte-level tokenizer")
    return Cut(piece, taken, tokens, tuple(ids[token] for token in tokens))


def _pair(said: str | list[str]) -> tuple[str, str]:
    left, right = said.split(" ") if isinstance(said, str) else said
    return left, right

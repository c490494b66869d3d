"""Next-token batches of one text in memory, and the tokenizer that cuts it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from torch import Tensor

from asbuilt.checkpoint.source import Source
from asbuilt.errors import InputError
from asbuilt.files import require_regular
from asbuilt.text import sources
from asbuilt.text.tokenizer import BYTE_OF, Tokenizer
from asbuilt.train.batch import Batch
from asbuilt.train.draws import drawing
from asbuilt.train.settings import Data as Settings

LARGEST = 1 << 30  # bytes of a text in memory
VALIDATED = 64  # sequences of a batch of validation
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer for training, and the ids of a text in memory."""

    tokenizer: Tokenizer
    source: Source | None = None
    """The checkpoint whose tokenizer it is."""
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other files of a folder of the trained model, JSON by name: how images are prepared."""
    ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""
        return self.tokenizer.n_vocab

    @property
    def end_id(self) -> int | None:
        """The token that ends a text, if it has one."""
        return self.tokenizer.eos_ids[0] if self.tokenizer.eos_ids else None

    @property
    def pad_id(self) -> int | None:
        """The token that pads, with which a decoder's text begins too, if there is one."""
        named = self.tokenizer.named.get("pad_token")
        return next((id_ for id_, token in self.tokenizer.special_tokens.items() if token.content == named), None)

    def byte_lengths(self) -> Tensor:
        """Returns how many bytes of text each token is, (V,): 0 for control tokens."""
        known = self.tokenizer
        tokens = [None if known.is_special(id_) else known.token(id_) for id_ in range(self.n_vocab)]
        return torch.tensor([0 if token is None else len(known.spelled(token)) for token in tokens])


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Sequences of `context` tokens at random places of a text, and the next token of each as its target.

    The places of a batch depend on the seed and its number alone. Validation reads the text's end in sequences side by
    side.
    """

    ids: Tensor
    """Token ids of the training text, (n,)."""
    held_out: Tensor
    """Token ids of the validation text, (m,)."""
    context: int
    """Tokens of a sequence."""
    batch_size: int
    """Sequences of a batch, over all ranks."""
    seed: int
    """Seed of the places."""

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Returns the batch of this number, or a rank's share."""
        starts_B = torch.randint(len(self.ids) - self.context, (self.batch_size,), generator=drawing(self.seed, step))
        return self._cut(self.ids, starts_B.chunk(ranks)[rank])

    def validation(self) -> Iterator[Batch]:
        """Yields the validation text, without a last part shorter than a sequence."""
        starts = torch.tensor(range(0, len(self.held_out) - self.context, self.context), dtype=torch.int64)
        for starts_B in starts.split(VALIDATED) if len(starts) else ():
            yield self._cut(self.held_out, starts_B)

    def _cut(self, ids: Tensor, starts_B: Tensor) -> Batch:
        places_BT = starts_B[:, None] + torch.arange(self.context)
        return Batch(ids=ids[places_BT], targets=ids[places_BT + 1])


def text_data(settings: Settings, seed: int) -> tuple[TextData, Vocabulary]:
    """Returns the data of a text file; raises InputError for one that is empty, binary or too short."""
    if not settings.text:
        raise InputError("missing", field="data.text", allowed="a text file", fix="add data.text=FILE")
    vocabulary = vocabulary_of(settings, _text(Path(settings.text)))
    ids = vocabulary.ids
    train = len(ids) - int(len(ids) * settings.validation)
    least = settings.context + 1
    for part, found in (("training", train), ("validation", len(ids) - train)):
        if found < least and (part == "training" or settings.validation > 0):
            raise InputError(
                f"the {part} part of the text has {found} tokens",
                field="data.context",
                value=settings.context,
                allowed=f"at most {max(0, found - 1)}",
                fix="" if part == "training" else "or data.validation=0 to validate on nothing",
            )
    made = TextData(
        ids=ids[:train], held_out=ids[train:], context=settings.context, batch_size=settings.batch, seed=seed
    )
    return made, vocabulary


def _text(path: Path) -> str:
    require_regular(path, "data.text")
    text = "".join(piece.text for piece in sources.pieces([str(path)]))
    if not text.strip():
        raise InputError("the text is empty", field="data.text", value=str(path))
    return text


def vocabulary_of(settings: Settings, text: str) -> Vocabulary:
    """Returns the ids of the text by the tokenizer of the settings."""
    if settings.tokenizer == "characters":
        known = sorted(set(text))
        place = {character: i for i, character in enumerate(known)}
        ids = torch.tensor([place[character] for character in text])
        return Vocabulary(tokenizer=_tokenizer(character_tokens(known)), ids=ids)
    if settings.tokenizer == "bytes":
        raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        characters = [CHARACTER_OF[byte] for byte in range(256)]
        return Vocabulary(tokenizer=_tokenizer(_byte_level(characters, [])), ids=raw)
    tokenizer = Tokenizer.from_file(settings.tokenizer)
    return Vocabulary(tokenizer=tokenizer, ids=torch.tensor(tokenizer.encode(text)))


def _tokenizer(document: dict[str, Any]) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(document)))


def character_tokens(known: list[str]) -> dict[str, Any]:
    """Returns the tokenizer.json whose tokens are these characters, in order, each built from its bytes.

    Bytes alone come after them, where a character of several needs them: no text has them as tokens.
    """
    spelt = ["".join(CHARACTER_OF[byte] for byte in character.encode()) for character in known]
    tokens, merges = list(spelt), []
    for whole in spelt:
        for n in range(1, len(whole)):
            merges.append((whole[:n], whole[n]))
            tokens += [whole[:n], whole[n]]
    return _byte_level(list(dict.fromkeys(tokens)), list(dict.fromkeys(merges)))


def _byte_level(tokens: list[str], merges: list[tuple[str, str]]) -> dict[str, Any]:
    """Returns a tokenizer.json of byte-level BPE that cuts a text at every character first."""
    inner = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    each = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([each, level])  # pyright: ignore
    inner.decoder = decoders.ByteLevel()  # pyright: ignore
    return json.loads(inner.to_str())

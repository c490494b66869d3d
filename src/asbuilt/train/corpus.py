"""What a recipe's data section names, as batches: texts that are tokenised once into shards, and an objective.

A plain text file for a language model stays in memory (train/text.py). All else becomes shards in OUT/tokens, beside
the tokenizer that was made for them, which a resumed run finds there:

OUT/tokens/tokenizer-DIGEST/    the tokenizer that was made for the texts, unless a tokenizer.json was given
OUT/tokens/DIGEST/              the shards (train/shards.py)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from asbuilt.checkpoint.save import aside
from asbuilt.errors import InputError
from asbuilt.files import open_regular, parse_json
from asbuilt.text import sources
from asbuilt.text.sources import JSON_LINES
from asbuilt.text.tokenizer import TOKENIZER, Tokenizer
from asbuilt.text.train import BYTES, SENTINEL, train
from asbuilt.train import own_texts
from asbuilt.train.batch import Data
from asbuilt.train.data import PairData, shard_data
from asbuilt.train.objectives import Masked, NextToken, Objective, Prefix, SequenceToSequence, SpanCorruption
from asbuilt.train.settings import Data as Settings
from asbuilt.train.shards import INDEX, Shards, cached_shards, open_shards
from asbuilt.train.text import LARGEST, Vocabulary, character_tokens, text_data

TOKENS = "tokens"  # the folder of a run that holds them
END, PAD, MASK = "<|end|>", "<|pad|>", "<|mask|>"
MOST_SENTINELS = 1 << 16
Pairs = list[tuple[list[int], list[int]]]


@dataclass(frozen=True, kw_only=True)
class Specials:
    """The control tokens that an objective needs, by their ids; None where the tokenizer has none."""

    end: int | None
    pad: int | None
    mask: int | None
    sentinels: tuple[int, ...]


def read_corpus(settings: Settings, seed: int, out: Path) -> tuple[Data, Vocabulary]:
    """Returns the data of a recipe's section, and the tokenizer; shards are written below `out`.

    Raises InputError for texts that are empty or none, for a tokenizer without a control token that the objective
    needs, and for sequences longer than the data.
    """
    if not settings.text:
        raise InputError("missing", field="data.text", allowed="a text", fix="add data.text=FILE")
    if in_memory(settings):
        return text_data(settings, seed)
    if settings.objective == "pairs":
        return _pairs(settings, seed, out / TOKENS)
    return _sharded(settings, seed, out / TOKENS)


def in_memory(settings: Settings) -> bool:
    """Returns whether sequences begin at random places of one text in memory: a plain file's, for the next token."""
    plain = settings.objective == "next" and settings.packing == "stream"
    plain = plain and not settings.separate and not settings.document_mask
    path = Path(settings.text)
    whole = not path.is_dir() and path.suffix != JSON_LINES and settings.text not in own_texts.NAMES
    small = not path.is_file() or path.stat().st_size <= LARGEST
    return plain and whole and small and settings.tokenizer != "bpe"


def _sharded(settings: Settings, seed: int, root: Path) -> tuple[Data, Vocabulary]:
    folder = Path(settings.text)
    if (folder / INDEX).is_file():
        shards, tokenizer = _given(settings, folder)
    else:
        names = _names(settings, root)
        where = _tokenizer(settings, names, root)
        shards = cached_shards(root, names, where, key=settings.key)
        tokenizer = Tokenizer.from_file(where)
    specials = specials_of(tokenizer)
    objective = _objective(settings, specials, tokenizer.n_vocab)
    data = shard_data(
        shards,
        objective,
        batch_size=settings.batch,
        seed=seed,
        validation=settings.validation,
        packing=settings.packing,
        pad_id=specials.pad or 0,
    )
    return data, Vocabulary(tokenizer=tokenizer)


def _given(settings: Settings, folder: Path) -> tuple[Shards, Tokenizer]:
    """Returns shards that were written before, and the tokenizer that the recipe names for them."""
    if settings.tokenizer in ("characters", "bytes", "bpe"):
        problem = f"{folder} holds token ids"
        raise InputError(problem, field="data.tokenizer", value=settings.tokenizer, allowed="its tokenizer.json")
    shards, tokenizer = open_shards(folder), Tokenizer.from_file(settings.tokenizer)
    if shards.n_vocab > tokenizer.n_vocab:
        raise InputError(
            f"it has {tokenizer.n_vocab:,} tokens, {folder} has ids up to {shards.n_vocab:,}",
            field="data.tokenizer",
            value=settings.tokenizer,
            allowed="the tokenizer of these shards",
        )
    return shards, tokenizer


def _names(settings: Settings, root: Path) -> list[str]:
    if settings.text in own_texts.NAMES:
        return own_texts.files(settings.text, root)
    return sources.files([settings.text])


def _tokenizer(settings: Settings, names: Sequence[str], root: Path) -> Path:
    """Returns the tokenizer's file: the one given, or one that is made for the texts, unless it is there already."""
    if settings.tokenizer not in ("characters", "bytes", "bpe"):
        return tokenizer_file(settings.tokenizer)
    stats = [(Path(name).name, Path(name).stat().st_size, Path(name).stat().st_mtime_ns) for name in names]
    said = json.dumps([stats, settings.tokenizer, settings.n_vocab, settings.objective, settings.key, _added(settings)])
    folder = root / f"tokenizer-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    if not (folder / TOKENIZER).is_file():
        keys = (settings.key,) if settings.objective != "pairs" else own_texts.PAIR
        texts = (piece.text for key in keys for piece in sources.pieces(names, key=key))
        made = made_tokenizer(settings, texts)
        try:
            with aside(folder, 0) as partial:
                made.save(partial)
        except InputError:
            if not (folder / TOKENIZER).is_file():  # else another rank was faster
                raise
    return folder / TOKENIZER


def tokenizer_file(name: str) -> Path:
    """Returns the tokenizer.json of this name, or in the folder of this name."""
    return Path(name) / TOKENIZER if Path(name).is_dir() else Path(name)


def made_tokenizer(settings: Settings, texts: own_texts.Texts) -> Tokenizer:
    """Returns a tokenizer of the texts, with the control tokens that the objective needs."""
    sentinels, roles = _added(settings)
    if settings.tokenizer == "characters":
        known = sorted(set().union(*map(set, texts)))
        inner = tokenizers.Tokenizer.from_str(json.dumps(character_tokens(known)))
        added = [*sentinels, *roles.values()]
        inner.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in added])
        return Tokenizer(inner, config=dict(roles))
    whole = BYTES + len(sentinels) + len(roles) if settings.tokenizer == "bytes" else settings.n_vocab
    try:
        return train(texts, whole, special=sentinels, roles=roles)
    except InputError as error:
        setting = {"vocab_size": "data.n_vocab", "texts": "data.text"}.get(error.field)
        if setting is None:
            raise
        raise InputError(
            error.problem, field=setting, value=error.value, allowed=error.allowed, fix=error.fix
        ) from error


def _added(settings: Settings) -> tuple[list[str], dict[str, str]]:
    """Returns the sentinels and the other control tokens, by role, of a tokenizer that is made."""
    roles = {"eos_token": END, "pad_token": PAD}
    if settings.objective == "masked":
        roles["mask_token"] = MASK
    count = 0
    if settings.objective == "spans":
        count = _spans(settings, tuple(range(MOST_SENTINELS)), 0, 0).n_spans
    return [SENTINEL.format(number) for number in range(count)], roles


def specials_of(tokenizer: Tokenizer) -> Specials:
    """Returns the control tokens of a tokenizer that objectives need."""
    ids = {token.content: id_ for id_, token in tokenizer.special_tokens.items()}
    sentinels: list[int] = []
    while (id_ := ids.get(SENTINEL.format(len(sentinels)))) is not None:
        sentinels.append(id_)
    named = tokenizer.named
    return Specials(
        end=tokenizer.eos_ids[0] if tokenizer.eos_ids else None,
        pad=ids.get(named.get("pad_token", "")),
        mask=ids.get(named.get("mask_token", "")),
        sentinels=tuple(sentinels),
    )


def _required(settings: Settings, role: str, id_: int | None) -> int:
    if id_ is None:
        raise InputError(
            f"has no {role}, which the objective {settings.objective} needs",
            field="data.tokenizer",
            value=settings.tokenizer,
            fix="train one with it: asbuilt tokenizer train --help",
        )
    return id_


def _spans(settings: Settings, sentinels: tuple[int, ...], end_id: int, start_id: int) -> SpanCorruption:
    return SpanCorruption.reading(
        settings.context, sentinels=sentinels, end_id=end_id, start_id=start_id, density=settings.rate
    )


def _objective(settings: Settings, has: Specials, n_vocab: int) -> Objective:
    context = settings.context
    if settings.objective == "masked":
        never = tuple(id_ for id_ in (has.end, has.pad, has.mask) if id_ is not None)
        mask_id = _required(settings, "mask_token", has.mask)
        rate, apart = settings.rate, settings.document_mask
        return Masked(context=context, mask_id=mask_id, n_vocab=n_vocab, rate=rate, never=never, apart=apart)
    if settings.objective == "spans":
        end, pad = _required(settings, "eos_token", has.end), _required(settings, "pad_token", has.pad)
        return _spans(settings, has.sentinels, end, pad)
    if settings.objective == "prefix":
        return Prefix(context=context)
    if settings.objective == "prefix-encoder":
        pad = _required(settings, "pad_token", has.pad)
        return Prefix(context=context, start_id=pad, pad_id=pad)
    return NextToken(context=context, separate=settings.separate, apart=settings.document_mask)


def _pairs(settings: Settings, seed: int, root: Path) -> tuple[Data, Vocabulary]:
    """Returns the pairs of JSON lines with a source and a target."""
    names = _names(settings, root)
    tokenizer = Tokenizer.from_file(_tokenizer(settings, names, root))
    has = specials_of(tokenizer)
    end, pad = _required(settings, "eos_token", has.end), _required(settings, "pad_token", has.pad)
    pairs = [pair for name in names for pair in _read_pairs(name, tokenizer)]
    at = len(pairs) - round(len(pairs) * settings.validation)
    objective = SequenceToSequence(
        source_length=settings.context, target_length=settings.target, end_id=end, start_id=pad, pad_id=pad
    )
    held_out = pairs[at:]
    data = PairData(pairs=pairs[:at], objective=objective, batch_size=settings.batch, seed=seed, held_out=held_out)
    return data, Vocabulary(tokenizer=tokenizer)


def _read_pairs(name: str, tokenizer: Tokenizer) -> Pairs:
    if not name.endswith(JSON_LINES):
        raise InputError("has no pairs", field="data.text", value=name, allowed=f"a file that ends in {JSON_LINES}")
    found: Pairs = []
    with open_regular(Path(name)) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                said = parse_json(line.decode(errors="replace"), f"{name}: line {number}", finite=False)
                texts = [said.get(key) for key in own_texts.PAIR] if isinstance(said, dict) else [None]
                if not all(isinstance(text, str) for text in texts):
                    wanted = 'an object with strings "source" and "target"'
                    raise InputError("is no pair", field=f"{name}: line {number}", allowed=wanted)
                source, target = (tokenizer.encode(str(text)) for text in texts)
                found.append((source, target))
    return found

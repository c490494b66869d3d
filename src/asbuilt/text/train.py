"""Trains byte-level BPE tokenizers with the `tokenizers` library. `asbuilt.text.bpe` states what it computes.

The vocabulary is the 256 bytes, then the tokens that merges make in the order of rank, then the special tokens, whose
text is not learned from. Any bytes can be spelled, so a vocabulary of 256 needs no training.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from asbuilt.errors import InputError, near, one_of
from asbuilt.text.bpe import byte_order
from asbuilt.text.pretokenizers import PRE_TOKENIZERS
from asbuilt.text.tokenizer import BYTE_OF, Tokenizer
from asbuilt.text.tokenizer_worker import MOST_ENTRIES

BYTES = 256
# The published patterns by the name of the vocabulary that introduced each, without other settings of its tokenizer.
PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt2": PRE_TOKENIZERS["gpt-2"].patterns,
    "cl100k": PRE_TOKENIZERS["llama-bpe"].patterns,
    "o200k": PRE_TOKENIZERS["gpt-4o"].patterns,
    "none": (),
}
ROLES = ("eos_token", "bos_token", "pad_token", "mask_token")
SENTINEL = "<extra_id_{}>"  # of span corruption, as T5 names them
MOMENT = 0.1  # seconds


def pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Returns the library's pre-tokenizer: split by the pattern, then bytes as characters."""
    if pattern not in PATTERNS:
        raise InputError(field="pattern", value=pattern, allowed=one_of(PATTERNS), fix=near(pattern, PATTERNS))
    cuts = [pre_tokenizers.Split(Regex(one), "isolated") for one in PATTERNS[pattern]]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def pre_tokens(text: str, pattern: str) -> list[bytes]:
    """Returns the pre-tokens of a text: the pieces that no merge crosses."""
    return [characters(piece) for piece, _ in pre_tokenizer(pattern).pre_tokenize_str(text)]


def characters(piece: str) -> bytes:
    """Returns the bytes that byte-level vocabularies spell by these characters."""
    return bytes(BYTE_OF[character] for character in piece)


def train(
    texts: Iterable[str],
    n_vocab: int,
    *,
    pattern: str = "gpt2",
    special: Sequence[str] = (),
    roles: Mapping[str, str] | None = None,
    min_count: int = 2,
) -> Tokenizer:
    """Returns a byte-level BPE tokenizer of exactly `n_vocab` tokens, learned from texts in memory or read as needed.

    `special` are control tokens; `roles` name some more of them: `eos_token`, `bos_token`, `pad_token`, `mask_token`.
    A pair that occurs fewer than `min_count` times is not merged. With the pattern `none`, merges cross everything but
    line ends. Raises InputError for sizes below 256 and the special tokens or above what the texts allow.
    """
    roles = roles or {}
    added = list(dict.fromkeys((*special, *roles.values())))
    _require(n_vocab, added, roles, min_count)
    cuts = pre_tokenizer(pattern)
    learned = n_vocab - len(added)
    inner = _trained(texts, learned, cuts, pattern, added, min_count) if learned > BYTES else _untrained(cuts)
    for token in added:
        if inner.token_to_id(token) is not None:
            problem = "spelled like a token that was learned"
            raise InputError(problem, field="special", value=token, fix="choose another text: <|end|>")
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    bos, eos = (inner.token_to_id(roles[role]) if role in roles else None for role in ("bos_token", "eos_token"))
    return Tokenizer(inner, bos_id=bos, eos_ids=() if eos is None else (eos,), config=dict(roles))


def _require(n_vocab: int, added: Sequence[str], roles: Mapping[str, str], min_count: int) -> None:
    """Raises InputError for numbers and special tokens that no text makes right."""
    least = BYTES + len(added)
    if not least <= n_vocab <= MOST_ENTRIES:
        allowed = f"{least:,} (256 bytes and {len(added)} special tokens) to {MOST_ENTRIES:,}"
        raise InputError(field="vocab_size", value=n_vocab, allowed=allowed)
    for token in added:
        if not token or any(character.isspace() for character in token) or not token.isprintable():
            raise InputError(field="special", value=token, allowed="printable characters without spaces")
    for role in roles:
        if role not in ROLES:
            raise InputError(field="roles", value=role, allowed=one_of(ROLES), fix=near(role, ROLES))
    if min_count < 1:
        raise InputError(field="min_count", value=min_count, allowed="at least 1")


def _untrained(cuts: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    """Returns the tokenizer of the 256 bytes."""
    character = {byte: character for character, byte in BYTE_OF.items()}
    ids = {character[token[0]]: id_ for id_, token in enumerate(byte_order())}
    return _around(models.BPE(vocab=ids, merges=[]), cuts)


def _around(model: models.BPE, cuts: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = cuts
    inner.decoder = decoders.ByteLevel()
    return inner


def _trained(
    texts: Iterable[str],
    size: int,
    cuts: pre_tokenizers.PreTokenizer,
    pattern: str,
    added: Sequence[str],
    min_count: int,
) -> tokenizers.Tokenizer:
    """Returns the tokenizer of `size` tokens, before special ones are added; InputError if the texts give fewer."""
    inner, read = _around(models.BPE(), cuts), _Read(texts, added, lines=not PATTERNS[pattern])
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=min_count,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _aside(lambda: inner.train_from_iterator(iter(read), trainer), read)
    if not read.characters:
        raise InputError("empty", field="texts", allowed="a text to learn merges from", fix="or a vocabulary of 256")
    if (reached := inner.get_vocab_size()) < size:
        whole = reached + len(added)
        often = f" that occur at least {min_count} times" if min_count > 1 else ""
        raise InputError(
            f"the text has no more pairs{often} to merge after {whole:,} tokens",
            field="vocab_size",
            value=size + len(added),
            allowed=f"at most {whole:,}",
            fix="give more text or ask for fewer tokens",
        )
    return inner


class _Read:
    """The texts without the special tokens in them, and how many characters they have.

    Without a pattern a text would be one word, so it is read line by line.
    """

    def __init__(self, texts: Iterable[str], added: Sequence[str], *, lines: bool) -> None:
        self._texts, self._lines = texts, lines
        longest_first = sorted(added, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if added else None
        self.characters, self.error = 0, None
        self.stop = False

    def __iter__(self) -> Iterator[str]:
        """Yields the parts; ends early and keeps the error where a text cannot be read, as the library has no way."""
        self.error: BaseException | None = None
        try:
            for text in self._texts:
                _require_text(text)
                for part in self._special.split(text) if self._special else (text,):
                    self.characters += len(part)
                    yield from part.splitlines(keepends=True) if self._lines else (part,)
                if self.stop:
                    return
        except BaseException as error:
            self.error = error


def _require_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError("the text has lone surrogates, which cannot be encoded", value=text) from error


def _aside(work: Callable[[], None], read: _Read) -> None:
    """Runs the library in a thread, so that Ctrl-C ends the wait for it, and raises what reading raised."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(MOMENT)
    finally:
        read.stop = True
    if read.error is not None:
        raise read.error
    if failed:
        raise failed[0]

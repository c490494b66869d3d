"""The vocabulary of a GGUF file as a tokenizer of the `tokenizers` library.

Byte-level BPE (`gpt2`), SentencePiece's BPE (`llama`) and Unigram (`t5`), and WordPiece (`bert`). Of the last a file
has words with ▁ before them and what continues a word as it is, where BERT's vocabulary has words as they are and ##
before the others; whether texts are lower-cased, it does not say: they are where no word has a capital letter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from asbuilt.errors import InputError
from asbuilt.formats.gguf import GGUFFile
from asbuilt.text.pretokenizers import pre_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # llama.cpp's token types
MAX_PIECE = 512  # characters of a token whose merges are reconstructed; SentencePiece's own limit is 16
MOST_ADDED = 1 << 16  # tokens that are matched before pre-tokenization; Gemma 3 has 6,415
MOST_LETTERS = 1 << 22  # characters in total; Gemma's 256,000 tokens have 1.8 million
SPACE = "▁"
# Special ids of files that do not say them: SentencePiece's, T5's and BERT's own.
USUAL = {
    "llama": {"unknown": 0, "bos": 1, "eos": 2},
    "t5": {"padding": 0, "eos": 1, "unknown": 2},
    "bert": {"padding": 0, "unknown": 100, "bos": 101, "seperator": 102, "mask": 103},
}
MOST_CHARSMAP = 1 << 22  # bytes; T5's has 240 kB
CONTINUES = "##"
MOST_LETTERS_OF_A_WORD = 100  # a longer one is unknown, as in the published vocabularies


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The `tokenizer.ggml.*` keys of a file, checked for consistency; ids are positions in `tokens`."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    bos: int | None
    eos: tuple[int, ...]
    unknown: int | None
    padding: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    separator: int | None = None  # what ends a text and stands between two, of `bert`
    mask: int | None = None
    charsmap: bytes = b""  # how `t5` replaces characters first, as SentencePiece compiles it
    squeeze: bool = False  # whether `t5` takes several spaces for one, and none at the ends


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Returns the vocabulary of a GGUF file; InputError where keys are missing, disagree or have the wrong type."""
    read = _Reader(file)
    model = read.one("model", str, None)
    tokens = read.many("tokens", str, None, None)
    n = len(tokens)
    if len(set(tokens)) != n:
        twice = next(token for token, seen in _repeats(tokens) if seen)
        raise InputError("duplicate token", field=read.key("tokens"), value=twice)
    spm = model == "llama"
    pre = pre_tokenizer(read.one("pre", str, "default")) if model == "gpt2" else None
    # Without special ids, a SentencePiece file uses SentencePiece's defaults, and a byte-level file has none.
    said = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "mask")  # the format spells it so
    ids = {name: read.token(f"{name}_token_id", n) for name in said}
    usual = USUAL.get(model, {})
    ids |= {name: id_ for name, id_ in usual.items() if ids[name] is None and id_ < n}
    return Vocabulary(
        model=model,
        pre=read.one("pre", str, "default"),
        tokens=tokens,
        types=read.many("token_type", int, n, [NORMAL] * n),
        scores=read.many("scores", float, n, None) if model in ("llama", "t5") else [],
        merges=[] if model in USUAL else read.many("merges", str, None, None),
        bos=ids["bos"],
        eos=tuple(dict.fromkeys(id_ for id_ in (ids["eos"], ids["eot"], ids["eom"]) if id_ is not None)),
        unknown=ids["unknown"],
        padding=ids["padding"],
        add_bos=read.one("add_bos_token", bool, spm or model == "bert" or (pre is not None and pre.add_bos)),
        add_eos=read.one("add_eos_token", bool, model == "t5"),
        add_space_prefix=read.one("add_space_prefix", bool, model in ("llama", "t5")),
        separator=ids["seperator"],
        mask=ids["mask"],
        charsmap=read.bytes("precompiled_charsmap") if model == "t5" else b"",
        squeeze=read.one("remove_extra_whitespaces", bool, True) if model == "t5" else False,
    )


class _Reader:
    """Reads and validates `tokenizer.ggml.*` keys; a default of None means that the key is required."""

    def __init__(self, file: GGUFFile) -> None:
        self.metadata = file.metadata

    @staticmethod
    def key(name: str) -> str:
        return f"tokenizer.ggml.{name}"

    def one(self, name: str, kind: type, default: Any) -> Any:  # noqa: ANN401  of type `kind`
        value = self.metadata.get(self.key(name), default)
        if value is None:
            raise InputError("missing, so the file has no usable tokenizer", field=self.key(name))
        if type(value) is not kind:
            raise InputError("wrong type", field=self.key(name), value=value, allowed=kind.__name__)
        return value

    def many(self, name: str, kind: type, length: int | None, default: list[Any] | None) -> list[Any]:
        values = self.one(name, list, default)
        wrong = next((value for value in values if type(value) is not kind), None)
        if wrong is not None:
            raise InputError("wrong element type", field=self.key(name), value=wrong, allowed=kind.__name__)
        if length is not None and len(values) != length:
            raise InputError(
                "wrong length", field=self.key(name), value=len(values), allowed=f"{length}, the number of tokens"
            )
        return values

    def bytes(self, name: str) -> bytes:
        values = self.one(name, list, [])
        if len(values) > MOST_CHARSMAP or not all(type(one) is int and -128 <= one < 256 for one in values):
            allowed = f"at most {MOST_CHARSMAP:,} bytes"
            raise InputError("wrong bytes", field=self.key(name), value=len(values), allowed=allowed)
        return b"".join((one & 255).to_bytes() for one in values)

    def token(self, name: str, n_vocab: int) -> int | None:
        if self.key(name) not in self.metadata:
            return None
        value = self.one(name, int, None)
        if not 0 <= value < n_vocab:
            raise InputError(
                "id outside the vocabulary", field=self.key(name), value=value, allowed=f"0 to {n_vocab - 1}"
            )
        return value


def _repeats(tokens: list[str]) -> Iterator[tuple[str, bool]]:
    seen: set[str] = set()
    for token in tokens:
        yield token, token in seen
        seen.add(token)


def build(vocabulary: Vocabulary) -> Tokenizer:
    """Returns the tokenizer that the vocabulary describes; InputError for a model that is not known."""
    makers: dict[str, Callable[[Vocabulary], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}
    makers |= {"t5": _unigram, "bert": _word_pieces}
    make = makers.get(vocabulary.model)
    if make is None:
        key, known = "tokenizer.ggml.model", ", ".join(makers)
        raise InputError("unsupported tokenizer", field=key, value=vocabulary.model, allowed=known)
    tokenizer = make(vocabulary)
    _add_tokens(tokenizer, vocabulary)
    _add_template(tokenizer, vocabulary)
    return tokenizer


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    pre = pre_tokenizer(vocabulary.pre)
    ids = {token: id_ for id_, token in enumerate(vocabulary.tokens)}
    merges = [_merge(text, ids) for text in vocabulary.merges]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    # `add_space_prefix` belongs to SentencePiece; GGUF readers ignore it here.
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merge(text: str, ids: dict[str, int]) -> tuple[str, str]:
    left, _, right = text[1:].partition(" ")  # a token is never empty, so the first character is the left one's
    left = text[:1] + left
    if left in ids and right in ids and left + right in ids:
        return left, right
    raise InputError("a merge names tokens outside the vocabulary", field="tokenizer.ggml.merges", value=text)


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    ids = {token: id_ for id_, token in enumerate(vocabulary.tokens)}
    unknown = None if vocabulary.unknown is None else vocabulary.tokens[vocabulary.unknown]
    model = models.BPE(vocab=ids, merges=merges(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = [normalizers.Prepend(SPACE)] if vocabulary.add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.add_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _unigram(vocabulary: Vocabulary) -> Tokenizer:
    scored = list(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    if vocabulary.unknown is None:
        raise InputError("missing", field="tokenizer.ggml.unknown_token_id")
    wrong = next((score for score in vocabulary.scores if not math.isfinite(score)), None)
    if wrong is not None:
        raise InputError("is no number", field="tokenizer.ggml.scores", value=wrong, allowed="finite numbers")
    fallback = BYTE in vocabulary.types
    tokenizer = Tokenizer(models.Unigram(vocab=scored, unk_id=vocabulary.unknown, byte_fallback=fallback))
    if vocabulary.charsmap:
        try:
            tokenizer.normalizer = normalizers.Precompiled(vocabulary.charsmap)
        except Exception as error:  # the library has no class of its own
            key = "tokenizer.ggml.precompiled_charsmap"
            raise InputError("is none that SentencePiece makes", field=key, value=len(vocabulary.charsmap)) from error
    scheme = "always" if vocabulary.add_space_prefix else "never"
    spaces = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)
    split = [pre_tokenizers.WhitespaceSplit(), spaces] if vocabulary.squeeze else [spaces]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    return tokenizer


def _word_pieces(vocabulary: Vocabulary) -> Tokenizer:
    if vocabulary.unknown is None:
        raise InputError("missing", field="tokenizer.ggml.unknown_token_id")
    typed = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    ids = {piece(token, type_): id_ for id_, (token, type_) in enumerate(typed)}
    lower = all(token == token.lower() for token, type_ in typed if type_ == NORMAL and not token.startswith("▁["))
    unknown = vocabulary.tokens[vocabulary.unknown]
    model = models.WordPiece(vocab=ids, unk_token=unknown, max_input_chars_per_word=MOST_LETTERS_OF_A_WORD)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(CONTINUES)
    return tokenizer


def piece(token: str, type_: int) -> str:
    """Returns a token of a `bert` file as WordPiece has it."""
    if type_ in (CONTROL, UNKNOWN):
        return token
    return token[len(SPACE) :] if token.startswith(SPACE) else CONTINUES + token


def merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Returns the pairs of normal tokens that merge into a normal token, best score first.

    SentencePiece joins whichever neighbours make the token of the best score; a list of merges in the order of that
    score does the same, except where two splits of one token overlap in the text, when SentencePiece takes the left.
    """
    scored = zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True)
    score = {token: value for token, type_, value in scored if type_ == NORMAL}
    longest = max(map(len, score), default=0)
    if longest > MAX_PIECE:
        raise InputError(
            "a token is too long",
            field="tokenizer.ggml.tokens",
            value=longest,
            allowed=f"at most {MAX_PIECE} characters",
        )
    letters = sum(map(len, score))
    if letters > MOST_LETTERS:
        raise InputError(
            "the tokens are too long in total",
            field="tokenizer.ggml.tokens",
            value=letters,
            allowed=f"at most {MOST_LETTERS:,} characters",
        )
    whole = sorted(score, key=lambda token: -score[token])
    pairs = ((token[:at], token[at:]) for token in whole for at in range(1, len(token)))
    return [(left, right) for left, right in pairs if left in score and right in score]


def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Declares the tokens that are matched before pre-tokenization; decoding hides only the special ones."""
    typed = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    if vocabulary.model == "bert":
        typed = [(piece(token, type_), type_) for token, type_ in typed]
    special = [token for token, type_ in typed if type_ in (CONTROL, UNKNOWN) and token]
    plain = [token for token, type_ in typed if type_ == USER_DEFINED and token]
    if len(special) + len(plain) > MOST_ADDED:
        raise InputError(
            "too many control and user-defined tokens",
            field="tokenizer.ggml.token_type",
            value=len(special) + len(plain),
            allowed=f"at most {MOST_ADDED:,}",
        )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def _add_template(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Makes the tokenizer add `bos` and `eos`, if the file asks for it."""
    bert = vocabulary.model == "bert"
    first = vocabulary.bos if vocabulary.add_bos else None
    last = vocabulary.eos[0] if vocabulary.add_eos and vocabulary.eos else None
    last = vocabulary.separator if bert else last
    ends = {vocabulary.tokens[id_]: id_ for id_ in (first, last) if id_ is not None}
    if not ends:
        return
    # A token's text may contain ':' or ' ', which are syntax in the template, so it gets another name.
    specials = [{"id": f"T{id_}", "ids": [id_], "tokens": [token]} for token, id_ in ends.items()]
    left = [] if first is None else [f"T{first}"]
    right = [] if last is None else [f"T{last}"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*left, "$A:0", *right],
        pair=[*left, "$A:0", *right, *([] if bert else left), "$B:1", *(f"{one}:1" for one in right)],
        special_tokens=specials,
    )

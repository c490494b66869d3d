"""A tokenizer.json as the `tokenizer.ggml.*` keys of a GGUF file: the inverse of `gguf_vocab`.

The file says by a name how texts are split (`pretokenizers`), and has scores in place of a SentencePiece model's
merges. What it cannot say is refused: what is written is built again and has to split some texts as the original does.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from asbuilt.errors import InputError, one_of
from asbuilt.files import read_object
from asbuilt.formats.gguf import ARRAY, GGUFFile
from asbuilt.formats.gguf_write import Typed
from asbuilt.text.gguf_vocab import (
    BYTE,
    CONTINUES,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    merges,
    read_vocabulary,
)
from asbuilt.text.pretokenizers import GPT2, PRE_TOKENIZERS
from asbuilt.text.tokenizer import Tokenizer
from asbuilt.text.tokenizer_worker import LARGEST_FILE, MOST_ENTRIES

Tokens = dict[str, Any]
KINDS = "BPE, Unigram, WordPiece"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Patterns that differ in spelling alone from those known.
SPELLINGS = {r" ?[^(\s|[.,!?…。，、।۔،])]+": PRE_TOKENIZERS["bloom"].patterns[0]}
NEVER = -1e9  # the score of a token that no merge gives
# What both tokenizers have to split alike: letters of several scripts, numbers, signs, spaces and lines.
SAMPLES = (
    "The quick brown fox doesn't jump over 12,345.67 lazy dogs.",
    "  two  spaces\tand\n\n\nlines \r\n  if x >= 10:\n        return [i**2 for i in range(2024)]  # ok",
    "Größe, naïve café; ЁЛКА и мир. 你好，世界！ 今日は3.14です। नमस्ते दुनिया مرحبا ١٢٣",
    "HTTPServer2Client's WE'LL i'm 'S ``quotes'' <tag/> a_b-c~d|e^f $5 100% 🎉👩‍👩‍👧 ﬁ é",
)


def tokenizer_keys(tokenizer: Tokenizer, path: Path, n_vocab: int) -> Tokens:
    """Returns the keys of the tokenizer in the file `path`, for a model whose table has `n_vocab` rows.

    Raises InputError for kinds of tokenizers and settings that a GGUF file cannot say or asbuilt does not write.
    """
    said = read_object(path, LARGEST_FILE, most_values=8 * MOST_ENTRIES, finite=False)
    model, where = said.get("model"), str(path)
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if isinstance(model, dict) and kind in ("WordPiece", "Unigram"):
        makers = {"WordPiece": word_piece_keys, "Unigram": unigram_keys}
        return _named(makers[kind](said, model, tokenizer, n_vocab, where), tokenizer, [], where)
    if not isinstance(model, dict) or kind != "BPE" or not isinstance(model.get("merges"), list):
        raise InputError("cannot be written to a GGUF file", field=f"{where}: model.type", value=kind, allowed=KINDS)
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise _unsaid(where, f"model.{key}", model[key], "none")
    pairs = [_pair(one, where) for one in model["merges"]]
    spm = bool(model.get("byte_fallback"))
    keys = _sentencepiece(said, where) if spm else _byte_level(said, model, where)
    tokens, types = _vocabulary(said, model, n_vocab, where)
    unknown = model.get("unk_token")
    if spm and unknown in tokens:
        types[tokens.index(unknown)] = UNKNOWN
    keys |= {"tokens": tokens, "token_type": types}
    keys |= {"scores": _scores(tokens, pairs)} if spm else {"merges": [" ".join(pair) for pair in pairs]}
    keys |= _specials(tokenizer, tokens, unknown)
    return _named(keys, tokenizer, pairs if spm else [], where)


def _named(keys: Tokens, tokenizer: Tokenizer, pairs: list[tuple[str, str]], where: str) -> Tokens:
    """Returns the keys under their full names, with the chat template; refuses those that would split otherwise."""
    found = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    if tokenizer.chat_template is not None:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    _require_same(found, tokenizer, pairs, where)
    return found


def word_piece_keys(said: Tokens, model: Tokens, tokenizer: Tokenizer, n_vocab: int, where: str) -> Tokens:
    """Returns the keys of a WordPiece vocabulary: words with ▁ before them, what continues one as it is."""
    if model.get("continuing_subword_prefix", CONTINUES) != CONTINUES:
        raise _unsaid(where, "model.continuing_subword_prefix", model["continuing_subword_prefix"], CONTINUES)
    steps = [step.get("type") for step in (said.get("normalizer") or {}, said.get("pre_tokenizer") or {})]
    if steps != ["BertNormalizer", "BertPreTokenizer"]:
        raise _unsaid(where, "normalizer, pre_tokenizer", steps, "BertNormalizer and BertPreTokenizer")
    tokens, types = _vocabulary(said, model, n_vocab, where)
    named = {name: tokenizer.named.get(f"{name}_token") for name in ("cls", "sep", "unk", "pad", "mask")}
    types = [CONTROL if token in named.values() else type_ for token, type_ in zip(tokens, types, strict=True)]
    ids = {name: tokens.index(token) for name, token in named.items() if token in tokens}
    missing = [name for name in ("cls", "sep", "unk") if name not in ids]
    if missing:
        raise _unsaid(where, f"{missing[0]}_token", None, "a token of the vocabulary")
    written = [_phantom(token, type_) for token, type_ in zip(tokens, types, strict=True)]
    keys: Tokens = {"model": "bert", "pre": "default", "tokens": written, "token_type": types}
    spelled = {"cls": "bos", "sep": "seperator", "unk": "unknown", "pad": "padding", "mask": "mask"}
    return keys | {f"{spelled[name]}_token_id": id_ for name, id_ in ids.items()}


def _phantom(token: str, type_: int) -> str:
    if type_ in (CONTROL, UNKNOWN):
        return token
    return token.removeprefix(CONTINUES) if token.startswith(CONTINUES) else SPACE + token


def unigram_keys(said: Tokens, model: Tokens, tokenizer: Tokenizer, n_vocab: int, where: str) -> Tokens:
    """Returns the keys of a Unigram vocabulary: its scores, and how characters are replaced before."""
    pairs, unknown = model.get("vocab") or [], model.get("unk_id")
    if type(unknown) is not int or not 0 <= unknown < len(pairs):
        raise _unsaid(where, "model.unk_id", unknown, "the id of a token")
    vocab = {token: id_ for id_, (token, _) in enumerate(pairs)}
    tokens, types = _vocabulary(said, model | {"vocab": vocab}, n_vocab, where)
    types[unknown] = UNKNOWN
    scores = [float(score) for _, score in pairs] + [0.0] * n_vocab
    keys: Tokens = {"model": "t5", "pre": "default", "tokens": tokens, "token_type": types}
    keys |= {"scores": scores[:n_vocab], **_unigram_steps(said, where)}
    return keys | _specials(tokenizer, tokens, tokens[unknown]) | {"unknown_token_id": unknown}


def _unigram_steps(said: Tokens, where: str) -> Tokens:
    """Returns what is done before words are looked up; steps that a file cannot say are refused."""
    keys: Tokens = {"add_space_prefix": False, "remove_extra_whitespaces": False}
    steps = [*_steps(said.get("normalizer"), "normalizers"), *_steps(said.get("pre_tokenizer"), "pretokenizers")]
    for step in steps:
        match step:
            case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)} if "precompiled_charsmap" not in keys:
                keys["precompiled_charsmap"] = Typed((ARRAY, 0), list(b64decode(charsmap)))
            case {"type": "WhitespaceSplit"}:
                keys["remove_extra_whitespaces"] = True
            case {"type": "Metaspace", "replacement": "▁"}:
                scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
                keys["add_space_prefix"] = scheme != "never"
            case _:
                allowed = "Precompiled, WhitespaceSplit and Metaspace"
                raise _unsaid(where, "normalizer, pre_tokenizer", step, allowed)
    return keys


def _unsaid(where: str, key: str, value: object, allowed: str) -> InputError:
    return InputError("a GGUF file cannot say this", field=f"{where}: {key}", value=value, allowed=allowed)


def _pair(said: Any, where: str) -> tuple[str, str]:  # noqa: ANN401
    """Returns a merge, which older files have as one string."""
    pair = tuple(said.split(" ")) if isinstance(said, str) else tuple(said) if isinstance(said, list) else ()
    if len(pair) != 2 or not all(isinstance(one, str) and one and " " not in one for one in pair):
        raise _unsaid(where, "model.merges", said, "two tokens without spaces")
    return pair


def _steps(said: Any, name: str) -> list[dict[str, Any]]:  # noqa: ANN401
    """Returns the steps of a normalizer or pre-tokenizer, whose sequences are called `name`."""
    if said is None:
        return []
    inner = said.get(name) if said.get("type") == "Sequence" else None
    return [said] if inner is None else [step for one in inner for step in _steps(one, name)]


def _byte_level(said: Tokens, model: Tokens, where: str) -> Tokens:
    """Returns how texts are split; the name is the first of those whose patterns are these."""
    steps = _steps(said.get("pre_tokenizer"), "pretokenizers")
    patterns = tuple(pattern for step in steps for pattern in _patterns(step, where))
    forms = [step.get("type") for step in _steps(said.get("normalizer"), "normalizers")]
    if forms not in ([], ["NFC"]) or not any(step.get("type") == "ByteLevel" for step in steps):
        kinds = [*forms, *(step.get("type") for step in steps)]
        raise _unsaid(where, "normalizer, pre_tokenizer", kinds, "NFC or none, and ByteLevel")
    wanted = (patterns, forms == ["NFC"], bool(model.get("ignore_merges")))
    known = ((name, (pre.patterns, pre.nfc, pre.ignore_merges)) for name, pre in PRE_TOKENIZERS.items())
    name = next((name for name, has in known if has == wanted or not model["merges"]), None)  # splits stop merges alone
    if name is None:
        raise _unsaid(where, "pre_tokenizer", wanted, f"a split that has a name: {one_of(PRE_TOKENIZERS)}")
    return {"model": "gpt2", "pre": name}


def _patterns(step: dict[str, Any], where: str) -> Iterator[str]:
    """Yields the patterns by which one step splits."""
    match step:
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": behavior} if (
            behavior,
            bool(step.get("invert")),
        ) in (("Isolated", False), ("Removed", True)):
            yield SPELLINGS.get(pattern, pattern)
        case {"type": "Digits", "individual_digits": bool(single)}:
            yield r"\p{N}" if single else r"\p{N}+"
        case {"type": "ByteLevel", "add_prefix_space": False}:
            if step.get("use_regex", True):
                yield GPT2
        case _:
            raise _unsaid(where, "pre_tokenizer", step, "Split, Digits and ByteLevel without a prefix space")


def _sentencepiece(said: Tokens, where: str) -> Tokens:
    """Returns whether a text gets a space in front; steps other than those that write spaces as ▁ are refused."""
    steps = [*_steps(said.get("normalizer"), "normalizers"), *_steps(said.get("pre_tokenizer"), "pretokenizers")]
    prefix = spaces = False
    for step in steps:
        match step:
            case {"type": "Prepend", "prepend": "▁"}:
                prefix = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                spaces = True
            case {"type": "Metaspace", "replacement": "▁"} if not step.get("split", True):
                scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
                prefix, spaces = scheme != "never", True
            case {"type": "Split", "pattern": {"String": " "}} if spaces:
                pass  # there are none left
            case _:
                raise _unsaid(where, "normalizer, pre_tokenizer", step, f"spaces written as {SPACE}")
    if not spaces:
        raise _unsaid(where, "normalizer, pre_tokenizer", "none", f"spaces written as {SPACE}")
    return {"model": "llama", "pre": "default", "add_space_prefix": prefix}


def _vocabulary(said: Tokens, model: Tokens, n_vocab: int, where: str) -> tuple[list[str], list[int]]:
    """Returns each row's token and type; rows without a token get a name that no text has."""
    by_id: dict[int, tuple[str, int]] = {}
    for token, id_ in model.get("vocab", {}).items():
        by_id[id_] = token, BYTE if model.get("byte_fallback") and BYTE_TOKEN.fullmatch(token) else NORMAL
    for added in said.get("added_tokens") or []:
        by_id[added["id"]] = added["content"], CONTROL if added.get("special") else USER_DEFINED
    wrong = next((id_ for id_ in by_id if type(id_) is not int or not 0 <= id_ < n_vocab), None)
    if wrong is not None:
        raise InputError("a token beyond the model's table", field=where, value=wrong, allowed=f"0 to {n_vocab - 1}")
    rows = [by_id.get(id_, (f"[PAD{id_}]", UNUSED)) for id_ in range(n_vocab)]
    return [token for token, _ in rows], [kind for _, kind in rows]


def _scores(tokens: list[str], pairs: list[tuple[str, str]]) -> list[float]:
    """Returns the scores by which SentencePiece merges in the order of these pairs: the earlier, the higher."""
    rank: dict[str, int] = {}
    for left, right in pairs:
        rank.setdefault(left + right, len(rank))
    return [-float(rank[token]) if token in rank else NEVER for token in tokens]


def _specials(tokenizer: Tokenizer, tokens: list[str], unknown: str | None) -> Tokens:
    """Returns the special tokens' ids, and whether a text is put between them."""
    ends = dict(zip(("eos", "eot", "eom"), tokenizer.eos_ids, strict=False))
    named = {"unknown": tokenizer.named.get("unk_token", unknown), "padding": tokenizer.named.get("pad_token")}
    ids: dict[str, int | None] = {"bos": tokenizer.bos_id, **ends}
    ids |= {name: tokens.index(token) for name, token in named.items() if token in tokens}
    closing = tokenizer.wrapped("a")[2]
    return {
        **{f"{name}_token_id": id_ for name, id_ in ids.items() if id_ is not None},
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": bool(closing) and closing[0] in tokenizer.eos_ids,
    }


def _require_same(keys: Tokens, tokenizer: Tokenizer, pairs: list[tuple[str, str]], where: str) -> None:
    """Raises InputError unless what is written splits as the original does."""
    plain = {key: value.value if isinstance(value, Typed) else value for key, value in keys.items()}
    file = GGUFFile(path=Path(where), metadata=plain, tensors={})
    if pairs:
        again = merges(read_vocabulary(file))
        order = ([token for token, _ in groupby(left + right for left, right in some)] for some in (pairs, again))
        if set(pairs) != set(again) or next(order) != next(order):
            raise _unsaid(where, "model.merges", len(pairs), "the merges that a score for each token gives")
    written = Tokenizer.from_gguf(file)
    # Metaspace adds no space to a text that begins with one, where SentencePiece and files of it do
    prefix = keys.get("tokenizer.ggml.add_space_prefix") and not keys.get("tokenizer.ggml.remove_extra_whitespaces")
    for text in (text.lstrip(" ") if prefix else text for text in SAMPLES):
        if written.encode(text, wrap=True) != tokenizer.encode(text, wrap=True):
            raise InputError("would split texts differently in a GGUF file", field=where, value=text)

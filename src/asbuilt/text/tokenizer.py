"""One tokenizer class for all sources: `tokenizer.json` with the files beside it, and the vocabulary of a GGUF file.

A tokenizer.json is untrusted and runs in a separate process within limits; from a GGUF's vocabulary a tokenizer is
built in this process. Two guarantees go beyond the underlying library. Text is only text: a control token spelled out
in it (`<|im_end|>`) is encoded as ordinary characters unless `special=True`. And decoding concatenates bytes, one piece
per id, so that streaming yields exactly the text of decoding all ids at once.
"""

from __future__ import annotations

import codecs
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from asbuilt.errors import InputError
from asbuilt.files import read_object, read_text, require_regular
from asbuilt.formats.gguf import GGUFFile
from asbuilt.text.ends import declared_ends
from asbuilt.text.gguf_vocab import SPACE, Vocabulary, build, read_vocabulary
from asbuilt.text.tokenizer_worker import LARGEST_FILE, Distant, Engine, Library

TOKENIZER, CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
TEMPLATE, OLD_TEMPLATE, OLD_SPECIALS = "chat_template.jinja", "chat_template.json", "special_tokens_map.json"
MODEL_CONFIG = "config.json"
LARGEST_CONFIG, LARGEST_TEMPLATE = 1 << 24, 1 << 20  # bytes
SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token")
CODE = ("auto_map", "custom_code")  # keys that make transformers run code from the folder
# transformers' class of this name adds no special tokens to a text, whatever its tokenizer.json says.
UNWRAPPED = "GPTNeoXTokenizer"


@dataclass(frozen=True)
class Added:
    """A token that is matched before pre-tokenization: its text, and whether it absorbs adjacent spaces."""

    content: str
    special: bool
    lstrip: bool
    rstrip: bool


def _byte_characters() -> dict[str, int]:
    """Returns GPT-2's character for each byte: the byte itself if printable, otherwise the next from U+0100 on."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(256 + index): byte for index, byte in enumerate(rest)}


BYTE_OF = _byte_characters()


class Stream(Protocol):
    """Decodes ids one by one: the pushed texts and the last one, joined, equal `decode` of all ids."""

    def push(self, id_: int) -> str:
        """Returns the text that this id completes; never half a character."""
        ...

    def finish(self) -> str:
        """Returns the text held back, with U+FFFD for incomplete characters."""
        ...


class Tokenizer:
    """Text to ids and back. `bos_id` is None and `eos_ids` empty if the model has none.

    `add_bos` tells whether a text begins with `bos_id`; `encode` adds it, like all special tokens around a text, only
    with `wrap=True`. `named` maps the names that templates use (`bos_token`) to the special tokens' texts.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer | Library,
        *,
        bos_id: int | None = None,
        eos_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        tool_template: str | None = None,
        config: dict[str, Any] | None = None,
        name: str = "tokenizer",
    ) -> None:
        self._inner: Library = Engine(inner) if isinstance(inner, tokenizers.Tokenizer) else inner
        self._lock, self._name, self._config = threading.Lock(), name, config or {}
        self.bos_id, self.eos_ids = bos_id, eos_ids
        self.chat_template, self.tool_template = chat_template, tool_template
        with self._trying("not a tokenizer"):
            facts = self._inner.facts()
        self._added = {id_: Added(*said) for id_, *said in facts["added"] if said[0]}
        self._special = {id_: token for id_, token in self._added.items() if token.special}
        self._unknown, self._kind = facts["unknown"], _decoder_kind(facts["decoder"])
        self._wraps = str(self._config.get("tokenizer_class")).removesuffix("Fast") != UNWRAPPED
        self._pieces: dict[int, bytes] = {}
        ids = {"bos_token": bos_id, "eos_token": eos_ids[0] if eos_ids else None}
        own = {name: text for name, id_ in ids.items() if (text := self.token(id_)) is not None}
        self.named = own | _named(self._config)
        self.add_bos = bos_id is not None and self.encode("", wrap=True)[:1] == [bos_id]

    @contextmanager
    def _trying(self, problem: str) -> Iterator[None]:
        """Turns whatever the library raises, bare Exceptions and panics included, into InputError."""
        try:
            yield
        except (InputError, AssertionError):
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise InputError(f"{problem}: {error}", field=self._name) from error

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Reads `tokenizer.json`, or the folder that contains it, with the configs and chat template beside it.

        Raises InputError for a file that is missing, is not a tokenizer, or exceeds the limits.
        """
        path = Path(path)
        path = path / TOKENIZER if path.is_dir() else path
        nbytes = require_regular(path).st_size
        if nbytes > LARGEST_FILE:
            raise InputError("too large", field=str(path), value=nbytes, allowed=f"at most {LARGEST_FILE:,} bytes")
        config = _object(path.with_name(CONFIG))
        if "added_tokens_decoder" not in config:  # as transformers does
            config |= _specials(path.parent)
        chat, tools = _templates(path.parent, config)
        found = cls(Distant(path, nbytes), chat_template=chat, tool_template=tools, config=config, name=str(path))
        with found._trying("not a tokenizer"):
            found._name_ends(path.parent)
        return found

    def _name_ends(self, folder: Path) -> None:
        """Finds bos and all end tokens, from the tokenizer and the configs beside it."""
        bos, eos = (self.named.get(name) for name in ("bos_token", "eos_token"))
        self.bos_id = None if bos is None else self._inner.id(bos)
        own = () if eos is None else (self._inner.id(eos),)
        told = (id_ for name in (GENERATION, MODEL_CONFIG) for id_ in declared_ends(_object(folder / name), name))
        self.eos_ids = tuple(dict.fromkeys(id_ for id_ in (*own, *told) if id_ is not None))
        self.add_bos = self.bos_id is not None and self.encode("", wrap=True)[:1] == [self.bos_id]

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """Builds the tokenizer that a GGUF file's metadata describe; raises InputError if they are unusable."""
        vocabulary = read_vocabulary(file)
        template = file.metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise InputError(field="tokenizer.chat_template", value=template, allowed="a string")
        return cls(
            build(vocabulary),
            bos_id=None if vocabulary.model == "bert" else vocabulary.bos,  # which has [CLS] instead
            eos_ids=vocabulary.eos,
            chat_template=template,
            config=_config(vocabulary),
            name=str(file.path),
        )

    @property
    def max_tokens(self) -> int | None:
        """The longest text that the tokenizer's config allows; None if it is not stated, or is a huge placeholder."""
        said = self._config.get("model_max_length")
        return said if type(said) is int and 0 < said < 2**31 else None

    @cached_property
    def n_vocab(self) -> int:
        """The largest id, plus one."""
        return self._inner.n_vocab()

    def encode(self, text: str, *, special: bool = False, wrap: bool = False) -> list[int]:
        """Returns the ids of a text.

        With `special`, control tokens in the text become those tokens; without, they are ordinary characters, and
        InputError is raised for the rare vocabulary that cannot spell one otherwise. With `wrap`, the special tokens
        around a text are added (bos, or [CLS] and [SEP]). Raises InputError too for a text that the tokenizer cannot
        encode within its limits.
        """
        return self._encode(text, special, wrap)[0]

    def wrapped(self, text: str) -> tuple[list[int], list[int], list[int]]:
        """Returns the ids of `encode(text, wrap=True)` in three parts: opening tokens, the text, closing tokens."""
        ids, wrapping = self._encode(text, False, True)
        start = next((at for at in range(len(ids)) if at not in wrapping), len(ids))
        end = next((at for at in range(len(ids), start, -1) if at - 1 not in wrapping), start)
        return ids[:start], ids[start:end], ids[end:]

    def _encode(self, text: str, special: bool, wrap: bool) -> tuple[list[int], frozenset[int]]:
        """Returns the ids, and the positions of those that wrapping added."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError("the text has lone surrogates, which cannot be encoded", value=text) from error
        # The setting for special tokens belongs to the shared object, hence the lock; switching it costs nothing.
        with self._trying("cannot read the text"), self._lock:
            ids, places = self._inner.encode(text, special, wrap and self._wraps)
        wrapping = frozenset(places)
        if not special:
            self._refuse_control(ids, wrapping)
        return ids, wrapping

    def _refuse_control(self, ids: list[int], wrapping: frozenset[int]) -> None:
        """Raises InputError if the text itself, rather than the wrapping, was encoded as a control token."""
        for at, id_ in enumerate(ids):
            if id_ in self._special and at not in wrapping and id_ != self._unknown:
                text = self._special[id_].content
                raise InputError("the vocabulary can encode this only as a control token", value=text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Returns the text of the ids, with U+FFFD for invalid bytes; ids without a token are skipped."""
        stream = self.stream(skip_special=skip_special)
        if isinstance(stream, _LibraryStream):
            return stream.whole(list(ids))
        return "".join([stream.push(id_) for id_ in ids]) + stream.finish()

    def stream(self, *, skip_special: bool = True) -> Stream:
        """Returns a streaming decoder."""
        if self._kind is None:
            return _LibraryStream(self._decode, skip_special)
        return _ByteStream(self, skip_special)

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        with self._trying("cannot decode"):
            return self._inner.decode(ids, skip_special)

    def _piece(self, id_: int) -> bytes:
        """Returns the bytes that one id adds to a text, empty for an id without a token."""
        found = self._pieces.get(id_)
        if found is None:
            token = self.token(id_)
            found = self._pieces[id_] = b"" if token is None else _token_bytes(token, self._kind or "")
        return found

    def is_special(self, id_: int) -> bool:
        """Returns whether the id is a control token, which decoding skips by default."""
        return id_ in self._special

    @property
    def special_tokens(self) -> dict[int, Added]:
        """The control tokens by id."""
        return self._special

    @property
    def added_tokens(self) -> dict[int, Added]:
        """The tokens that are matched before pre-tokenization, control tokens included, by id."""
        return self._added

    def token(self, id_: int | None) -> str | None:
        """Returns the token's own text (for a template's `bos_token`), None if there is none."""
        if id_ is None:
            return None
        with self._trying("not a tokenizer"):
            return self._inner.token(id_)

    def pieces(self, text: str) -> list[str]:
        """Returns the pre-tokens of a text without added tokens, as the vocabulary spells them."""
        with self._trying("cannot read the text"):
            return self._inner.pieces(text)

    def spelled(self, token: str) -> bytes:
        """Returns the bytes that a token of the vocabulary, as `pieces` spells it, adds to a text."""
        return _token_bytes(token, self._kind or "")

    def saved(self) -> str:
        """Returns the text of a tokenizer.json."""
        return self._inner.saved()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.json`, `tokenizer_config.json` and the chat template, which transformers can load."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in self._config.items() if key not in (*CODE, "chat_template")}
        config = {"clean_up_tokenization_spaces": False} | kept
        # The class named in the original file may build its own tokenizer and ignore tokenizer.json.
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": self.add_bos}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        _write(folder / "tokenizer.json", self._inner.saved())
        _write(folder / CONFIG, json.dumps(config, ensure_ascii=False, indent=2))


class _ByteStream:
    """Concatenates the bytes of each id and returns complete characters."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer._kind == "metaspace-strip"

    def push(self, id_: int) -> str:
        if self._skip and self._tokenizer.is_special(id_):
            return ""
        return self._text(self._tokenizer._piece(id_), final=False)

    def finish(self) -> str:
        return self._text(b"", final=True)

    def _text(self, piece: bytes, final: bool) -> str:
        if self._strip and piece:  # SentencePiece prepends one space, which does not belong to the text
            piece, self._strip = piece.removeprefix(b" "), False
        return self._decoder.decode(piece, final)


class _LibraryStream:
    """For decoders that do not concatenate (WordPiece): decodes all ids so far, and returns what is new."""

    def __init__(self, decode: Callable[[list[int], bool], str], skip_special: bool) -> None:
        self._decode, self._skip, self._ids, self._sent = decode, skip_special, [], ""

    def whole(self, ids: list[int]) -> str:
        return self._decode(ids, self._skip)

    def push(self, id_: int) -> str:
        self._ids.append(id_)
        return "" if (text := self.whole(self._ids)).endswith("\ufffd") else self._unsent(text)

    def finish(self) -> str:
        return self._unsent(self.whole(self._ids))

    def _unsent(self, text: str) -> str:
        new, self._sent = text[len(self._sent) :], text
        return new


def _decoder_kind(decoder: dict[str, Any] | None) -> str | None:
    """Returns how tokens map to bytes: 'bytes', 'metaspace' or 'metaspace-strip'; None for any other decoder."""
    declared = decoder or {}
    steps = declared.get("decoders", [declared])
    known = {"ByteLevel": "bytes", "Replace": "space", "ByteFallback": "fallback", "Fuse": "", "Strip": "strip"}
    kinds = [known.get(step.get("type")) for step in steps]
    if kinds == ["bytes"]:
        return "bytes"
    if None in kinds or "bytes" in kinds or not {"space", "fallback"} <= set(kinds):
        return None
    for step in steps:
        if step["type"] == "Replace" and (step["pattern"], step["content"]) != ({"String": SPACE}, " "):
            return None
        if step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
            return None
    return "metaspace-strip" if "strip" in kinds else "metaspace"


def _token_bytes(token: str, kind: str) -> bytes:
    if kind == "bytes":
        # A token outside the byte alphabet was added verbatim, with its spaces.
        outside = any(character not in BYTE_OF for character in token)
        return token.encode() if outside else bytes(BYTE_OF[character] for character in token)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return token.replace(SPACE, " ").encode()


def _config(vocabulary: Vocabulary) -> dict[str, Any]:
    eos = vocabulary.eos[0] if vocabulary.eos else None
    bert = vocabulary.model == "bert"
    names = ("cls_token", "sep_token", *SPECIALS[2:]) if bert else SPECIALS
    ends = (vocabulary.bos, vocabulary.separator if bert else eos)
    ids = zip((*names, "mask_token"), (*ends, vocabulary.unknown, vocabulary.padding, vocabulary.mask), strict=True)
    return {name: vocabulary.tokens[id_] for name, id_ in ids if id_ is not None}


def _text_of(said: Any) -> str | None:  # noqa: ANN401  a string, or an object with one
    text = said.get("content") if isinstance(said, dict) else said
    return text if isinstance(text, str) else None


def _named(config: dict[str, Any]) -> dict[str, str]:
    """Returns the special tokens of a config by name: bos_token, pad_token, image_token ..."""
    texts = {name: _text_of(said) for name, said in config.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _specials(folder: Path) -> dict[str, Any]:
    """Returns the special tokens from the file that older folders have."""
    return {name: said for name, said in _object(folder / OLD_SPECIALS).items() if name.endswith("_token")}


def _templates(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """Returns the chat template, and the separate one for chats with tools, if any."""
    if os.path.lexists(folder / TEMPLATE):
        return read_text(folder / TEMPLATE, LARGEST_TEMPLATE), None
    said = config.get("chat_template")
    if said is None:
        said = _object(folder / OLD_TEMPLATE).get("chat_template")
    if not isinstance(said, list):  # several named templates, as in older files
        return _template(said), None
    named = {}
    for entry in said:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise InputError(
                field=f"{folder / CONFIG}: chat_template",
                value=entry,
                allowed='{"name": ..., "template": ...}',
            )
        named[entry["name"]] = _template(entry.get("template"))
    return named.get("default"), named.get("tool_use")


def _template(said: Any) -> str | None:  # noqa: ANN401
    if said is not None and not isinstance(said, str):
        raise InputError(field="chat_template", value=said, allowed="a string")
    return said


def _object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, empty if the file does not exist."""
    return read_object(path, LARGEST_CONFIG, finite=False) if os.path.lexists(path) else {}


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)

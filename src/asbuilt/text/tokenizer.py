"""One tokenizer for all sources: `tokenizer.json` with what lies beside it, and the vocabulary of a GGUF file.

Two things are done here that the library underneath leaves to its caller. Text is only text: a control token written
out in it (`<|im_end|>`) becomes the ids of those characters unless `special=True`. And decoding is a concatenation of
bytes, one piece per id, so that a stream gives exactly the text that decoding everything at once would give.
"""

from __future__ import annotations

import codecs
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers.decoders import Decoder
from tokenizers.models import Unigram

from asbuilt.checkpoint.gguf import GGUFFile
from asbuilt.errors import InputError
from asbuilt.text.gguf_vocab import SPACE, Vocabulary, build, read_vocabulary

CONFIG, GENERATION, TEMPLATE = "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token")


def _byte_characters() -> dict[str, int]:
    """Returns GPT-2's character for each byte: itself where it prints, otherwise the next from U+0100 on."""
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
        """Returns what was held back, with U+FFFD for bytes that became no character."""
        ...


class Tokenizer:
    """Text to ids and back. `bos_id` and `eos_ids` are None and empty where the model has none.

    `add_bos` says that the model expects `bos_id` in front of a text; `encode` adds it only with `wrap=True`.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: tuple[int, ...] = (),
        add_bos: bool = False,
        chat_template: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        self._inner, self._lock = inner, threading.Lock()
        self.bos_id, self.eos_ids, self.add_bos, self.chat_template = bos_id, eos_ids, add_bos, chat_template
        self._config = config or {}
        added = inner.get_added_tokens_decoder()
        self._special = {id_: token for id_, token in added.items() if token.special}
        self._pieces: dict[int, bytes] = {}
        self._kind = _decoder_kind(inner.decoder)
        self._unknown = _unknown_id(inner)
        self.n_vocab = max(inner.get_vocab().values(), default=-1) + 1

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Reads `tokenizer.json`, or the folder that holds it, and the configurations and template beside it.

        Raises InputError for a file that is missing or is no tokenizer.
        """
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            inner = tokenizers.Tokenizer.from_str(_text(path))
        except InputError:
            raise
        except Exception as error:  # the library raises bare Exception for whatever displeases it
            raise InputError(f"not a tokenizer: {error}", field=str(path)) from error
        inner.no_padding()
        inner.no_truncation()
        config = _object(path.with_name(CONFIG))
        bos_id = _token_id(inner, config.get("bos_token"))
        return cls(
            inner,
            bos_id=bos_id,
            eos_ids=_eos_ids(inner, config, _object(path.with_name(GENERATION))),
            add_bos=_adds_bos(inner, config, bos_id),
            chat_template=_template(path.with_name(TEMPLATE), config),
            config=config,
        )

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """Builds the tokenizer that a GGUF file's metadata describe; InputError where they are unusable."""
        vocabulary = read_vocabulary(file)
        template = file.metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise InputError("wrong type", field="tokenizer.chat_template", value=template, allowed="str")
        return cls(
            build(vocabulary),
            bos_id=vocabulary.bos,
            eos_ids=vocabulary.eos,
            add_bos=vocabulary.add_bos and vocabulary.bos is not None,
            chat_template=template,
            config=_config(vocabulary),
        )

    def encode(self, text: str, *, special: bool = False, wrap: bool = False) -> list[int]:
        """Returns the ids of a text.

        With `special`, control tokens written in the text become those tokens; without, they are only characters, and
        InputError is raised in the rare vocabulary that cannot spell one otherwise. With `wrap`, the tokenizer adds
        what it puts around a text (bos, or [CLS] and [SEP]).
        """
        try:
            # The switch belongs to the shared object, hence the lock; switching costs nothing.
            with self._lock:
                self._inner.encode_special_tokens = not special
                encoding = self._inner.encode(text, add_special_tokens=wrap)
        except TypeError as error:  # what the library calls a str that it cannot turn into UTF-8
            raise InputError("the text holds lone surrogates, which no encoding has", value=text) from error
        if not special:
            self._refuse_control(encoding)
        return encoding.ids

    def _refuse_control(self, encoding: tokenizers.Encoding) -> None:
        """Raises InputError where the text itself, and not the wrapping, came out as a control token."""
        for id_, wrapping in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if id_ in self._special and not wrapping and id_ != self._unknown:
                text = self._special[id_].content
                raise InputError("the vocabulary cannot write this as plain text, only as a control token", value=text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Returns the text of the ids, U+FFFD for bytes that are no character; ids without a token give nothing."""
        stream = self.stream(skip_special=skip_special)
        if isinstance(stream, _LibraryStream):
            return stream.whole(list(ids))
        return "".join([stream.push(id_) for id_ in ids]) + stream.finish()

    def stream(self, *, skip_special: bool = True) -> Stream:
        """Returns a decoder for ids that come one by one."""
        if self._kind is None:
            return _LibraryStream(self._inner, skip_special)
        return _ByteStream(self, skip_special)

    def _piece(self, id_: int) -> bytes:
        """Returns the bytes that one id adds to a text, nothing for an id without a token."""
        found = self._pieces.get(id_)
        if found is None:
            token = self._inner.id_to_token(id_) if 0 <= id_ < self.n_vocab else None
            found = self._pieces[id_] = b"" if token is None else _token_bytes(token, self._kind or "")
        return found

    def is_special(self, id_: int) -> bool:
        """Says whether the id is a control token, which decoding leaves out unless asked."""
        return id_ in self._special

    @property
    def special_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """The control tokens by id, with their text (`content`) and the spaces they swallow (`lstrip`, `rstrip`)."""
        return self._special

    def token(self, id_: int | None) -> str | None:
        """Returns the token's own text (for a template's `bos_token`), None where there is none."""
        return None if id_ is None or not 0 <= id_ < self.n_vocab else self._inner.id_to_token(id_)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which transformers loads, with the chat template."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in self._config.items() if key not in ("auto_map", "chat_template")}
        config = {"clean_up_tokenization_spaces": False} | kept
        # The class named in the file that was read may build a tokenizer of its own and ignore tokenizer.json.
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": self.add_bos}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        _write(folder / "tokenizer.json", self._inner.to_str(pretty=False))
        _write(folder / CONFIG, json.dumps(config, ensure_ascii=False, indent=2))


class _ByteStream:
    """Joins the bytes of each id and lets through what has become characters."""

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
        if self._strip and piece:  # SentencePiece puts one space in front of a text, which is not the text's
            piece, self._strip = piece.removeprefix(b" "), False
        return self._decoder.decode(piece, final)


class _LibraryStream:
    """For decoders that are no concatenation (WordPiece): decodes all so far, and lets through what is new."""

    def __init__(self, inner: tokenizers.Tokenizer, skip_special: bool) -> None:
        self._inner, self._skip, self._ids, self._said = inner, skip_special, [], ""

    def whole(self, ids: list[int]) -> str:
        return self._inner.decode([id_ for id_ in ids if id_ >= 0], skip_special_tokens=self._skip)

    def push(self, id_: int) -> str:
        self._ids.append(id_)
        return "" if (text := self.whole(self._ids)).endswith("\ufffd") else self._say(text)

    def finish(self) -> str:
        return self._say(self.whole(self._ids))

    def _say(self, text: str) -> str:
        new, self._said = text[len(self._said) :], text
        return new


def _unknown_id(inner: tokenizers.Tokenizer) -> int | None:
    model = inner.model
    if isinstance(model, Unigram):  # which has the id in its state only
        return json.loads(model.__getstate__()).get("unk_id")
    return _token_id(inner, getattr(model, "unk_token", None))


def _decoder_kind(decoder: Decoder | None) -> str | None:
    """Returns how tokens become bytes: 'bytes', 'metaspace', 'metaspace-strip'; None for any other decoder."""
    said = json.loads(decoder.__getstate__()) if decoder is not None else {}
    steps = said.get("decoders", [said])
    known = {"ByteLevel": "bytes", "Replace": "space", "ByteFallback": "fallback", "Fuse": "", "Strip": "strip"}
    says = [known.get(step.get("type")) for step in steps]
    if says == ["bytes"]:
        return "bytes"
    if None in says or "bytes" in says or not {"space", "fallback"} <= set(says):
        return None
    for step in steps:
        if step["type"] == "Replace" and (step["pattern"], step["content"]) != ({"String": SPACE}, " "):
            return None
        if step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
            return None
    return "metaspace-strip" if "strip" in says else "metaspace"


def _token_bytes(token: str, kind: str) -> bytes:
    if kind == "bytes":
        # A token outside the alphabet of bytes was added as it stands, with its spaces.
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
    ids = zip(SPECIALS, (vocabulary.bos, eos, vocabulary.unknown, vocabulary.padding), strict=True)
    return {name: vocabulary.tokens[id_] for name, id_ in ids if id_ is not None}


def _token_id(inner: tokenizers.Tokenizer, said: Any) -> int | None:  # noqa: ANN401  a string, or an object with one
    text = said.get("content") if isinstance(said, dict) else said
    return inner.token_to_id(text) if isinstance(text, str) else None


def _eos_ids(inner: tokenizers.Tokenizer, config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """Returns where generation stops: what the tokenizer calls eos, and what the generation configuration adds."""
    more = generation.get("eos_token_id")
    ids = [_token_id(inner, config.get("eos_token")), *(more if isinstance(more, list) else [more])]
    return tuple(dict.fromkeys(id_ for id_ in ids if type(id_) is int and id_ >= 0))


def _adds_bos(inner: tokenizers.Tokenizer, config: dict[str, Any], bos_id: int | None) -> bool:
    if bos_id is None:
        return False
    if isinstance(said := config.get("add_bos_token"), bool):
        return said
    return inner.encode("", add_special_tokens=True).ids[:1] == [bos_id]


def _template(path: Path, config: dict[str, Any]) -> str | None:
    if path.is_file():
        return _text(path)
    said = config.get("chat_template")
    if isinstance(said, list):  # several by name, as older files have them
        named = {entry.get("name"): entry.get("template") for entry in said if isinstance(entry, dict)}
        said = named.get("default")
    return said if isinstance(said, str) else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", field=str(path)) from error


def _object(path: Path) -> dict[str, Any]:
    """Returns the JSON object of a file, an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}", field=str(path)) from error
    if not isinstance(found, dict):
        raise InputError("not a JSON object", field=str(path), value=found)
    return found


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)

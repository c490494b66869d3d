"""Texts to learn from: files, folders, JSON lines and stdin, as documents, in pieces of bounded size.

A piece ends where no tokenizer with one of the published split patterns joins what is before and after: after the end
of a line of which neither side is a space, or between two words. Tokens of the pieces are therefore tokens of the text.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from asbuilt.errors import InputError, one_of
from asbuilt.files import open_regular, parse_json, require_regular

STDIN, JSON_LINES = "-", ".jsonl"
TEXTS = (".txt", ".md", ".rst", ".py", JSON_LINES)  # what is read of a folder, unless the caller says otherwise
PIECE = 1 << 16  # characters, roughly
LONGEST = 1 << 22  # characters without such a place are cut anyway
LONGEST_LINE = 1 << 26  # bytes of a line of JSON
BLOCK = 1 << 20  # bytes read at once
# o200k's pattern keeps a slash with the line end before it.
SAFE = re.compile(r"(?<=\S\n)(?=[^\s/])|(?<=[^\W\d_])(?= [^\W\d_])")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Piece:
    """A part of a document, and whether the document ends with it."""

    text: str
    ends: bool


def cut(blocks: Iterable[str], size: int = PIECE, longest: int = LONGEST) -> Iterator[Piece]:
    """Yields the pieces of one document, given in blocks of any length: about `size` characters each.

    An empty document is one empty piece.
    """
    held = ""
    for block in blocks:
        held += block
        start = 0
        # One more character than the longest piece has been read, so no piece depends on how the blocks were cut.
        while len(held) - start > longest:
            found = SAFE.search(held, start + size, start + longest)
            end = start + longest if found is None else found.start()
            yield Piece(held[start:end], False)
            start = end
        held = held[start:]
    start = 0
    while (found := SAFE.search(held, start + size)) is not None:
        yield Piece(held[start : found.start()], False)
        start = found.start()
    yield Piece(held[start:], True)


def files(paths: Sequence[str], glob: str = "", skip: Callable[[InputError], None] | None = None) -> list[str]:
    """Returns the files that paths name, in order, those of folders by name; `-` is stdin.

    Of a folder, text files by their suffix are read, or those whose names match `glob`; hidden ones never. With `skip`
    those that are no UTF-8 text are left out, and what is wrong with each is passed to it. Raises InputError for what
    is missing, is no file, or has no such file.
    """
    found: list[str] = []
    for path in paths:
        if path != STDIN and Path(path).is_dir():
            names = _inside(Path(path), glob)
            found += names if skip is None else [name for name in names if _is_text(name, skip)]
        else:
            if path != STDIN:
                require_regular(Path(path))
            found.append(path)
    if found.count(STDIN) > 1:
        raise InputError("stdin can be read once", field=STDIN)
    return found


def _inside(folder: Path, glob: str) -> list[str]:
    shown = [
        path
        for path in sorted(folder.rglob(glob or "*"))
        if not any(part.startswith(".") for part in path.relative_to(folder).parts) and path.is_file()
    ]
    kept = [str(path) for path in shown if glob or path.suffix in TEXTS]
    if not kept:
        wanted = f"files named {glob}" if glob else f"files that end in {one_of(TEXTS)}"
        raise InputError("has no texts", field=str(folder), allowed=f"a folder with {wanted}")
    return kept


def _is_text(name: str, skip: Callable[[InputError], None]) -> bool:
    try:
        with open_regular(Path(name)) as file:
            for _ in _blocks(file, name, lambda _: None):
                pass
    except InputError as error:
        skip(error)
        return False
    return True


def pieces(names: Sequence[str], *, key: str = "text", progress: Progress | None = None) -> Iterator[Piece]:
    """Yields the documents of the files that `files` returns: a file each, or a line each of JSON lines.

    `key` names the text in a line of JSON. Raises InputError, with the file and the place, for bytes that are not
    UTF-8, for NUL, which no text holds, and for lines without a text.
    """
    whole = sum(0 if name == STDIN else Path(name).stat().st_size for name in names)
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None and whole:
            progress(min(done, whole), whole)

    for name in names:
        if name == STDIN:
            yield from _read(_stdin(), "stdin", count, "")
            continue
        with open_regular(Path(name)) as file:
            yield from _read(file, name, count, key if name.endswith(JSON_LINES) else "")


def _stdin() -> BinaryIO:
    if sys.stdin is None:
        raise InputError("is closed", field="stdin", fix="pipe a text to it")
    return sys.stdin.buffer


def _read(file: BinaryIO, name: str, count: Callable[[int], None], key: str) -> Iterator[Piece]:
    if not key:
        yield from cut(_blocks(file, name, count))
        return
    number = 0
    while data := file.readline(LONGEST_LINE + 1):
        number += 1
        where = f"{name}: line {number}"
        if len(data) > LONGEST_LINE:
            raise InputError("too long", field=where, allowed=f"at most {LONGEST_LINE:,} bytes")
        count(len(data))
        if data.strip():
            yield from cut([_text(data, where, key)])


def _blocks(file: BinaryIO, name: str, count: Callable[[int], None]) -> Iterator[str]:
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        data = file.read(BLOCK)
        # Bytes of a character that the last block began: an error counts from them.
        begun = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise _binary(name, f"{error.reason} at byte {at - begun + error.start}") from error
        if "\0" in text:
            nul = at - begun + len(text[: text.index("\0")].encode())
            raise _binary(name, f"NUL at byte {nul}")
        if not data:
            return
        count(len(data))
        at += len(data)
        yield text.removeprefix("\ufeff") if at == len(data) else text


def _binary(name: str, why: str) -> InputError:
    return InputError(f"not UTF-8 text: {why}", field=name, fix="give text files")


def _text(data: bytes, where: str, key: str) -> str:
    try:
        line = data.decode()
    except UnicodeDecodeError as error:
        raise _binary(where, f"{error.reason} at byte {error.start}") from error
    said = parse_json(line, where, finite=False)
    text = said.get(key) if isinstance(said, dict) else None
    if not isinstance(text, str):
        value = json.dumps(said)[:80] if not isinstance(said, dict) else sorted(map(str, said))
        raise InputError("has no text", field=where, value=value, allowed=f'an object with a string "{key}"')
    return text

"""Texts as token ids on disk: written once, read through memory maps, so that data may be larger than memory.

FOLDER/index.json      what the folder holds, and of what it was made
FOLDER/00000.bin ...   the ids of all documents one after another, little-endian, uint16 where the vocabulary allows
FOLDER/documents.bin   where each document ends, counted in tokens of the whole, little-endian int64

The folder is written under another name and renamed when it is complete; what is opened has the sizes that its index
states, and `verify` compares checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from asbuilt.checkpoint.save import aside
from asbuilt.errors import InputError
from asbuilt.files import read_object, require_regular
from asbuilt.text import sources
from asbuilt.text.sources import STDIN, Piece
from asbuilt.text.tokenizer import Tokenizer

INDEX, DOCUMENTS = "index.json", "documents.bin"
FORMAT = 1
SHARD = 1 << 27  # tokens of a file
LARGEST_INDEX = 1 << 24
SHORT, LONG, ENDS = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<i8")
WAITING = 4  # pieces for each worker that are read ahead

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class File:
    """A file of ids: its name, how many, and the CRC-32 of its bytes."""

    name: str
    tokens: int
    crc: int


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Token ids of documents, on disk."""

    folder: Path
    """Where they are."""
    n_vocab: int
    """Ids are below."""
    files: tuple[File, ...]
    """The files of ids, in order."""
    n_documents: int
    """Documents, of at least one token each."""
    end_id: int | None
    """The id that was put after each document, None if there is none."""
    origin: str
    """Identifies the texts and the tokenizer."""

    def __len__(self) -> int:
        return sum(file.tokens for file in self.files)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of an id on disk."""
        return SHORT if self.n_vocab <= 1 << 16 else LONG

    @cached_property
    def _maps(self) -> list[np.ndarray[Any, np.dtype[Any]]]:
        return [np.memmap(self.folder / file.name, self.dtype, "r") for file in self.files]

    @cached_property
    def ends(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where each document ends: the number of tokens up to there."""
        return np.memmap(self.folder / DOCUMENTS, ENDS, "r")

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for file in self.files:
            starts.append(starts[-1] + file.tokens)
        return starts

    def tokens(self, start: int, stop: int) -> Tensor:
        """Returns the ids from `start` to before `stop`, (n,) int64."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"{start}:{stop} of {len(self)} tokens")
        parts = [
            held[max(0, start - begun) : stop - begun]
            for begun, held in zip(self._starts, self._maps, strict=False)
            if begun < stop and start < begun + len(held)
        ]
        return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64, copy=False))

    def documents(self, start: int, stop: int) -> Tensor:
        """Returns the number of the document of each token from `start` to before `stop`, (n,) int64."""
        first, last = np.searchsorted(self.ends, [start, stop], side="right")
        numbers = np.searchsorted(self.ends[first : last + 1], np.arange(start, stop), side="right")
        return torch.from_numpy(numbers + first)

    def verify(self) -> None:
        """Raises InputError, naming the file, if the bytes on disk are not those that were written."""
        for file in self.files:
            path, crc = self.folder / file.name, 0
            with path.open("rb") as held:
                while block := held.read(1 << 20):
                    crc = zlib.crc32(block, crc)
            if crc != file.crc:
                raise _damaged(path, "its checksum differs")


def open_shards(folder: str | Path) -> Shards:
    """Returns the shards in a folder; raises InputError if it is none, or its files are not as its index says."""
    folder = Path(folder)
    path = folder / INDEX
    said = read_object(path, LARGEST_INDEX)
    try:
        made = Shards(
            folder=folder,
            n_vocab=_whole(said["n_vocab"]),
            files=tuple(File(str(one["name"]), _whole(one["tokens"]), _whole(one["crc"])) for one in said["files"]),
            n_documents=_whole(said["documents"]),
            end_id=None if said["end_id"] is None else _whole(said["end_id"]),
            origin=str(said["origin"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if said.get("format") != FORMAT:
        raise InputError(field=f"{path}: format", value=said.get("format"), allowed=str(FORMAT), fix="write it again")
    sizes = [(file.name, file.tokens * made.dtype.itemsize) for file in made.files]
    for name, nbytes in (*sizes, (DOCUMENTS, made.n_documents * ENDS.itemsize)):
        if Path(name).name != name:
            raise _damaged(path, f"a file outside the folder, {name!r}")
        if require_regular(folder / name).st_size != nbytes:
            raise _damaged(folder / name, f"{(folder / name).stat().st_size} bytes instead of {nbytes}")
    if not all(file.tokens for file in made.files) or not made.n_documents or made.ends[-1] != len(made):
        raise _damaged(path, "the documents do not end where the tokens do")
    return made


def _whole(said: object) -> int:
    if type(said) is not int or said < 0:
        raise ValueError(f"{said!r} is no number")
    return said


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"damaged: {why}", field=str(path), fix="remove the folder and write it again")


def write_shards(
    folder: str | Path,
    pieces: Iterable[Piece],
    tokenizers: Sequence[Tokenizer],
    *,
    end_id: int | None = None,
    origin: str = "",
    shard: int = SHARD,
) -> Shards:
    """Tokenises documents into a new folder, with `end_id` after each, and returns its shards.

    Each of `tokenizers`, which are copies of one, works in a thread of its own; those of a tokenizer.json run in
    processes of their own too. Documents without a token are left out. Raises InputError if there are none with one,
    and if the folder exists and is not empty; whatever is raised, nothing is left behind.
    """
    folder = Path(folder)
    n_vocab = max(tokenizers[0].n_vocab, 0 if end_id is None else end_id + 1)
    with aside(folder, 0) as partial:
        with _Writer(partial, SHORT if n_vocab <= 1 << 16 else LONG, end_id, shard) as writer:
            for piece, ids in _encoded(pieces, tokenizers):
                writer.add(ids, piece.ends)
        if not writer.n_documents:
            raise InputError("empty", field="texts", allowed="at least one document with a token")
        index = {
            "format": FORMAT,
            "n_vocab": n_vocab,
            "files": [vars(file) for file in writer.files],
            "documents": writer.n_documents,
            "end_id": end_id,
            "origin": origin,
        }
        (partial / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return open_shards(folder)


def cached_shards(
    root: str | Path,
    names: Sequence[str],
    tokenizer: str | Path,
    *,
    workers: int = 0,
    key: str = "text",
    end: bool = True,
    progress: Progress | None = None,
) -> Shards:
    """Returns the shards of text files by a tokenizer.json, written into a folder of `root` unless they are there.

    The folder's name is a digest of the files' paths, sizes and times of change, the tokenizer and the settings, so
    that changed texts are tokenised again. `end` puts the tokenizer's end token, if it has one, after each document;
    `workers` is the number of processes, by default one for each CPU.
    """
    first = Tokenizer.from_file(tokenizer)
    end_id = first.eos_ids[0] if end and first.eos_ids else None
    origin = _origin(names, first, key, end_id)
    folder = Path(root) / origin[:16]
    if (folder / INDEX).is_file() and STDIN not in names:
        return open_shards(folder)
    copies = [first, *(Tokenizer.from_file(tokenizer) for _ in range((workers or os.cpu_count() or 1) - 1))]
    read = sources.pieces(names, key=key, progress=progress)
    try:
        return write_shards(folder, read, copies, end_id=end_id, origin=origin)
    except InputError:
        if (folder / INDEX).is_file() and STDIN not in names:  # another rank was faster
            return open_shards(folder)
        raise


def _origin(names: Sequence[str], tokenizer: Tokenizer, key: str, end_id: int | None) -> str:
    files = []
    for name in names:
        if name != STDIN:
            status = require_regular(Path(name))
            files.append((os.path.abspath(name), status.st_size, status.st_mtime_ns))
    said = [FORMAT, files, hashlib.sha256(tokenizer.saved().encode()).hexdigest(), key, end_id]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _encoded(pieces: Iterable[Piece], tokenizers: Sequence[Tokenizer]) -> Iterator[tuple[Piece, list[int]]]:
    """Yields the pieces with their ids, in order; a few of each worker are ahead."""
    if len(tokenizers) == 1:
        for piece in pieces:
            yield piece, tokenizers[0].encode(piece.text)
        return
    free = deque(tokenizers)  # a thread takes one and puts it back; there are as many threads

    def encode(text: str) -> list[int]:
        one = free.popleft()
        try:
            return one.encode(text)
        finally:
            free.append(one)

    pool = ThreadPoolExecutor(len(tokenizers))
    waiting: deque[tuple[Piece, Future[list[int]]]] = deque()
    try:
        for piece in pieces:
            waiting.append((piece, pool.submit(encode, piece.text)))
            if len(waiting) > WAITING * len(tokenizers):
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Writer:
    """Appends ids to files of bounded size, and notes where documents end."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], end_id: int | None, shard: int) -> None:
        self.folder, self.dtype, self.end_id, self.shard = folder, dtype, end_id, shard
        self.files: list[File] = []
        self.n_documents = self._tokens = self._begun = 0
        self._open: BinaryIO | None = None
        self._ends = (folder / DOCUMENTS).open("wb")

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._open, self._ends):
            if file is not None:
                file.close()

    def add(self, ids: Sequence[int], ends: bool) -> None:
        """Appends ids of a document, which may end with them."""
        self._append(ids)
        if ends and self._tokens > self._begun:
            self._append(() if self.end_id is None else (self.end_id,))
            self._begun = self._tokens
            self._ends.write(np.array([self._tokens], ENDS).tobytes())
            self.n_documents += 1

    def _append(self, ids: Sequence[int]) -> None:
        held = np.asarray(ids, np.int64)
        if len(held) and int(held.max()) > np.iinfo(self.dtype).max:
            raise InputError("an id is beyond the vocabulary", field="tokenizer", value=int(held.max()))
        while len(held):
            last = self.files[-1] if self.files else None
            if last is None or last.tokens >= self.shard:
                last = self._begin()
            part, held = held[: self.shard - last.tokens], held[self.shard - last.tokens :]
            data = part.astype(self.dtype).tobytes()
            assert self._open is not None
            self._open.write(data)
            self.files[-1] = File(last.name, last.tokens + len(part), zlib.crc32(data, last.crc))
            self._tokens += len(part)

    def _begin(self) -> File:
        if self._open is not None:
            self._open.close()
        self.files.append(File(f"{len(self.files):05d}.bin", 0, 0))
        self._open = (self.folder / self.files[-1].name).open("wb")
        return self.files[-1]

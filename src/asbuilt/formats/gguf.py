"""Headers of untrusted GGUF files, versions 2 and 3, little-endian.

No library is needed, so that the base install can describe a GGUF file. Every count in the file is checked
against the remaining bytes before anything is allocated, and the whole header has a memory budget, because a few bytes
of a file can ask for gigabytes of Python objects. The header of a model with 50k tokens takes about 0.1 s.

A model may be split: NAME-00001-of-00003.gguf has the metadata and some tensors, the other parts have the rest
(llama.cpp, tools/gguf-split). Any part can be named to read the whole model.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
import sys
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asbuilt.dtypes import GGML_TYPES
from asbuilt.errors import InputError, one_of, shorten
from asbuilt.files import open_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_RANK = 4  # GGML_MAX_DIMS
MAX_NAME = 1024  # bytes of a key or a tensor name; ggml's own limit for tensors is 64
# The largest published vocabularies, of 262k tokens, need 20 MB of header, 65 MB of Python objects and 60 keys; models
# of 126 layers, or with experts one by one, some thousands of tensors.
MAX_HEADER_BYTES = 1 << 26
MAX_MEMORY = 80 << 20
MAX_KEYS, MAX_TENSORS = 1 << 12, 1 << 14
MAX_DEPTH = 4  # nesting of arrays
MAX_TEXT = 1 << 20  # chat templates and licences take some tens of kB
# Bytes of an element in a Python list, a string's own excluded; an array also takes time.
NUMBER_BYTES, SMALL_BYTES, ARRAY_BYTES = 32, 16, 400
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32
ARRAY, STRING, BOOL = 9, 8, 7
SPENT = {STRING: 8, ARRAY: ARRAY_BYTES}
NUMBER, COUNT, TOTAL = "split.no", "split.count", "split.tensors.count"
OF_THE_FILE = ("general.alignment",)  # may differ from part to part
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
SMALL = ("B", "b")  # Python caches these values
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
MAX_PARTS = 99_999
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """The place of one tensor: `shape` in torch order (GGUF's `ne` reversed), `offset` in bytes from the file's start.

    `part` is the file of a split model that contains it, None if the model is not split.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    part: Path | None = None


@dataclass(frozen=True, kw_only=True)
class GGUFFile:
    """A GGUF model's header: key-value metadata and the place of each tensor, in the order of its files.

    `path` is the file, the first one if the model is split. `kinds` are the types of the values as the file numbers
    them, of an array also that of its elements. `values` are tensors that are known without the file: the headers of
    files to be written have them.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    kinds: dict[str, tuple[int, ...]] = field(default_factory=dict)
    values: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The model's name, after its file."""
        found = PART.fullmatch(self.path.name)
        return found[1] if found and self.metadata.get(COUNT, 0) > 1 else self.path.stem

    def holder(self, tensor: GGUFTensor) -> Path:
        """Returns the file that contains a tensor."""
        return tensor.part or self.path


class _Cursor:
    """A position in the header that only moves forward, within the file and the memory budget."""

    def __init__(self, path: Path, data: mmap.mmap, size: int, spent: int) -> None:
        self.path, self.data, self.size, self.at, self.spent = path, data, size, 0, spent
        self.end = len(data)

    def fail(self, problem: str, *, value: object = None, allowed: str = "", fix: str = "") -> InputError:
        return InputError(problem, field=str(self.path), value=value, allowed=allowed, fix=fix)

    def take(self, nbytes: int, what: str) -> int:
        """Returns the position and advances by `nbytes`; raises InputError if the file ends before that."""
        start = self.at
        if nbytes > self.end - start:
            held = f"file has {self.size}" if self.end == self.size else f"header may take only {self.end}"
            raise self.fail(f"{what} needs {nbytes} bytes at byte {start}, but the {held}")
        self.at = start + nbytes
        return start

    def u32(self, what: str) -> int:
        return U32.unpack_from(self.data, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return U64.unpack_from(self.data, self.take(8, what))[0]

    def count(self, least: int, what: str, most: int) -> int:
        """Returns a count, after checking that its entries of `least` bytes each fit in the remaining bytes."""
        n = self.u64(what)
        if n > most:
            raise self.fail(f"{what} is too large", value=n, allowed=f"at most {most}")
        if n * least > self.end - self.at:
            raise self.fail(f"{what} declares {n} entries, but only {self.end - self.at} bytes are left")
        return n

    def spend(self, nbytes: int, what: str) -> None:
        """Charges the memory of a value to the budget before it is created."""
        self.spent += nbytes
        if self.spent > MAX_MEMORY:
            raise self.fail(
                f"{what}: the header would take too much memory",
                value=self.spent,
                allowed=f"at most {MAX_MEMORY} bytes",
            )

    def name(self, what: str) -> str:
        """Returns a key or a tensor name, which must be exact since it is looked up."""
        nbytes = self.u64(f"length of {what}")
        if not 0 < nbytes <= MAX_NAME:
            raise self.fail(f"invalid length of {what}", value=nbytes, allowed=f"1 to {MAX_NAME}")
        start = self.take(nbytes, what)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8", value=self.data[start : start + 80]) from error

    def string(self, what: str) -> str:
        # Invalid UTF-8 becomes U+FFFD, which can be printed everywhere, unlike lone surrogates. Tokens that become
        # equal thereby are refused by the tokenizer.
        nbytes = self.u64(f"length of {what}")
        start = self.take(nbytes, what)
        if nbytes > MAX_TEXT:
            raise self.fail(f"{what} is too long", value=nbytes, allowed=f"at most {MAX_TEXT} bytes")
        text = self.data[start : self.at].decode(errors="replace")
        self.spend(sys.getsizeof(text), what)
        return text


def read_header(path: str | os.PathLike[str]) -> GGUFFile:
    """Returns the metadata and the tensor table of a GGUF model, of all its files, without reading a tensor.

    Raises InputError for a file that is not little-endian GGUF of version 2 or 3, or that is inconsistent: counts and
    offsets beyond its end, duplicate names, unknown types, overlapping tensors, undeclared bytes; and for parts of a
    split model that are missing or belong to another model. Source: the GGUF specification, ggml/docs/gguf.md.
    """
    file, spent = _read_part(Path(path), 0)
    n_parts = _whole(file, COUNT, MAX_PARTS)
    if n_parts > 1:
        return _joined(file, n_parts, spent)
    _require_total(file, file.tensors)
    return file


def _read_part(path: Path, spent: int) -> tuple[GGUFFile, int]:
    """Returns one file's header, and the memory spent on it plus `spent`."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:  # an empty file cannot be mapped
                raise InputError("the file is empty", field=str(path))
            with mmap.mmap(file.fileno(), min(size, MAX_HEADER_BYTES), access=mmap.ACCESS_READ) as data:
                cursor = _Cursor(path, data, size, spent)
                return _parse(cursor), cursor.spent
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", field=str(path)) from error


def _whole(file: GGUFFile, key: str, most: int, least: int = 0) -> int:
    said = file.metadata.get(key, 0)
    if type(said) is not int or not least <= said <= most:
        raise InputError(field=f"{file.path}: {key}", value=said, allowed=f"{least} to {most}")
    return said


def _joined(file: GGUFFile, n_parts: int, spent: int) -> GGUFFile:
    """Returns the whole model, of which `file` is one of `n_parts` parts; the first part has the metadata."""
    named = PART.fullmatch(file.path.name)
    number = _whole(file, NUMBER, n_parts - 1) + 1
    if named is None or (int(named[2]), int(named[3])) != (number, n_parts):
        raise InputError(
            f"the header says part {number} of {n_parts}, the file name does not",
            field=str(file.path),
            allowed=f"named NAME-{number:05d}-of-{n_parts:05d}.gguf, so that the other parts are found",
        )
    paths = [file.path.with_name(f"{named[1]}-{i + 1:05d}-of-{n_parts:05d}.gguf") for i in range(n_parts)]
    lacking = [path.name for path in paths if not path.exists()]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise InputError(
            f"one of {n_parts} parts, but {', '.join(lacking[:3])}{more} is missing",
            field=str(file.path),
            fix="put all parts into one folder",
        )
    first, tensors = file, dict[str, GGUFTensor]()
    for i, path in enumerate(paths):
        part, spent = (file, spent) if path == file.path else _read_part(path, spent)
        first = part if i == 0 else first
        _require_same_model(first, part, i, n_parts)
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise InputError("duplicate tensor", field=str(path), value=name)
            tensors[name] = replace(tensor, part=path)
        if len(tensors) > MAX_TENSORS:
            raise InputError("too many tensors", field=str(path), value=len(tensors), allowed=f"at most {MAX_TENSORS}")
    _require_total(first, tensors)
    return GGUFFile(path=paths[0], metadata=first.metadata, tensors=tensors, kinds=first.kinds)


def _require_same_model(first: GGUFFile, part: GGUFFile, number: int, n_parts: int) -> None:
    """Raises InputError unless `part` has this index, counted from 0, and no metadata of its own."""
    own = {NUMBER: number, COUNT: n_parts, **({} if part is first else first.metadata | {NUMBER: number})}
    for key, said in part.metadata.items():
        if key in OF_THE_FILE or (part is first and key not in own):
            continue
        if key not in own or own[key] != said:
            allowed = shorten(own[key]) if key in own else f"a key that {first.path.name} has too"
            raise InputError(
                f"{key[:80]} differs from the first part's", field=str(part.path), value=said, allowed=allowed
            )


def _require_total(file: GGUFFile, tensors: dict[str, GGUFTensor]) -> None:
    said = _whole(file, TOTAL, 2**31 - 1)
    if TOTAL in file.metadata and said != len(tensors):
        raise InputError(
            "wrong number of tensors", field=f"{file.path}: {TOTAL}", value=said, allowed=str(len(tensors))
        )


def _parse(cursor: _Cursor) -> GGUFFile:
    _check_version(cursor)
    n_tensors = cursor.count(8 + 1 + 4 + 4 + 8, "tensor count", MAX_TENSORS)
    n_keys = cursor.count(8 + 1 + 4 + 1, "metadata count", MAX_KEYS)
    metadata: dict[str, Any] = {}
    kinds: dict[str, tuple[int, ...]] = {}
    for index in range(n_keys):
        key = cursor.name(f"metadata key {index}")
        if key in metadata:
            raise cursor.fail("duplicate metadata key", value=key)
        said = key[:80]
        kind, start = cursor.u32(f"type of {said}"), cursor.at
        metadata[key] = _value(cursor, kind, said, 0)
        kinds[key] = (kind, U32.unpack_from(cursor.data, start)[0]) if kind == ARRAY else (kind,)
    tensors = _tensors(cursor, n_tensors, _alignment(cursor, metadata))
    return GGUFFile(path=cursor.path, metadata=metadata, tensors=tensors, kinds=kinds)


def _check_version(cursor: _Cursor) -> None:
    start = cursor.take(8, "magic and version")
    if cursor.data[start : start + 4] != MAGIC:
        raise cursor.fail("not a GGUF file", value=cursor.data[start : start + 4], allowed=repr(MAGIC))
    version = U32.unpack_from(cursor.data, start + 4)[0]
    if version in VERSIONS:
        return
    if version == 1 or version & 0xFFFF:
        raise cursor.fail("unsupported GGUF version", value=version, allowed="2 or 3", fix="convert the model again")
    raise cursor.fail("big-endian GGUF", allowed="little-endian", fix="convert the model again")


def _value(cursor: _Cursor, kind: int, key: str, depth: int) -> Any:  # noqa: ANN401  the format is open
    if kind in SCALARS:
        code = struct.Struct("<" + SCALARS[kind])
        return code.unpack_from(cursor.data, cursor.take(code.size, key))[0]
    if kind == STRING:
        return cursor.string(key)
    if kind == BOOL:
        return _bools(cursor, 1, key)[0]
    if kind == ARRAY:
        return _array(cursor, key, depth)
    raise cursor.fail(f"{key}: unknown value type", value=kind, allowed="0 to 12")


def _array(cursor: _Cursor, key: str, depth: int) -> list[Any]:
    if depth == MAX_DEPTH:
        raise cursor.fail(f"{key}: arrays nested too deeply", allowed=f"at most {MAX_DEPTH} levels")
    kind = cursor.u32(f"element type of {key}")
    least = {STRING: 8, ARRAY: 12, BOOL: 1}.get(kind) or struct.calcsize("<" + SCALARS.get(kind, "B"))
    n = cursor.count(least, f"length of {key}", 1 << 63)
    small = kind == BOOL or SCALARS.get(kind) in SMALL
    cursor.spend(n * (SMALL_BYTES if small else SPENT.get(kind, NUMBER_BYTES)), key)
    if kind in SCALARS:
        return _numbers(cursor, SCALARS[kind], n, key)
    if kind == STRING:
        return _strings(cursor, n, key)
    if kind == BOOL:
        return _bools(cursor, n, key)
    return [_value(cursor, kind, key, depth + 1) for _ in range(n)]


def _numbers(cursor: _Cursor, code: str, n: int, key: str) -> list[Any]:
    numbers = array(code)
    start = cursor.take(n * numbers.itemsize, key)
    numbers.frombytes(cursor.data[start : cursor.at])
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def _strings(cursor: _Cursor, n: int, key: str) -> list[str]:
    """Returns `n` strings; one plain loop for speed: a vocabulary has 50k to 260k of them, and its merges as many."""
    data, at, end, length_at, size_of = cursor.data, cursor.at, cursor.end, U64.unpack_from, sys.getsizeof
    taken, room = 0, MAX_MEMORY - cursor.spent
    strings: list[str] = []
    for _ in range(n):
        start = at + 8
        if start > end or (at := start + length_at(data, at)[0]) > end:
            cursor.at = min(start, end)
            cursor.take(at - start if start <= end else 8, f"string {len(strings)} of {key}")
        if at - start > MAX_TEXT or taken > room:
            break
        strings.append(data[start:at].decode(errors="replace"))
        taken += size_of(strings[-1])
    cursor.spend(taken, key)
    if len(strings) < n:
        raise cursor.fail(f"string {len(strings)} of {key} is too long", allowed=f"at most {MAX_TEXT} bytes")
    cursor.at = at
    return strings


def _bools(cursor: _Cursor, n: int, key: str) -> list[bool]:
    start = cursor.take(n, key)
    raw = cursor.data[start : start + n]
    if raw.strip(b"\0\1"):
        raise cursor.fail(f"{key}: invalid boolean", value=raw.strip(b"\0\1")[0], allowed="0 or 1")
    return [byte == 1 for byte in raw]


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.fail("invalid general.alignment", value=alignment, allowed=f"a power of two up to {MAX_ALIGNMENT}")
    return alignment


def _tensors(cursor: _Cursor, n: int, alignment: int) -> dict[str, GGUFTensor]:
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for index in range(n):
        name = cursor.name(f"name of tensor {index}")
        if name in entries:
            raise cursor.fail("duplicate tensor", value=name)
        said = name[:80]
        entries[name] = (_shape(cursor, said), cursor.u32(f"type of {said}"), cursor.u64(f"offset of {said}"))
    base = aligned(cursor.at, alignment)
    tensors = {name: _placed(cursor, name, *entry, base, alignment) for name, entry in entries.items()}
    at = base if tensors else cursor.at
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset != at:
            what = "shares bytes with the tensor before it" if tensor.offset < at else "leaves a hole before it"
            raise cursor.fail(f"{tensor.name[:80]} {what}", value=tensor.offset - base, allowed=f"offset {at - base}")
        at = aligned(at + tensor.nbytes, alignment)
    if cursor.size > aligned(at, alignment):
        raise cursor.fail(f"the header declares {at} bytes, the file has {cursor.size}: trailing data")
    return tensors


def _shape(cursor: _Cursor, name: str) -> tuple[int, ...]:
    rank = cursor.u32(f"rank of {name}")
    if rank > MAX_RANK:
        raise cursor.fail(f"invalid rank of {name}", value=rank, allowed=f"0 to {MAX_RANK}")
    ne = struct.unpack_from(f"<{rank}Q", cursor.data, cursor.take(8 * rank, f"shape of {name}"))
    if 0 in ne:
        raise cursor.fail(f"{name} has a dimension of 0", value=ne[::-1])
    return ne[::-1]


def _placed(
    cursor: _Cursor, name: str, shape: tuple[int, ...], number: int, offset: int, base: int, alignment: int
) -> GGUFTensor:
    kind, said = GGML_TYPES.get(number), name[:80]
    if kind is None:
        known = one_of(f"{number} ({kind.name})" for number, kind in GGML_TYPES.items())
        raise cursor.fail(f"type of {said} is unknown", value=number, allowed=known)
    row = shape[-1] if shape else 1
    if row % kind.block:
        raise cursor.fail(f"{said} is {kind.name} with rows of {row} elements", allowed=f"a multiple of {kind.block}")
    if offset % alignment:
        raise cursor.fail(f"offset of {said} is not aligned", value=offset, allowed=f"a multiple of {alignment}")
    nbytes = math.prod(shape) // kind.block * kind.nbytes
    if base + offset + nbytes > cursor.size:
        declared = base + offset + nbytes
        raise cursor.fail(f"{said} {shape} ends at byte {declared}, the file has {cursor.size}: truncated?")
    return GGUFTensor(name=name, shape=shape, type=kind.name, offset=base + offset, nbytes=nbytes)


def aligned(at: int, alignment: int) -> int:
    """Returns the next multiple of the alignment."""
    return -(-at // alignment) * alignment

"""GGUF files, versions 2 and 3, little endian: header and tensors, from a file that is not trusted.

`read_header` needs no library at all, so that the light install can describe a GGUF file. Every count in the file is
held against the bytes that are left before anything is made of it, and the whole header has a budget, because a few
bytes of a file can ask for gigabytes of Python objects. The header of a model with 50k tokens takes about 0.1 s.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asbuilt.checkpoint.ggml_types import FLOATS, GGML_TYPES, READABLE
from asbuilt.errors import InputError, near

if TYPE_CHECKING:
    import numpy
    import torch

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_RANK = 4  # GGML_MAX_DIMS
MAX_NAME = 4096  # bytes of a key or a tensor name; ggml itself stops at 64
# The largest published vocabularies need 1.5 million array elements, 30 MB of header and some thousands of tensors.
MAX_HEADER_BYTES = 1 << 28
MAX_ELEMENTS = 1 << 23
MAX_ENTRIES = 1 << 17
MAX_DEPTH = 4  # arrays of arrays
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32
ARRAY, STRING, BOOL = 9, 8, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
# gguf.quants works through 16 rows at a time, slowly where they are short. Blocks know nothing of rows, so a tensor may
# be cut as we like: at 256 blocks a row, a 98 MB file with rows of 18 blocks expands in 0.7 s instead of 2.5 s.
BLOCKS_PER_ROW = 256


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """Where one tensor lies: `shape` in torch order (GGUF's `ne` reversed), `offset` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class GGUFFile:
    """A GGUF file's header: key-value metadata and where each tensor lies, in the order of the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """A place in the header that moves forward, and refuses to pass the end of the file or of the budget."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.elements = path, data, 0, 0
        self.end = min(len(data), MAX_HEADER_BYTES)

    def fail(self, problem: str, *, value: object = None, allowed: str = "", fix: str = "") -> InputError:
        return InputError(problem, field=str(self.path), value=value, allowed=allowed, fix=fix)

    def take(self, nbytes: int, what: str) -> int:
        """Returns where `nbytes` begin and moves behind them; InputError where the file ends before that."""
        start = self.at
        if nbytes > self.end - start:
            held = f"holds {len(self.data)}" if self.end == len(self.data) else f"header may take {self.end}"
            raise self.fail(f"{what} needs {nbytes} bytes at byte {start}, and the file {held}")
        self.at = start + nbytes
        return start

    def u32(self, what: str) -> int:
        return U32.unpack_from(self.data, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return U64.unpack_from(self.data, self.take(8, what))[0]

    def count(self, least: int, what: str, most: int) -> int:
        """Returns a count, having held `count` entries of `least` bytes each against the bytes that are left."""
        n = self.u64(what)
        if n > most:
            raise self.fail(f"{what} is too large", value=n, allowed=f"at most {most}")
        if n * least > self.end - self.at:
            raise self.fail(f"{what} declares {n} entries, and {self.end - self.at} bytes are left")
        return n

    def spend(self, n: int, what: str) -> None:
        self.elements += n
        if self.elements > MAX_ELEMENTS:
            raise self.fail(f"{what}: the arrays of the header hold too many elements", allowed=f"{MAX_ELEMENTS}")

    def name(self, what: str) -> str:
        """Returns a key or a tensor name, which others look up and so must be exact."""
        nbytes = self.u64(f"length of {what}")
        if not 0 < nbytes <= MAX_NAME:
            raise self.fail(f"length of {what}", value=nbytes, allowed=f"1 to {MAX_NAME}")
        start = self.take(nbytes, what)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8", value=self.data[start : self.at]) from error

    def string(self, what: str) -> str:
        # A value is kept with U+FFFD in place of bytes that are no text: it stays printable everywhere, which lone
        # surrogates are not. Tokens that become equal by this are refused by the tokenizer.
        nbytes = self.u64(f"length of {what}")
        start = self.take(nbytes, what)
        return self.data[start : self.at].decode(errors="replace")


def read_header(path: str | os.PathLike[str]) -> GGUFFile:
    """Returns the metadata and the tensor table of a GGUF file, without reading a tensor.

    Raises InputError for a file that is no GGUF of version 2 or 3, little endian, or that contradicts itself: counts
    and offsets past its end, names given twice, types that are unknown, bytes that nobody declared. Source: the GGUF
    specification, ggml/docs/gguf.md.
    """
    path = Path(path)
    try:
        if not path.stat().st_size:  # which cannot be mapped
            raise InputError("the file is empty", field=str(path))
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(path, data))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", field=str(path)) from error


def _parse(cursor: _Cursor) -> GGUFFile:
    _check_version(cursor)
    n_tensors = cursor.count(8 + 1 + 4 + 4 + 8, "tensor count", MAX_ENTRIES)
    n_keys = cursor.count(8 + 1 + 4 + 1, "metadata count", MAX_ENTRIES)
    metadata: dict[str, Any] = {}
    for index in range(n_keys):
        key = cursor.name(f"metadata key {index}")
        if key in metadata:
            raise cursor.fail("metadata key given twice", value=key)
        metadata[key] = _value(cursor, cursor.u32(f"type of {key}"), key, 0)
    tensors = _tensors(cursor, n_tensors, _alignment(cursor, metadata))
    return GGUFFile(path=cursor.path, metadata=metadata, tensors=tensors)


def _check_version(cursor: _Cursor) -> None:
    start = cursor.take(8, "magic and version")
    if cursor.data[start : start + 4] != MAGIC:
        raise cursor.fail("not a GGUF file", value=cursor.data[start : start + 4], allowed=f"starts with {MAGIC!r}")
    version = U32.unpack_from(cursor.data, start + 4)[0]
    if version in VERSIONS:
        return
    if version == 1 or version & 0xFFFF:
        raise cursor.fail("GGUF version", value=version, allowed="2, 3", fix="convert the model again")
    raise cursor.fail("big-endian GGUF", value=version >> 24, allowed="little endian", fix="convert the model again")


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
        raise cursor.fail(f"{key}: arrays nested too deep", allowed=f"{MAX_DEPTH} levels")
    kind = cursor.u32(f"element type of {key}")
    least = {STRING: 8, ARRAY: 12, BOOL: 1}.get(kind) or struct.calcsize("<" + SCALARS.get(kind, "B"))
    n = cursor.count(least, f"length of {key}", MAX_ELEMENTS)
    cursor.spend(n, key)
    if kind in SCALARS:
        return list(struct.unpack_from(f"<{n}{SCALARS[kind]}", cursor.data, cursor.take(n * least, key)))
    if kind == STRING:
        return _strings(cursor, n, key)
    if kind == BOOL:
        return _bools(cursor, n, key)
    return [_value(cursor, kind, key, depth + 1) for _ in range(n)]


def _strings(cursor: _Cursor, n: int, key: str) -> list[str]:
    """Returns `n` strings; one plain loop, because a vocabulary has 50k to 260k of them, and its merges as many."""
    data, at, end, length_at = cursor.data, cursor.at, cursor.end, U64.unpack_from
    strings = []
    for _ in range(n):
        start = at + 8
        if start > end or (at := start + length_at(data, at)[0]) > end:
            cursor.at = min(start, end)
            cursor.take(at - start if start <= end else 8, f"string {len(strings)} of {key}")
        strings.append(data[start:at].decode(errors="replace"))
    cursor.at = at
    return strings


def _bools(cursor: _Cursor, n: int, key: str) -> list[bool]:
    start = cursor.take(n, key)
    raw = cursor.data[start : start + n]
    if raw.strip(b"\0\1"):
        raise cursor.fail(f"{key}: a truth value is neither 0 nor 1", value=raw.strip(b"\0\1")[0])
    return [byte == 1 for byte in raw]


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.fail("general.alignment", value=alignment, allowed=f"a power of two up to {MAX_ALIGNMENT}")
    return alignment


def _tensors(cursor: _Cursor, n: int, alignment: int) -> dict[str, GGUFTensor]:
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for index in range(n):
        name = cursor.name(f"name of tensor {index}")
        if name in entries:
            raise cursor.fail("tensor given twice", value=name)
        entries[name] = (_shape(cursor, name), cursor.u32(f"type of {name}"), cursor.u64(f"offset of {name}"))
    base = _aligned(cursor.at, alignment)
    tensors = {name: _placed(cursor, name, *entry, base, alignment) for name, entry in entries.items()}
    ends = [tensor.offset + tensor.nbytes for tensor in tensors.values()]
    declared = _aligned(max(ends, default=cursor.at), alignment)
    if len(cursor.data) > declared:
        raise cursor.fail(f"declares {declared} bytes, file holds {len(cursor.data)}: trailing data")
    return tensors


def _shape(cursor: _Cursor, name: str) -> tuple[int, ...]:
    rank = cursor.u32(f"rank of {name}")
    if rank > MAX_RANK:
        raise cursor.fail(f"rank of {name}", value=rank, allowed=f"0 to {MAX_RANK}")
    ne = struct.unpack_from(f"<{rank}Q", cursor.data, cursor.take(8 * rank, f"shape of {name}"))
    if 0 in ne:
        raise cursor.fail(f"{name} has a dimension of 0", value=ne[::-1])
    return ne[::-1]


def _placed(
    cursor: _Cursor, name: str, shape: tuple[int, ...], number: int, offset: int, base: int, alignment: int
) -> GGUFTensor:
    kind = GGML_TYPES.get(number)
    if kind is None:
        known = ", ".join(f"{number} {kind.name}" for number, kind in GGML_TYPES.items())
        raise cursor.fail(f"type of {name} is unknown", value=number, allowed=known)
    row = shape[-1] if shape else 1
    if row % kind.block:
        raise cursor.fail(f"{name} is {kind.name}, with rows of {row} elements", allowed=f"multiples of {kind.block}")
    if offset % alignment:
        raise cursor.fail(f"offset of {name} is not aligned", value=offset, allowed=f"multiples of {alignment}")
    nbytes = math.prod(shape) // kind.block * kind.nbytes
    if base + offset + nbytes > len(cursor.data):
        declared = base + offset + nbytes
        raise cursor.fail(f"{name} {shape} declares {declared} bytes, file holds {len(cursor.data)}: truncated?")
    return GGUFTensor(name=name, shape=shape, type=kind.name, offset=base + offset, nbytes=nbytes)


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def read_tensor(file: GGUFFile, name: str, rows: slice = slice(None)) -> torch.Tensor:
    """Returns a tensor, or the given rows of its first dimension; only their bytes are read.

    F32, F16 and BF16 come in their own dtype, block formats expanded to float32 (`gguf.quants`). InputError for a
    name that is not there, a type that has no reader here, and a file that has changed since its header was read.
    """
    import torch

    tensor = _find(file, name)
    shape, start, nbytes = _window(tensor, rows)
    raw = _read_bytes(file.path, start, nbytes)
    if tensor.type in FLOATS:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[tensor.type]
        return torch.from_numpy(raw).view(dtype).reshape(shape)
    return torch.from_numpy(_expand(raw, tensor.type)).reshape(shape)


def _find(file: GGUFFile, name: str) -> GGUFTensor:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise InputError("no such tensor", field=str(file.path), value=name, fix=near(name, file.tensors))
    if tensor.type not in READABLE:
        raise InputError(f"type of {name}", field=str(file.path), value=tensor.type, allowed=", ".join(READABLE))
    return tensor


def _window(tensor: GGUFTensor, rows: slice) -> tuple[tuple[int, ...], int, int]:
    """Returns shape, first byte and bytes of the rows; a vector's rows would cut its blocks, so it is read whole."""
    if rows == slice(None):
        return tensor.shape, tensor.offset, tensor.nbytes
    if len(tensor.shape) < 2 or rows.step not in (None, 1):
        raise InputError(f"rows of {tensor.name} {tensor.shape}", value=rows, allowed="a plain range of a matrix")
    first, last, _ = rows.indices(tensor.shape[0])
    n, row_bytes = max(0, last - first), tensor.nbytes // tensor.shape[0]
    return (n, *tensor.shape[1:]), tensor.offset + first * row_bytes, n * row_bytes


def _read_bytes(path: Path, start: int, nbytes: int) -> numpy.ndarray:
    import numpy as np

    # Read, not mapped: a map of a file that someone cuts short meanwhile kills the process.
    try:
        raw = np.fromfile(path, dtype=np.uint8, count=nbytes, offset=start)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", field=str(path)) from error
    if len(raw) != nbytes:
        raise InputError(f"declares {start + nbytes} bytes, file holds {start + len(raw)}", field=str(path))
    return raw


def _expand(raw: numpy.ndarray, kind: str) -> numpy.ndarray:
    """Returns the float32 elements of the blocks in `raw`, flat: long rows first, then the blocks that are left."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    number = next(number for number, known in GGML_TYPES.items() if known.name == kind)
    row_bytes = BLOCKS_PER_ROW * GGML_TYPES[number].nbytes
    whole = len(raw) // row_bytes * row_bytes
    parts = [raw[:whole].reshape(-1, row_bytes), raw[whole:].reshape(1, -1)]
    expand: Callable[[numpy.ndarray], numpy.ndarray] = lambda part: dequantize(part, GGMLQuantizationType(number))  # noqa: E731
    # A damaged scale may be infinite or NaN; the values then say so themselves.
    with np.errstate(all="ignore"):
        return np.concatenate([expand(part).reshape(-1) for part in parts if part.size] or [np.empty(0, np.float32)])

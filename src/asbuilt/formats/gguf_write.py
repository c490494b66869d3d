"""GGUF files, version 3, little-endian: a header, then each tensor's bytes as they come, in one file or in several.

Sizes are known before any tensor is, so the header is written first and nothing is kept. Of a split model the first
file has the metadata, all have `split.no`, `split.count` and `split.tensors.count`, and their names count them
(llama.cpp, tools/gguf-split). Whoever calls sees to it that files appear only when they are complete.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from asbuilt.dtypes import GGML_TYPES
from asbuilt.errors import InputError
from asbuilt.formats.gguf import (
    ARRAY,
    BOOL,
    COUNT,
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_PARTS,
    MAX_RANK,
    MAX_TENSORS,
    NUMBER,
    SCALARS,
    STRING,
    TOTAL,
    VERSIONS,
    aligned,
)

UINT16, UINT32, INT32, FLOAT32, UINT64, INT64, FLOAT64 = 2, 4, 5, 6, 10, 11, 12
NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}
LIMITS = {UINT32: (0, 2**32), INT32: (-(2**31), 2**31), INT64: (-(2**63), 2**63), UINT64: (0, 2**64)}
MOST_NAME = 64  # GGML_MAX_NAME, its final zero included
Bytes = Iterable[bytes | bytearray | memoryview]


@dataclass(frozen=True)
class Typed:
    """A value with its type as the file numbers them, of an array also that of its elements."""

    kinds: tuple[int, ...]
    value: Any


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A tensor to be written: `shape` in torch's order, `type` as ggml spells it, and the bytes that it will take."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        kind = GGML_TYPES[NUMBERS[self.type]]
        return math.prod(self.shape) // kind.block * kind.nbytes


def kind_of(value: Any) -> int:  # noqa: ANN401  the format is open
    """Returns the type that a value is written in unless it is `Typed`.

    Whole numbers are UINT32 as llama.cpp's converter writes them, INT32 below 0, 64 bits wide where they must be;
    fractions are FLOAT32, the only kind that llama.cpp reads.
    """
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return _whole([value], (UINT32, INT32, UINT64, INT64))
    return {float: FLOAT32, str: STRING, list: ARRAY}[type(value)]


def _element_kind(values: Sequence[Any]) -> int:
    """Returns the type of an array's elements; whole numbers are INT32 where they fit, as llama.cpp reads them."""
    kinds = {bool: BOOL, float: FLOAT32, str: STRING, list: ARRAY}
    found = {type(value) for value in values} or {str}
    if found == {int, float}:
        return FLOAT32
    if len(found) > 1:
        raise InputError("an array of values of different types", value=values[:3], allowed="one type")
    return _whole(values, (INT32, UINT32, INT64, UINT64)) if found == {int} else kinds[found.pop()]


def _whole(values: Sequence[int], tried: tuple[int, ...]) -> int:
    low, high = min(values), max(values)
    fits = (kind for kind in tried if LIMITS[kind][0] <= low and high < LIMITS[kind][1])
    if (found := next(fits, None)) is None:
        raise InputError("too large for a GGUF file", value=low if low < 0 else high, allowed="64 bits")
    return found


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _encoded(value: Any, kinds: tuple[int, ...]) -> bytes:  # noqa: ANN401
    """Returns a value without its type; of an array the type of its elements comes first."""
    if kinds[0] == STRING:
        return _text(value)
    if kinds[0] == BOOL:
        return struct.pack("<?", value)
    if kinds[0] != ARRAY:
        return struct.pack("<" + SCALARS[kinds[0]], value)
    inner = kinds[1:] or (_element_kind(value),)
    head = struct.pack("<IQ", inner[0], len(value))
    if inner[0] in SCALARS:
        return head + struct.pack(f"<{len(value)}{SCALARS[inner[0]]}", *value)
    return head + b"".join(_encoded(one, inner) for one in value)


def _pair(key: str, value: Any) -> bytes:  # noqa: ANN401
    try:
        typed = value if isinstance(value, Typed) else Typed((kind_of(value),), value)
        return _text(key) + struct.pack("<I", typed.kinds[0]) + _encoded(typed.value, typed.kinds)
    except (struct.error, OverflowError, TypeError, AttributeError, KeyError) as error:
        raise InputError(f"cannot be written: {error}", field=key, value=value) from error
    except InputError as error:
        raise InputError(error.problem, field=key, value=error.value, allowed=error.allowed) from error


def header(metadata: Mapping[str, Any], tensors: Sequence[Planned], alignment: int = DEFAULT_ALIGNMENT) -> bytes:
    """Returns the bytes before the first tensor's, padded to the alignment.

    Raises InputError for a value that the format cannot hold, and tensors that ggml would not take.
    """
    if alignment != DEFAULT_ALIGNMENT:
        metadata = {**metadata, "general.alignment": alignment}
    parts = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata))]
    parts += [_pair(key, value) for key, value in metadata.items()]
    at = 0
    for tensor in tensors:
        _require_possible(tensor)
        rank = len(tensor.shape)
        ne = struct.pack(f"<I{rank}Q", rank, *tensor.shape[::-1])
        parts.append(_text(tensor.name) + ne + struct.pack("<IQ", NUMBERS[tensor.type], at))
        at = aligned(at + tensor.nbytes, alignment)
    data = b"".join(parts)
    return data + bytes(aligned(len(data), alignment) - len(data))


def _require_possible(tensor: Planned) -> None:
    block = GGML_TYPES[NUMBERS[tensor.type]].block
    if len(tensor.name.encode()) >= MOST_NAME:
        raise InputError("name of a tensor is too long", value=tensor.name, allowed=f"below {MOST_NAME} bytes")
    if not 1 <= len(tensor.shape) <= MAX_RANK or 0 in tensor.shape:
        raise InputError("shape that GGUF does not hold", field=tensor.name, value=tensor.shape)
    if tensor.shape[-1] % block:
        raise InputError(
            f"rows do not divide into {tensor.type} blocks",
            field=tensor.name,
            value=tensor.shape[-1],
            allowed=f"a multiple of {block}",
        )


def in_parts(tensors: Sequence[Planned], most: float) -> list[list[Planned]]:
    """Returns the tensors in files of at most `most` bytes of data, except for a single larger tensor."""
    if not most > 0:
        raise InputError(field="max_shard_bytes", value=most, allowed="above 0")
    parts: list[list[Planned]] = [[]]
    filled = 0
    for tensor in tensors:
        if parts[-1] and filled + tensor.nbytes > most:
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += aligned(tensor.nbytes, DEFAULT_ALIGNMENT)
    return parts


def part_names(name: str, n: int) -> list[str]:
    """Returns the names of a model's files, NAME.gguf, or of `n` parts as those who read them look for them."""
    stem = name[: -len(".gguf")] if name.lower().endswith(".gguf") else name
    return [name] if n == 1 else [f"{stem}-{i + 1:05d}-of-{n:05d}.gguf" for i in range(n)]


def write(
    folder: Path,
    name: str,
    metadata: Mapping[str, Any],
    parts: Sequence[Sequence[Planned]],
    data: Callable[[Planned], Bytes],
    progress: Callable[[int], None] = lambda nbytes: None,
) -> list[str]:
    """Writes the parts into `folder` and returns their names; `data` is asked for each tensor's bytes in turn.

    `progress` is called with the bytes written after each tensor. Keys `split.*` of the metadata are replaced.
    """
    n, total, done = len(parts), sum(map(len, parts)), 0
    if n > MAX_PARTS or total > MAX_TENSORS:
        raise InputError("too many files or tensors", value=(n, total), allowed=f"{MAX_PARTS}, {MAX_TENSORS}")
    own = {key: value for key, value in metadata.items() if key not in (NUMBER, COUNT, TOTAL, "general.alignment")}
    names = part_names(name, n)
    for number, (file_name, tensors) in enumerate(zip(names, parts, strict=True)):
        counts = {NUMBER: Typed((UINT16,), number), COUNT: Typed((UINT16,), n), TOTAL: Typed((INT32,), total)}
        said = (own if number == 0 else {}) | (counts if n > 1 else {})
        with (folder / file_name).open("wb") as file:
            file.write(header(said, tensors))
            for tensor in tensors:
                _write_data(file, tensor, data(tensor))
                done += tensor.nbytes
                progress(done)
    return names


def _write_data(file: BinaryIO, tensor: Planned, pieces: Bytes) -> None:
    nbytes = 0
    for piece in pieces:
        nbytes += len(piece)
        file.write(piece)
    assert nbytes == tensor.nbytes, f"{tensor.name}: {nbytes} bytes, not {tensor.nbytes}"
    file.write(bytes(aligned(nbytes, DEFAULT_ALIGNMENT) - nbytes))

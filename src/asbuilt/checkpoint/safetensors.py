"""Safetensors files and folders of shards, from a source that is not trusted.

Headers are parsed here, without torch, and held against the file's size before anything is believed; the data itself
is read by the `safetensors` library, one tensor at a time, from a memory map.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asbuilt.dtypes import STORED_BITS
from asbuilt.errors import InputError, shorten
from asbuilt.files import decoded, open_regular, parse_json, read_object, require_regular

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# A header takes about 120 bytes and 8 values of JSON per tensor, and reading it 10 us and 1 kB of Python objects. The
# most tensors published under one index are 150k, in 14 MB, and some thousands in one file.
MAX_HEADER_BYTES, MAX_INDEX_BYTES, MAX_RANK = 8 << 20, 24 << 20, 8
MAX_HEADER_VALUES, MAX_TENSORS = 3 << 17, 1 << 18
LARGEST_COUNT = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where one tensor lies: `dtype` as the format spells it (BF16), `offset` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    offset: int
    nbytes: int


def read_header(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Returns the tensors that one safetensors file declares, in the order of the file, without reading their data.

    Raises InputError for a header that is no JSON, is larger than 8 MiB or contradicts itself or the file: shapes
    that do not give the declared bytes, overlaps, holes, data beyond the end. Source: the safetensors format, README.
    """
    path = Path(path)
    size, text = _header_text(path)
    header = parse_json(decoded(text, str(path)), str(path), most_values=MAX_HEADER_VALUES)
    if not isinstance(header, dict):
        raise InputError("not a JSON object", field=str(path), value=header)
    metadata = header.pop("__metadata__", None)  # null, as some writers have it, is none
    if metadata is not None:
        _check_metadata(path, metadata)
    base = 8 + len(text)
    tensors = [_tensor(path, name, said, base) for name, said in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    at = base
    for tensor in tensors:
        if tensor.offset != at:
            what = "overlaps the tensor before it" if tensor.offset < at else "leaves a hole before it"
            raise InputError(f"{shorten(tensor.name)} {what}", field=str(path), value=tensor.offset, allowed=str(at))
        at += tensor.nbytes
    if at != size:
        raise InputError(f"declares {at} bytes, file holds {size}", field=str(path), fix="is the download complete?")
    return {tensor.name: tensor for tensor in tensors}


def _header_text(path: Path) -> tuple[int, bytes]:
    """Returns the file's size and its header."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            most = min(size - 8, MAX_HEADER_BYTES)
            if not 2 <= length <= most:
                raise InputError(
                    "header length",
                    field=str(path),
                    value=length,
                    allowed=f"2 to {most}",
                    fix="is this a safetensors file, and complete?",
                )
            text = file.read(length)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", field=str(path)) from error
    if len(text) != length:
        raise InputError("the file was cut short while it was read", field=str(path))
    return size, text


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError("__metadata__", field=str(path), value=metadata, allowed="an object of texts")


def _tensor(path: Path, name: str, said: object, base: int) -> StoredTensor:
    def wrong(problem: str, value: object, allowed: str) -> InputError:
        return InputError(f"{shorten(name)}: {problem}", field=str(path), value=value, allowed=allowed)

    if not isinstance(said, dict) or said.keys() != {"dtype", "shape", "data_offsets"}:
        raise wrong("not a tensor", said, "dtype, shape, data_offsets")
    dtype, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(dtype, str) or dtype not in STORED_BITS:
        raise wrong("dtype", dtype, ", ".join(STORED_BITS))
    if not _counts(shape) or len(shape) > MAX_RANK:
        raise wrong("shape", shape, f"at most {MAX_RANK} whole numbers")
    if not _counts(offsets) or len(offsets) != 2:
        raise wrong("data_offsets", offsets, "two whole numbers")
    bits = math.prod(shape) * STORED_BITS[dtype]
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        raise wrong("data_offsets", offsets, f"{bits / 8:g} bytes apart, for {dtype} of shape {tuple(shape)}")
    return StoredTensor(
        name=name, shape=tuple(shape), dtype=dtype, path=path, offset=base + offsets[0], nbytes=bits // 8
    )


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= LARGEST_COUNT for value in values)


def has_weights(folder: Path) -> bool:
    """Returns whether a folder holds something under the names that transformers gives safetensors.

    An index without any shard came with a description.
    """
    return (folder / SINGLE).exists() or ((folder / INDEX).exists() and any(folder.glob("*.safetensors")))


def read_folder(folder: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint folder: of `model.safetensors` if there is one, else of the shards.

    That is the order in which transformers looks. Raises InputError where there are none, where the folder holds only
    pickle files, for an index that its shards do not bear out, and as `read_header`.
    """
    folder = Path(folder)
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if (folder / INDEX).exists():
        return _read_shards(folder, _weight_map(folder / INDEX))
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
    if pickles:
        raise pickle_error(str(folder), pickles[0])
    raise InputError("no weights", field=str(folder), allowed=f"{SINGLE}, or {INDEX} and its shards")


def pickle_error(field: str, name: str) -> InputError:
    """Returns the refusal of a pickle file, with the way out."""
    return InputError(
        "a pickle file, which can run any code while it is loaded, so it is never opened here",
        field=field,
        value=name,
        allowed=".safetensors, .gguf",
        fix="convert it once, in a container without network and secrets: torch.load(..., weights_only=True), then "
        f"safetensors.torch.save_file(..., {SINGLE!r})",
    )


def _weight_map(path: Path) -> dict[str, str]:
    found = read_object(path, MAX_INDEX_BYTES, most_values=MAX_TENSORS).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise InputError("weight_map", field=str(path), value=found, allowed="an object of tensor and file names")
    for shard in {str(shard): shard for shard in found.values()}.values():
        _check_shard_name(path, shard)
    return found


def shards_of(index: Path) -> list[str]:
    """Returns the files that an index names, each once; raises InputError for one that is not beside it."""
    return list(dict.fromkeys(_weight_map(index).values()))


def _check_shard_name(path: Path, shard: object) -> None:
    """Raises InputError unless the name is that of a file in the folder itself, on every system."""
    if not isinstance(shard, str) or not shard.endswith(".safetensors") or any(c in shard for c in "/\\:\0"):
        raise InputError("shard name", field=str(path), value=shard, allowed="a .safetensors file in the same folder")


def _read_shards(folder: Path, weight_map: dict[str, str]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for shard in dict.fromkeys(weight_map.values()):
        for name, tensor in read_header(folder / shard).items():
            if name in tensors:
                raise InputError(f"{shorten(name)} is stored twice", field=str(folder), value=shard)
            tensors[name] = tensor
        if len(tensors) > MAX_TENSORS:
            raise InputError(
                "too many tensors", field=str(folder), value=len(tensors), allowed=f"at most {MAX_TENSORS}"
            )
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise InputError(f"the index names {shorten(name)}, and the shard lacks it", field=str(folder), value=shard)
    return tensors


class Reader:
    """Reads the data of tensors whose headers were read, mapping each file when it is first needed."""

    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        self._tensors = tensors
        self._open: dict[Path, Any] = {}

    def __call__(self, name: str) -> Tensor:
        """Returns the tensor, its memory still the file's; InputError if the file has changed since."""
        from safetensors import SafetensorError, safe_open

        tensor = self._tensors[name]
        try:
            if tensor.path not in self._open:
                require_regular(tensor.path)
                self._open[tensor.path] = safe_open(tensor.path, framework="pt")
            read = self._open[tensor.path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{shorten(name)} cannot be read: {error}", field=str(tensor.path)) from error
        if tuple(read.shape) != tensor.shape:
            raise InputError(f"{shorten(name)} has changed since its header was read", field=str(tensor.path))
        return read

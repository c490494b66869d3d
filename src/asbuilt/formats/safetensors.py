"""Headers of untrusted safetensors files and folders of shards, checked against the file's size, without torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from asbuilt.dtypes import STORED_BITS
from asbuilt.errors import InputError, one_of, shorten
from asbuilt.files import decoded, open_regular, parse_json, read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Per tensor, a header has about 120 bytes and 8 JSON values, and reading it takes 10 us and 1 kB of Python objects. The
# largest plain index has 150k tensors in 14 MB, and the largest file some thousands; Kimi-K2 in NVFP4 has four tensors
# for each matrix of 60 x 384 experts, some 280k.
MAX_HEADER_BYTES, MAX_INDEX_BYTES, MAX_RANK = 8 << 20, 48 << 20, 8
MAX_HEADER_VALUES, MAX_TENSORS = 3 << 17, 3 << 17
LARGEST_COUNT = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """The place of one tensor: `dtype` in the format's spelling (BF16), `offset` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    offset: int
    nbytes: int


def read_header(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Returns the tensors that one safetensors file declares, in the order of the file, without reading their data.

    Raises InputError for a header that is not JSON, exceeds 8 MiB, or is inconsistent with itself or the file: shapes
    that do not match the declared bytes, overlaps, holes, data beyond the end. Source: the safetensors format, README.
    """
    path = Path(path)
    size, text = _header_text(path)
    header = parse_json(decoded(text, str(path)), str(path), most_values=MAX_HEADER_VALUES)
    if not isinstance(header, dict):
        raise InputError("invalid header", field=str(path), value=header, allowed="a JSON object")
    metadata = header.pop("__metadata__", None)  # some writers store null
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
        raise InputError(
            f"the header declares {at} bytes, the file has {size}",
            field=str(path),
            fix="check that the download is complete",
        )
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
                    "invalid header length",
                    field=str(path),
                    value=length,
                    allowed=f"2 to {most}" if most >= 2 else "",
                    fix="check that this is a safetensors file and that it is complete",
                )
            text = file.read(length)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", field=str(path)) from error
    if len(text) != length:
        raise InputError("the file was truncated while it was read", field=str(path))
    return size, text


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InputError("invalid __metadata__", field=str(path), value=metadata, allowed="an object of strings")


def _tensor(path: Path, name: str, said: object, base: int) -> StoredTensor:
    def wrong(problem: str, value: object, allowed: str) -> InputError:
        return InputError(f"{shorten(name)}: {problem}", field=str(path), value=value, allowed=allowed)

    if not isinstance(said, dict) or said.keys() != {"dtype", "shape", "data_offsets"}:
        raise wrong("invalid entry", said, "an object of dtype, shape and data_offsets")
    dtype, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(dtype, str) or dtype not in STORED_BITS:
        raise wrong("unknown dtype", dtype, one_of(STORED_BITS))
    if not _counts(shape) or len(shape) > MAX_RANK:
        raise wrong("invalid shape", shape, f"at most {MAX_RANK} whole numbers")
    if not _counts(offsets) or len(offsets) != 2:
        raise wrong("invalid data_offsets", offsets, "two whole numbers")
    bits = math.prod(shape) * STORED_BITS[dtype]
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        raise wrong("invalid data_offsets", offsets, f"{bits / 8:g} bytes apart, for {dtype} of shape {tuple(shape)}")
    return StoredTensor(
        name=name, shape=tuple(shape), dtype=dtype, path=path, offset=base + offsets[0], nbytes=bits // 8
    )


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= LARGEST_COUNT for value in values)


def has_weights(folder: Path) -> bool:
    """Returns whether a folder has safetensors files under transformers' names.

    An index without any shard does not count: it may come with a description alone.
    """
    return (folder / SINGLE).exists() or ((folder / INDEX).exists() and any(folder.glob("*.safetensors")))


def read_folder(folder: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint folder: of `model.safetensors` if there is one, else of the shards.

    That is transformers' order of preference. Raises InputError if there are none, if the folder has only pickle files,
    for an index that its shards contradict, and as `read_header` does.
    """
    folder = Path(folder)
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if (folder / INDEX).exists():
        return _read_shards(folder, _weight_map(folder / INDEX))
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
    if pickles:
        raise pickle_error(str(folder), pickles[0])
    raise InputError(f"no weights: neither {SINGLE} nor {INDEX} is there", field=str(folder))


def pickle_error(field: str, name: str) -> InputError:
    """Returns the InputError for a pickle file, with how to convert it safely."""
    return InputError(
        "a pickle file, which can run arbitrary code when loaded, so asbuilt never opens one",
        field=field,
        value=name,
        allowed=".safetensors or .gguf",
        fix="convert it once, in a container without network access or secrets: "
        f"torch.load(..., weights_only=True), then safetensors.torch.save_file(..., {SINGLE!r})",
    )


def _weight_map(path: Path) -> dict[str, str]:
    found = read_object(path, MAX_INDEX_BYTES, most_values=MAX_TENSORS).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise InputError(
            "invalid weight_map", field=str(path), value=found, allowed="an object of tensor and file names"
        )
    for shard in {str(shard): shard for shard in found.values()}.values():
        _check_shard_name(path, shard)
    return found


def shards_of(index: Path) -> list[str]:
    """Returns the distinct files that an index names; raises InputError for one outside its folder."""
    return list(dict.fromkeys(_weight_map(index).values()))


def _check_shard_name(path: Path, shard: object) -> None:
    """Raises InputError unless the name denotes a file in the folder itself, on every operating system."""
    if not isinstance(shard, str) or not shard.endswith(".safetensors") or any(c in shard for c in "/\\:\0"):
        raise InputError(
            "invalid shard name", field=str(path), value=shard, allowed="a .safetensors file in the same folder"
        )


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
            raise InputError(
                f"the index names {shorten(name)}, but the shard does not have it", field=str(folder), value=shard
            )
    return tensors

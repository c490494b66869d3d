"""A checkpoint folder in Hugging Face's layout, written aside and renamed when it is whole.

Offsets of all tensors follow from the spec, so headers are written first and each tensor then goes to its place: only
one is in memory at a time, which the library's own writer, given a whole shard at once, does not offer.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asbuilt.checkpoint.load import as_source, dtype_of, require_range
from asbuilt.checkpoint.safetensors import BITS, FLOATS, INDEX, SINGLE
from asbuilt.checkpoint.source import CONFIG, GENERATION, Source
from asbuilt.errors import InputError
from asbuilt.families import tensor_table, write_config
from asbuilt.families.table import Entry, Table
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec import buffers, stored_weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from asbuilt.nn.modules import Model

MAX_SHARD_BYTES = 5e9
# What lies beside the weights and is carried along as it is; never code.
COPIED = (
    GENERATION, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "source.spm", "target.spm", "target_vocab.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
CODES = {name: code for code, name in FLOATS.items()}
ALIGNMENT = 8
ROOM = 1 << 24  # bytes that a disk must have left for the small files, the tokenizer's being the largest

Progress = Callable[[int, int], None]


def save(
    model: Model,
    folder: str | os.PathLike[str],
    *,
    family: str,
    carried: dict[str, Any],
    dtype: torch.dtype | str | None = None,
    tokenizer_from: Source | str | Path | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Writes the model as a checkpoint folder that transformers loads.

    `carried` are the keys of config.json that do not describe the model; `dtype` None keeps each parameter's own, as
    buffers always do; `progress` is called with bytes written and bytes in all. Raises InputError for a family that
    cannot express the model, a folder that exists and is not empty, a full disk, and values beyond the range of
    `dtype`. Whatever is raised, nothing is left behind.
    """
    from asbuilt.nn import stored_tensors

    tensors = stored_tensors(model)
    own = {path for path, _, _ in buffers(model.spec)}
    kept = {path: dtype_of(t.dtype if dtype is None or path in own else dtype) for path, t in tensors.items()}
    write_folder(
        folder,
        spec=model.spec,
        family=family,
        carried=carried,
        config_dtype=str(next(iter(kept.values()))).removeprefix("torch."),
        dtypes=kept,
        read=lambda entry: [tensors[path].detach() for path in entry.paths],
        beside=None if tokenizer_from is None else as_source(tokenizer_from),
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )


def write_folder(
    folder: str | os.PathLike[str],
    *,
    spec: ModelSpec,
    family: str,
    carried: dict[str, Any],
    config_dtype: str,
    dtypes: dict[str, torch.dtype],
    read: Callable[[Entry], list[Tensor]],
    beside: Source | None,
    max_shard_bytes: float,
    progress: Progress | None,
) -> None:
    """Writes a checkpoint folder from `read`, which gives the tensors of an entry's paths; see `save`."""
    config = write_config(family, spec, carried, config_dtype)
    table = tensor_table(family, spec)
    shards = plan_shards(_stored(table, spec, dtypes), max_shard_bytes)
    total = sum(place.nbytes for shard in shards for place in shard)
    with aside(Path(folder), total + ROOM) as partial:
        _write_json(partial / CONFIG, config)
        if beside is not None:
            _write_beside(beside, partial)
        places = _begin_shards(partial, shards, total)
        done = 0
        for entry in table.entries:
            for name, tensor in zip(entry.names, entry.layout.save(read(entry)), strict=True):
                path, place = places.pop(name)  # KeyError: a table that stores a name twice
                _write_tensor(path, place, tensor)
                done += place.nbytes
                if progress is not None:
                    progress(done, total)
        assert not places, f"never written: {sorted(places)}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tensor goes in its shard: `start` in bytes from the beginning of the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def code(self) -> str:
        """The dtype as the format spells it."""
        return CODES[str(self.dtype).removeprefix("torch.")]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * BITS[self.code] // 8


def _stored(table: Table, spec: ModelSpec, dtypes: dict[str, torch.dtype]) -> Iterator[Place]:
    import torch

    shapes = {path: weight.shape for path, weight, _ in stored_weights(spec)}
    for entry in table.entries:
        dtype = dtypes[entry.paths[0]]
        for path in entry.paths[1:]:
            dtype = torch.promote_types(dtype, dtypes[path])
        stored = entry.layout.stored_shapes([shapes[path] for path in entry.paths])
        yield from (Place(name=name, dtype=dtype, shape=shape) for name, shape in zip(entry.names, stored, strict=True))


def plan_shards(places: Iterator[Place], max_shard_bytes: float) -> list[list[Place]]:
    """Returns the tensors cut into shards of at most `max_shard_bytes`, except for one that alone is larger.

    In a shard the widest dtype comes first, which keeps every tensor aligned to its elements.
    """
    if not max_shard_bytes > 0:
        raise InputError("not allowed", field="max_shard_bytes", value=max_shard_bytes, allowed="above 0")
    shards: list[list[Place]] = [[]]
    filled = 0
    for place in places:
        if shards[-1] and filled + place.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(place)
        filled += place.nbytes
    return [_placed(shard) for shard in shards]


def _placed(shard: list[Place]) -> list[Place]:
    placed, at = [], 0
    for place in sorted(shard, key=lambda place: -BITS[place.code]):
        placed.append(Place(name=place.name, dtype=place.dtype, shape=place.shape, start=at))
        at += place.nbytes
    return placed


def _begin_shards(folder: Path, shards: list[list[Place]], total: int) -> dict[str, tuple[Path, Place]]:
    """Writes every shard's header, and the index if there are several; returns file and place of each tensor."""
    n = len(shards)
    files = [SINGLE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    places: dict[str, tuple[Path, Place]] = {}
    for file, shard in zip(files, shards, strict=True):
        header = _header(shard)
        (folder / file).write_bytes(header)
        for place in shard:
            assert place.name not in places, f"{place.name} is stored twice"
            start = len(header) + place.start
            moved = Place(name=place.name, dtype=place.dtype, shape=place.shape, start=start)
            places[place.name] = (folder / file, moved)
    if n > 1:
        names = {name: path.name for name, (path, _) in sorted(places.items())}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": names})
    return places


def _header(shard: list[Place]) -> bytes:
    """Returns the length and the JSON that a safetensors file begins with, padded so that the data are aligned."""
    said: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for place in shard:
        offsets = [place.start, place.start + place.nbytes]
        said[place.name] = {"dtype": place.code, "shape": list(place.shape), "data_offsets": offsets}
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(path: Path, place: Place, tensor: Tensor) -> None:
    import torch

    assert tuple(tensor.shape) == place.shape, f"{place.name}: {tuple(tensor.shape)} is not {place.shape}"
    require_range(tensor, place.dtype, place.name)
    flat = tensor.to("cpu", place.dtype).contiguous().reshape(-1)
    with path.open("r+b") as file:
        file.seek(place.start)
        flat.view(torch.uint8).numpy().tofile(file)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_beside(source: Source, folder: Path) -> None:
    """Writes the tokenizer and the generation settings of the source, whichever it has."""
    if source.kind == "folder" and source.path is not None:
        for name in COPIED:
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, folder / name)
    elif source.gguf is not None:
        tokenizer = source.tokenizer()
        generation = {key: source.reading.carried[key] for key in GENERATION_KEYS if key in source.reading.carried}
        if tokenizer is not None:
            tokenizer.save(folder)
            if len(tokenizer.eos_ids) > 1:
                generation["eos_token_id"] = list(tokenizer.eos_ids)
        if generation:
            _write_json(folder / GENERATION, generation)


@contextmanager
def aside(folder: Path, nbytes: int) -> Iterator[Path]:
    """Gives a new folder beside `folder` that takes its place at the end, or is removed whatever is raised.

    Raises InputError where `folder` exists and is not empty, where the disk has less than `nbytes` left, and for
    whatever the file system refuses.
    """
    folder = Path(os.path.abspath(folder))
    try:
        _require_absent(folder)
        made = [parent for parent in folder.parents if not parent.exists()]  # the innermost first
        _require_room(folder.parents[len(made)], nbytes)
        partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
        try:
            partial.mkdir(parents=True)
            yield partial
            _require_absent(folder)
            if folder.exists():
                folder.rmdir()
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            with suppress(OSError):
                for parent in made:
                    parent.rmdir()
            raise
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", field=str(folder)) from error


def _require_absent(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        raise InputError("exists already", field=str(folder), allowed="a new or empty folder",
                         fix="remove it, or choose another")  # fmt: skip


def _require_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise InputError("the disk is too full", field=str(folder), value=free, allowed=f"{nbytes} bytes free")

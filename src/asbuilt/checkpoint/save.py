"""Writes a checkpoint folder, in Hugging Face's layout or asbuilt's own, under a temporary name until it is complete.

The offsets of all tensors follow from the spec, so headers are written first and each tensor is then written to its
place. Only one tensor is in memory at a time; the library's own writer takes a whole shard at once.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from asbuilt.checkpoint.load import PACKED, alike, as_source, dtype_of, require_range
from asbuilt.checkpoint.own import OWN, own_document, own_table
from asbuilt.checkpoint.source import CONFIG, GENERATION, Source
from asbuilt.dtypes import STORED_BITS, STORED_FLOATS
from asbuilt.errors import InputError, shorten
from asbuilt.families import tensor_table, write_config
from asbuilt.families.shared.table import Entry, TensorTable
from asbuilt.files import decoded, parse_json, read_regular, require_regular, stays_within
from asbuilt.formats.safetensors import INDEX, SINGLE
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec import buffers, stored_weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from asbuilt.nn.model import Model

MAX_SHARD_BYTES = 5e9
# Files beside the weights that are copied verbatim; never code.
COPIED = (
    GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "target_vocab.json",
    "chat_template.jinja",
    "chat_template.json",
)
# The largest published tokenizer.json has 35 MB.
MOST_BESIDE = 128 << 20
WHOLE = ("tokenizer.json", "vocab.json", "added_tokens.json", "target_vocab.json")  # vocabularies rather than settings
AUTO_MAP = "auto_map"  # names code beside the weights, which is not copied
GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
CODES = {name: code for code, name in STORED_FLOATS.items()} | {"uint8": PACKED, "int64": "I64"}
CODES |= {"int8": "I8", "int32": "I32"}
ALIGNMENT = 8
ROOM = 1 << 24  # free disk space required for the files written beside the weights, mainly a tokenizer
CHUNK = 1 << 24  # numbers that are converted and written at a time
LEFTOVER = r"\.{}\.[0-9a-f]{{8}}\.partial"

Progress = Callable[[int, int], None]


class Packs(Protocol):
    """What rounds stored tensors: what the config says of it, and what a tensor becomes, planned and done."""

    def config(self) -> dict[str, Any]: ...  # noqa: D102
    def places(self, place: Place) -> Iterable[Place]: ...  # noqa: D102
    def __call__(self, name: str, tensor: Tensor, dtype: torch.dtype) -> dict[str, Tensor]: ...  # noqa: D102


def save(
    model: Model,
    folder: str | os.PathLike[str],
    *,
    family: str | None = None,
    carried: dict[str, Any] | None = None,
    dtype: torch.dtype | str | None = None,
    tokenizer_from: Source | str | Path | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Writes the model as a folder: in asbuilt's own layout, or in that of a published `family` for transformers.

    Our own form is the spec in `asbuilt.json`, and tensors under its paths: any model can be saved so. `carried` are
    the keys of config.json that do not describe the model, such as its end tokens; `dtype` None keeps each parameter's
    own, as buffers and packed blocks always do; `tokenizer_from` is a source whose tokenizer goes beside; `progress` is
    called with bytes written and bytes in all. Raises InputError for a family that cannot express the model, a folder
    that exists and is not empty, a full disk, and values beyond the range of `dtype`. Whatever is raised, nothing is
    left behind.
    """
    from asbuilt.nn import stored_tensors

    tensors = stored_tensors(model)
    own = {path for path, _, _ in buffers(model.spec)}
    packed = {path: t.dtype for path, t in tensors.items() if not t.is_floating_point()}
    kept = {
        path: dtype_of(t.dtype if dtype is None or path in own else dtype)
        for path, t in tensors.items()
        if path not in packed
    }
    write_folder(
        folder,
        spec=model.spec,
        family=family,
        carried=carried or {},
        config_dtype=str(next(iter(kept.values()), model.dtype)).removeprefix("torch."),
        dtypes=packed | kept,
        read=lambda entry: [tensors[path].detach() for path in entry.paths],
        beside=None if tokenizer_from is None else as_source(tokenizer_from),
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )


def write_folder(
    folder: str | os.PathLike[str],
    *,
    spec: ModelSpec,
    family: str | None,
    carried: dict[str, Any],
    config_dtype: str,
    dtypes: dict[str, torch.dtype],
    read: Callable[[Entry], list[Tensor]],
    beside: Source | None,
    max_shard_bytes: float,
    progress: Progress | None,
    pack: Packs | None = None,
) -> None:
    """Writes a checkpoint folder from `read`, which returns the tensors of an entry's paths; see `save`.

    With `pack` each stored tensor becomes what it makes of it.
    """
    if family is not None and any(weight.format is not None for _, weight, _ in stored_weights(spec)):
        raise InputError(
            "packed weights are saved in our own form",
            field="family",
            value=family,
            fix="leave the family out, or load the model without `packed`",
        )
    if family is None:
        file, config, table = OWN, own_document(spec, carried, config_dtype), own_table(spec)
    else:
        file, config, table = CONFIG, write_config(family, spec, carried, config_dtype), tensor_table(family, spec)
    stored = list(_stored(table, spec, dtypes))
    own = {place.name: place.dtype for place in stored}
    if pack is not None:
        config["quantization_config"] = pack.config()
        stored = [made for place in stored for made in pack.places(place)]
    shards = plan_shards(iter(stored), max_shard_bytes)
    total = sum(place.nbytes for shard in shards for place in shard)
    copied = {} if beside is None else _copied(beside)
    with aside(Path(folder), total + sum(copied.values()) + ROOM) as partial:
        _write_json(partial / file, _without_code(config))
        if beside is not None:
            _write_beside(beside, copied, partial)
        places = _begin_shards(partial, shards, total)
        done = 0
        for entry in table.entries:
            with named_memory(entry):
                tensors = entry.layout.save(alike(read(entry)))
            made = ((name, tensor, own[name]) for name, tensor in zip(entry.names, tensors, strict=True))
            packed = (
                [(name, tensor)] if pack is None else pack(name, tensor, dtype).items() for name, tensor, dtype in made
            )
            for name, tensor in chain.from_iterable(packed):
                path, place = places.pop(name)  # KeyError: a table that stores a name twice
                with named_memory(entry):
                    _write_tensor(path, place, tensor)
                done += place.nbytes
                if progress is not None:
                    progress(done, total)
        assert not places, f"never written: {sorted(places)}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A tensor's place in its shard: `start` in bytes from the beginning of the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def code(self) -> str:
        """The dtype in the format's spelling."""
        return CODES[str(self.dtype).removeprefix("torch.")]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * STORED_BITS[self.code] // 8


def _stored(table: TensorTable, spec: ModelSpec, dtypes: dict[str, torch.dtype]) -> Iterator[Place]:
    import torch

    shapes = {path: weight.stored_shape for path, weight, _ in stored_weights(spec)}
    for entry in table.entries:
        dtype = dtypes[entry.paths[0]]
        for path in entry.paths[1:]:
            dtype = torch.promote_types(dtype, dtypes[path])
        stored = entry.layout.stored_shapes([shapes[path] for path in entry.paths])
        yield from (Place(name=name, dtype=dtype, shape=shape) for name, shape in zip(entry.names, stored, strict=True))


def plan_shards(places: Iterator[Place], max_shard_bytes: float) -> list[list[Place]]:
    """Returns the tensors in shards of at most `max_shard_bytes`, except for a single larger tensor.

    Within a shard wider dtypes come first, which aligns every tensor to its element size.
    """
    if not max_shard_bytes > 0:
        raise InputError(field="max_shard_bytes", value=max_shard_bytes, allowed="above 0")
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
    for place in sorted(shard, key=lambda place: -STORED_BITS[place.code]):
        placed.append(Place(name=place.name, dtype=place.dtype, shape=place.shape, start=at))
        at += place.nbytes
    return placed


def _begin_shards(folder: Path, shards: list[list[Place]], total: int) -> dict[str, tuple[Path, Place]]:
    """Writes every shard's header, and the index if there are several; returns each tensor's file and place."""
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
    """Returns the length and the JSON at the start of a safetensors file, padded so that the data are aligned."""
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
    if tensor.is_floating_point():
        require_range(tensor, place.dtype, place.name)
    flat = tensor.reshape(-1)
    with path.open("r+b") as file:
        file.seek(place.start)
        for part in flat.split(CHUNK):
            file.write(part.to("cpu", place.dtype).contiguous().view(torch.uint8).numpy().data)


@contextmanager
def named_memory(entry: Entry) -> Iterator[None]:
    """Turns a failed allocation into an InputError that names the tensor."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's allocator has no error class of its own
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        said = re.search(r"\d+ bytes|\d[\d.]* [KMGT]iB", str(error))
        raise InputError(
            f"not enough memory{f', {said[0]} more are needed' if said else ''}",
            field=shorten(entry.names[0]),
            fix="convert on a machine with more memory",
        ) from error


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copied(source: Source) -> dict[str, int]:
    """Returns the files of a folder that are copied, and the bytes of each; raises InputError for an unsuitable one.

    A link that leads out of the folder could copy any file of the machine.
    """
    if source.kind != "folder" or source.path is None:
        return {}
    found = {}
    for name in COPIED:
        path = source.path / name
        if path.is_symlink() and not stays_within(path, source.path):
            raise InputError(
                "a link that leads out of the folder is not copied",
                field=str(path),
                fix="replace it with a copy, or remove it",
            )
        if path.exists():
            found[name] = require_regular(path).st_size
            if found[name] > MOST_BESIDE:
                raise InputError(
                    "too large to be copied along",
                    field=str(path),
                    value=found[name],
                    allowed=f"at most {MOST_BESIDE:,} bytes",
                )
    return found


def _write_beside(source: Source, copied: dict[str, int], folder: Path) -> None:
    """Writes the tokenizer and generation settings of the source, if any; `copied` files verbatim."""
    if source.kind == "folder" and source.path is not None:
        for name in copied:
            data = read_regular(source.path / name, MOST_BESIDE)
            if name.endswith(".json") and AUTO_MAP.encode() in data and name not in WHOLE:
                field = str(source.path / name)
                _write_json(folder / name, _without_code(parse_json(decoded(data, field), field, finite=False)))
            else:
                (folder / name).write_bytes(data)
    elif source.gguf is not None:
        tokenizer = source.tokenizer()
        generation = {key: source.reading.carried[key] for key in GENERATION_KEYS if key in source.reading.carried}
        if tokenizer is not None:
            tokenizer.save(folder)
            if len(tokenizer.eos_ids) > 1:
                generation["eos_token_id"] = list(tokenizer.eos_ids)
        if generation:
            _write_json(folder / GENERATION, generation)


def _without_code(value: Any) -> Any:  # noqa: ANN401  any JSON value
    """Returns the value without the keys that name code, at any depth."""
    if isinstance(value, dict):
        return {key: _without_code(held) for key, held in value.items() if key != AUTO_MAP}
    return [_without_code(held) for held in value] if isinstance(value, list) else value


@contextmanager
def aside(folder: Path, nbytes: int) -> Iterator[Path]:
    """Yields a temporary folder that replaces `folder` at the end, or is removed if anything is raised.

    Leftovers of killed processes are removed first. Raises InputError if `folder` exists and is not empty, if the disk
    has less than `nbytes` free, and for any error of the file system.
    """
    folder = Path(os.path.abspath(folder))

    def place(partial: Path) -> None:
        _require_absent(folder)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)

    with _partial(folder, nbytes, lambda: _require_absent(folder), place) as partial:
        yield partial


@contextmanager
def files_aside(out: Path, names: Sequence[str], nbytes: int) -> Iterator[Path]:
    """Yields a temporary folder whose files of these names are moved beside `out` at the end, all of them or none.

    Raises as `aside` does, and if any of the files is there already.
    """
    out = Path(os.path.abspath(out))
    targets = [out.with_name(name) for name in names]

    def absent() -> None:
        for target in targets:
            if os.path.lexists(target):
                raise InputError("already exists", field=str(target), fix="remove it, or choose another name")

    def place(partial: Path) -> None:
        moved: list[Path] = []
        try:
            absent()
            for target in targets:
                (partial / target.name).rename(target)
                moved.append(target)
        except BaseException:
            for target in moved:
                target.unlink(missing_ok=True)
            raise
        partial.rmdir()

    with _partial(out, nbytes, absent, place) as partial:
        yield partial


@contextmanager
def _partial(target: Path, nbytes: int, absent: Callable[[], None], place: Callable[[Path], None]) -> Iterator[Path]:
    """Yields a temporary folder beside `target`, which `place` puts where it belongs at the end."""
    held: int | None = None
    try:
        absent()
        _remove_leftovers(target)
        made = [parent for parent in target.parents if not parent.exists()]  # the innermost first
        _require_room(target.parents[len(made)], nbytes)
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        try:
            partial.mkdir(parents=True)
            held = _lock(partial)
            yield partial
            place(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            with suppress(OSError):
                for parent in made:
                    parent.rmdir()
            raise
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", field=str(target)) from error
    finally:
        if held is not None:
            os.close(held)


def _lock(partial: Path) -> int | None:
    """Returns a descriptor that locks a temporary folder of ours as long as this process lives.

    None if another process holds the lock, if the folder is not ours, or if locks are not supported (on Windows, where
    leftovers are therefore never removed).
    """
    try:
        import fcntl

        held = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (ImportError, AttributeError, OSError):
        return None
    try:
        if os.fstat(held).st_uid == os.getuid():
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return held
    except OSError:
        pass
    os.close(held)
    return None


def _remove_leftovers(folder: Path) -> None:
    """Removes temporary folders of killed processes for this folder."""
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*.partial"):
        if re.fullmatch(LEFTOVER.format(re.escape(folder.name)), path.name) and (held := _lock(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(held)


def _require_absent(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        raise InputError(
            "already exists", field=str(folder), allowed="a new or empty folder", fix="remove it, or choose another"
        )


def _require_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise InputError(
            f"not enough disk space: {nbytes:,} bytes are needed, {free:,} are free",
            field=str(folder),
            fix="free some, or choose a folder on another disk",
        )

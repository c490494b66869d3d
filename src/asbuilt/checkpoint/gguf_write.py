"""Writes a checkpoint as a GGUF file, its weights as they are or rounded to blocks, tensor by tensor.

What a header says and what tensors are called comes from the same tables that files are read by
(`asbuilt.families.gguf`); which format each is written in, from `wanted`.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asbuilt.checkpoint.load import Contents, alike, as_source, require_range, stored_dtype
from asbuilt.checkpoint.packed import by_rows
from asbuilt.checkpoint.regroup import Regrouped
from asbuilt.checkpoint.save import ROOM, Progress, files_aside, named_memory
from asbuilt.checkpoint.source import TOKENIZER, Source
from asbuilt.checkpoint.wanted import FLOATS, HEAD, WIDER, Formats, Wanted, file_type, fitting, kept_wide
from asbuilt.dtypes import BLOCKS
from asbuilt.errors import InputError
from asbuilt.families import gguf_family, gguf_header, gguf_table
from asbuilt.families.shared.table import Entry
from asbuilt.files import open_regular
from asbuilt.formats.gguf import GGUFFile, GGUFTensor
from asbuilt.formats.gguf_write import Planned, Typed, header, in_parts, part_names, write
from asbuilt.spec import stored_weights

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURE, FILE_TYPE, VERSION = "general.architecture", "general.file_type", "general.quantization_version"
QUANTISERS = ("quantize.", "imatrix.")  # keys that tell how other blocks were made
CHUNK = 1 << 22  # numbers that are converted and written at a time


@dataclass(frozen=True, kw_only=True)
class Row:
    """A tensor as it was written: the weights in it, its type and bytes, and |written - was| / |was|, 0 if copied.

    `output_error` is the same of what the weights give, for inputs of known mean squares that are uncorrelated.
    """

    paths: tuple[str, ...]
    type: str
    nbytes: int
    error: float
    output_error: float | None = None


@dataclass(kw_only=True)
class Summary:
    """What was written: the files, by kind of part the bytes of the tensors as they were and as they are, and each."""

    files: list[Path] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)
    types: Counter[str] = field(default_factory=Counter)


def is_gguf(out: str | os.PathLike[str]) -> bool:
    """Returns whether a name is that of a GGUF file."""
    return Path(out).suffix.lower() == ".gguf"


def write_gguf(
    source: Source | str | Path,
    out: str | os.PathLike[str],
    formats: Formats,
    max_part_bytes: float = float("inf"),
    progress: Progress | None = None,
    note: Callable[[str], None] = lambda text: None,
    importance: Mapping[str, Tensor] | None = None,
) -> Summary:
    """Writes `source`, a checkpoint folder or GGUF file, as the GGUF file `out`, and returns what was written.

    `importance` are mean squares of the inputs of maps, by weights' paths, that weigh errors (`measure.importance`).
    Where its parts would exceed `max_part_bytes` it becomes NAME-00001-of-0000N.gguf and so on. Blocks of a GGUF file
    whose format stays are copied. `note` is told what such files cannot say of the model. Raises InputError for a model
    that no architecture of GGUF holds, a tokenizer that its keys cannot say, numbers that the format cannot hold, files
    that exist, and a full disk; whatever is raised, nothing is left behind.
    """
    out = Path(out)
    job = _Job(as_source(source), formats, importance or {})
    for path, text in job.header.notes.items():
        note(f"{path}: {text}")
    parts = in_parts(job.planned, max_part_bytes)
    names = part_names(out.name, len(parts))
    total = sum(tensor.nbytes for tensor in job.planned)
    tell = (lambda done: None) if progress is None else (lambda done: progress(done, total))
    with files_aside(out, names, total + len(header(job.metadata, job.planned)) + ROOM) as partial:
        write(partial, out.name, job.metadata, parts, job.data, tell)
    job.summary.files = [out.with_name(name) for name in names]
    return job.summary


def file_entries(source: Source) -> dict[str, Entry]:
    """Returns the tensors of the GGUF file that a model is written as, by name.

    Maps of latent attention are written one by one, as newer files have them.
    """
    there = () if source.gguf is None else source.gguf.tensors
    stored = [name for name in there if not name.endswith("attn_kv_b.weight")]
    table = gguf_table(gguf_family(source.family, source.spec), source.spec, stored)
    return {entry.names[0]: entry for entry in table.entries}


class _Job:
    """One file to be written: its metadata, its tensors as planned, and their bytes."""

    def __init__(self, source: Source, formats: Formats, importance: Mapping[str, Tensor]) -> None:
        self.contents, self.formats, self.summary, self.importance = Contents(source), formats, Summary(), importance
        self.spec, self.file = source.spec, source.gguf
        if any(weight.format is not None for _, weight, _ in stored_weights(self.spec)):
            fix = "convert the file or folder that it was loaded from"
            raise InputError(
                "packed weights of our own form are not written", field="MODEL", value=source.name, fix=fix
            )
        self.entries = file_entries(source)
        self._owners = {path: (weight, owner) for path, weight, owner in stored_weights(self.spec)}
        # logits are products with the head's matrix, in a tied model with the token table
        self._head = next((path for path in ("head.weight", "embedding.weight") if path in self._owners), None)
        self._held = {path: entry for entry in self.contents.entries for path in entry.paths}
        self._read = Regrouped(self.contents)
        self.planned = self._plan()
        shapes = {tensor.name: tensor.shape for tensor in self.planned}
        self.header = gguf_header(gguf_family(source.family, self.spec), self.spec, source.reading.carried, shapes)
        self.planned += [Planned(name=n, type="F32", shape=(len(v),)) for n, v in self.header.values.items()]
        self._place_as_stored()
        self.metadata = self._metadata(source)

    def _plan(self) -> list[Planned]:
        """Returns the tensors with their types; counts their bytes."""
        wanted = self.wanted = Wanted(self.formats, self.spec, list(self.entries.values()))
        shapes = {path: weight.shape for path, weight, _ in stored_weights(self.spec)}
        planned = []
        for name, entry in self.entries.items():
            assert len(entry.names) == 1, f"{entry.names}: a GGUF file has one tensor for several, not several for one"
            (shape,) = entry.layout.stored_shapes([shapes[path] for path in entry.paths])
            planned.append(Planned(name=name, type=self._type(entry, shape, wanted), shape=shape))
            kind = self._owners[entry.paths[0]][1].kind
            self.summary.after[kind] += planned[-1].nbytes
            self.summary.types[planned[-1].type] += 1
        for entry in self.contents.entries:
            held = sum(self.contents.headers[name].nbytes for name in entry.names)
            self.summary.before[self._owners[entry.paths[0]][1].kind] += held
        return planned

    def _type(self, entry: Entry, shape: tuple[int, ...], of: Wanted) -> str:
        (weight, owner), path = self._owners[entry.paths[0]], entry.paths[0]
        wanted = of.of(entry)
        if wanted is None:
            stored = self._stored_type(entry)
            if self.file is not None or stored not in FLOATS.values():
                return fitting(stored, shape)
            wanted = next(ours for ours, theirs in FLOATS.items() if theirs == stored)
        if len(shape) < 2 or kept_wide(path, weight, owner):
            return "F32"
        if not of.as_said(path) and wanted not in WIDER and path == self._head:
            wanted = HEAD
        return fitting(FLOATS.get(wanted, wanted.upper()), shape)

    def _stored_type(self, entry: Entry) -> str:
        """Returns the type that an entry's weights have in the source, of a folder that of their dtype."""
        stored = [self.contents.headers[name] for path in entry.paths for name in self._held[path].names]
        first = stored[0]
        if isinstance(first, GGUFTensor):
            return first.type
        dtypes = {stored_dtype(one) for one in stored}
        own = {"bfloat16": "BF16", "float16": "F16"}
        return own.get(dtypes.pop() or "", "F32") if len(dtypes) == 1 else "F32"

    def _place_as_stored(self) -> None:
        """Orders the tensors as the GGUF file that they come from has them."""
        if self.file is not None:
            place = {name: i for i, name in enumerate(self.file.tensors)}
            self.planned.sort(key=lambda tensor: place.get(tensor.name, len(place)))

    def _metadata(self, source: Source) -> dict[str, Any]:
        types = Counter({t.type: 0 for t in self.planned})
        for tensor in self.planned:
            types[tensor.type] += tensor.nbytes if len(tensor.shape) > 1 else 0
        most = types.most_common(1)[0][0]
        own: dict[str, Any] = {ARCHITECTURE: self.header.architecture.name, "general.type": "model"}
        own |= {"general.name": source.name, FILE_TYPE: file_type(self.wanted.mixture, most)}
        if any(tensor.type.lower() in BLOCKS for tensor in self.planned):
            own[VERSION] = 2
        own |= self.header.metadata
        own = {key: value for key, value in own.items() if value is not None}
        return own | _tokenizer(source) if self.file is None else _as_before(self.file, own, self._copied())

    def _copied(self) -> bool:
        """Returns whether all tensors are those of the file that they come from."""
        return all(self._same(tensor) is not None for tensor in self.planned)

    def _same(self, tensor: Planned) -> GGUFTensor | None:
        """Returns the tensor of the source that has the same bytes, None where there is none."""
        stored = None if self.file is None else self.file.tensors.get(tensor.name)
        same = stored is not None and (stored.type, stored.shape) == (tensor.type, tensor.shape)
        return stored if same else None

    def data(self, tensor: Planned) -> Iterator[memoryview]:
        """Yields the bytes of a tensor."""
        same, off = self._same(tensor), Off(self._weighs(tensor))
        if same is not None and self.file is not None:
            yield from _raw(self.file, same)
        elif tensor.name in self.header.values:
            import numpy as np

            yield np.array(self.header.values[tensor.name], np.float32).data.cast("B")
        else:
            entry = self.entries[tensor.name]
            with named_memory(entry):
                found = [part.float() for part in self._read.read(entry)] if tensor.type == "F32" else None
                (made,) = entry.layout.save(found or alike(self._read.read(entry)))
                yield from _pieces(made, tensor, off)
        if tensor.name in self.entries:
            paths = tuple(self.entries[tensor.name].paths)
            said = {"error": off.error, "output_error": off.output_error}
            self.summary.rows.append(Row(paths=paths, type=tensor.type, nbytes=tensor.nbytes, **said))

    def _weighs(self, tensor: Planned) -> Tensor | None:
        """Returns the importance of a tensor's columns, (I), of a stack (E, I); None where it is not known.

        Maps that lie in one tensor read the same input.
        """
        entry = self.entries.get(tensor.name)
        some = [self.importance[path] for path in entry.paths if path in self.importance] if entry else []
        if entry is None or len(some) < len(entry.paths) or by_rows(entry.layout, {}) is None:
            return None
        mean = sum(some[1:], some[0]) / len(some)
        stacked = mean.ndim == 2
        wanted = (tensor.shape[0], tensor.shape[-1]) if stacked and len(tensor.shape) > 2 else tensor.shape[-1:]
        return mean if tuple(mean.shape) == wanted else None


class Off:
    """How far written numbers are from those that they were: sums of squares, also weighed by `importance`."""

    def __init__(self, importance: Tensor | None) -> None:
        self.importance = importance
        self._sums = [0.0, 0.0, 0.0, 0.0]  # of errors and of all, then both weighed

    def add(self, was: Tensor, now: Tensor, weighs: Tensor | None) -> None:
        """Adds some rows."""
        squares = ((now - was).double().square(), was.double().square())
        self._sums[:2] = (a + float(b.sum()) for a, b in zip(self._sums[:2], squares, strict=True))
        if weighs is not None:
            self._sums[2:] = (a + float((b * weighs).sum()) for a, b in zip(self._sums[2:], squares, strict=True))

    @property
    def error(self) -> float:
        """|now - was| / |was|; 0 where nothing was or changed."""
        return _root(*self._sums[:2])

    @property
    def output_error(self) -> float | None:
        """The same of outputs; None without importance."""
        return None if self.importance is None else _root(*self._sums[2:])


def _root(part: float, whole: float) -> float:
    return math.sqrt(part / whole) if whole else 0.0


def _pieces(made: Tensor, tensor: Planned, off: Off) -> Iterator[memoryview]:
    """Yields the bytes of a tensor in its type, some rows at a time, and adds up how far off they are."""
    import torch

    from asbuilt.kernels.packed import expand
    from asbuilt.kernels.quantise import quantise

    assert tuple(made.shape) == tensor.shape, f"{tensor.name}: {tuple(made.shape)} is not {tensor.shape}"
    rows, format, start = made.reshape(-1, made.shape[-1]), tensor.type.lower(), 0
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(tensor.type)
    if plain is not None:
        require_range(made, plain, tensor.name)
    for piece in rows.split(max(1, CHUNK // made.shape[-1])):
        part, weighs = piece.to("cpu"), _of_rows(off.importance, made, start, len(piece))
        stored = part.to(plain) if plain is not None else quantise(part, format, tensor.name, weighs)
        if stored.dtype != part.dtype:
            now = stored.float() if plain is not None else expand(stored, format, torch.float32)
            off.add(part.float(), now, weighs)
        start += len(piece)
        yield stored.contiguous().view(torch.uint8).numpy().data.cast("B")


def _of_rows(importance: Tensor | None, made: Tensor, start: int, n: int) -> Tensor | None:
    """Returns the importance of the columns, (I), or of a stack's rows from `start` on, (n, I)."""
    import torch

    if importance is None or importance.ndim == 1:
        return importance
    return importance[torch.arange(start, start + n) // (made[0].numel() // made.shape[-1])]


def _raw(file: GGUFFile, tensor: GGUFTensor) -> Iterator[memoryview]:
    """Yields a stored tensor's bytes."""
    path = file.holder(tensor)
    with open_regular(path) as data:
        data.seek(tensor.offset)
        left = tensor.nbytes
        while left:
            piece = data.read(min(left, CHUNK))
            if not piece:
                raise InputError("ends before its tensors do", field=str(path), value=tensor.name)
            left -= len(piece)
            yield memoryview(piece)


def _as_before(file: GGUFFile, own: Mapping[str, Any], copied: bool) -> dict[str, Any]:
    """Returns the metadata of a GGUF file with what the model says now, in the file's order and types."""
    said, prefix = file.metadata, f"{own[ARCHITECTURE]}."
    kept: dict[str, Any] = {}
    for key, value in said.items():
        if key in own and not (key.startswith("general.") and copied):
            value = own[key] if key.startswith(prefix) or key in (FILE_TYPE, VERSION) else value
        elif key.startswith(QUANTISERS) and not copied:
            continue
        kept[key] = Typed(file.kinds[key], value) if key in file.kinds and value == said[key] else value
    more = {key: value for key, value in own.items() if key not in kept and key not in (FILE_TYPE, VERSION)}
    if not copied:
        more |= {key: own[key] for key in (FILE_TYPE, VERSION) if key in own and key not in kept}
    return kept | more


def _tokenizer(source: Source) -> dict[str, Any]:
    """Returns the keys of the source's tokenizer; without one, that there is none."""
    tokenizer = source.tokenizer()
    if tokenizer is None or source.path is None:
        return {"tokenizer.ggml.model": "no_vocab"}
    from asbuilt.text.gguf_tokens import tokenizer_keys

    return tokenizer_keys(tokenizer, source.path / TOKENIZER, source.spec.n_vocab)

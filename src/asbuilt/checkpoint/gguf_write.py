"""Writes a checkpoint as a GGUF file, its weights as they are or rounded to blocks, tensor by tensor.

What a header says and what tensors are called comes from the same tables that files are read by
(`asbuilt.families.gguf`). The formats: vectors, norms, biases, routers, and tables other than the tokens', are float32,
which llama.cpp computes in; matrices and token tables are in the format asked for. The head, and a token table that
is also the head, stay in Q6_K where the format is narrower, as llama.cpp's own files have them. Rows that do not divide
into blocks are written in the next format that holds them (`narrower_rows`).
"""

from __future__ import annotations

import fnmatch
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asbuilt.checkpoint.load import Contents, alike, as_source, require_range, stored_dtype
from asbuilt.checkpoint.regroup import Regrouped
from asbuilt.checkpoint.save import ROOM, Progress, files_aside, named_memory
from asbuilt.checkpoint.source import TOKENIZER, Source
from asbuilt.dtypes import BLOCKS, GGML_TYPES, short_name
from asbuilt.errors import InputError, near, one_of
from asbuilt.families import gguf_family, gguf_header, gguf_table
from asbuilt.families.shared.table import Entry
from asbuilt.files import open_regular
from asbuilt.formats.gguf import GGUFFile, GGUFTensor
from asbuilt.formats.gguf_write import Planned, Typed, header, in_parts, part_names, write
from asbuilt.spec import Part, Weight, stored_weights

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
ENCODABLE = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4")
# What a format gives way to where rows do not divide into its blocks: of 256 numbers, then of 32.
INSTEAD = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
WIDER = ("bf16", "fp16", "fp32", "q8_0", "q6_k")  # formats that a head is written in as asked
HEAD = "q6_k"
# llama.cpp's numbers of what most tensors of a file are (`general.file_type`).
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 11}
FILE_TYPES |= {"Q4_K": 14, "Q5_K": 16, "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24}
FILE_TYPES |= {"IQ4_NL": 25, "IQ3_S": 26, "IQ2_S": 28, "IQ4_XS": 30, "IQ1_M": 31, "BF16": 32, "TQ1_0": 36}
FILE_TYPES |= {"TQ2_0": 37, "MXFP4": 38, "NVFP4": 39}
ARCHITECTURE, FILE_TYPE, VERSION = "general.architecture", "general.file_type", "general.quantization_version"
QUANTISERS = ("quantize.", "imatrix.")  # keys that tell how other blocks were made
CHUNK = 1 << 22  # numbers that are converted and written at a time


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Which format weights are written in: `common`, or that of the last of `rules`, (glob of paths, format).

    None keeps the format that a weight is stored in.
    """

    common: str | None = None
    rules: tuple[tuple[str, str], ...] = ()


@dataclass(kw_only=True)
class Summary:
    """What was written: the files, and by kind of part the bytes of the tensors as they were and as they are."""

    files: list[Path] = field(default_factory=list)
    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)
    types: Counter[str] = field(default_factory=Counter)


def format_named(name: str, what: str = "format") -> str:
    """Returns our name of a format that can be written (q4_0, fp16); raises InputError naming `what`."""
    found = short_name(name)
    if found not in FLOATS and found not in ENCODABLE:
        allowed = one_of([*FLOATS, *ENCODABLE])
        raise InputError("cannot be written", field=what, value=name, allowed=allowed, fix=near(found, ENCODABLE))
    return found


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
) -> Summary:
    """Writes `source`, a checkpoint folder or GGUF file, as the GGUF file `out`, and returns what was written.

    Where its parts would exceed `max_part_bytes` it becomes NAME-00001-of-0000N.gguf and so on. Blocks of a GGUF file
    whose format stays are copied. `note` is told what such files cannot say of the model. Raises InputError for a model
    that no architecture of GGUF holds, a tokenizer that its keys cannot say, numbers that the format cannot hold, files
    that exist, and a full disk; whatever is raised, nothing is left behind.
    """
    out = Path(out)
    job = _Job(as_source(source), formats)
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


class _Job:
    """One file to be written: its metadata, its tensors as planned, and their bytes."""

    def __init__(self, source: Source, formats: Formats) -> None:
        self.contents, self.formats, self.summary = Contents(source), formats, Summary()
        self.spec, self.file = source.spec, source.gguf
        if any(weight.format is not None for _, weight, _ in stored_weights(self.spec)):
            fix = "convert the file or folder that it was loaded from"
            raise InputError(
                "packed weights of our own form are not written", field="MODEL", value=source.name, fix=fix
            )
        family = gguf_family(source.family, self.spec)
        # maps of latent attention are written one by one, as newer files have them
        stored = [name for name in (self.file.tensors if self.file else ()) if not name.endswith("attn_kv_b.weight")]
        self.entries = {entry.names[0]: entry for entry in gguf_table(family, self.spec, stored).entries}
        self._owners = {path: (weight, owner) for path, weight, owner in stored_weights(self.spec)}
        # logits are products with the head's matrix, in a tied model with the token table
        self._head = next((path for path in ("head.weight", "embedding.weight") if path in self._owners), None)
        self._held = {path: entry for entry in self.contents.entries for path in entry.paths}
        self._read = Regrouped(self.contents)
        self.planned = self._plan()
        shapes = {tensor.name: tensor.shape for tensor in self.planned}
        self.header = gguf_header(family, self.spec, source.reading.carried, shapes)
        self.planned += [Planned(name=n, type="F32", shape=(len(v),)) for n, v in self.header.values.items()]
        self._place_as_stored()
        self.metadata = self._metadata(source)

    def _plan(self) -> list[Planned]:
        """Returns the tensors with their types; counts their bytes."""
        rules = _Rules(self.formats, [path for path, _, _ in stored_weights(self.spec)])
        shapes = {path: weight.shape for path, weight, _ in stored_weights(self.spec)}
        planned = []
        for name, entry in self.entries.items():
            assert len(entry.names) == 1, f"{entry.names}: a GGUF file has one tensor for several, not several for one"
            (shape,) = entry.layout.stored_shapes([shapes[path] for path in entry.paths])
            planned.append(Planned(name=name, type=self._type(entry, shape, rules), shape=shape))
            kind = self._owners[entry.paths[0]][1].kind
            self.summary.after[kind] += planned[-1].nbytes
            self.summary.types[planned[-1].type] += 1
        for entry in self.contents.entries:
            held = sum(self.contents.headers[name].nbytes for name in entry.names)
            self.summary.before[self._owners[entry.paths[0]][1].kind] += held
        return planned

    def _type(self, entry: Entry, shape: tuple[int, ...], rules: _Rules) -> str:
        (weight, owner), path = self._owners[entry.paths[0]], entry.paths[0]
        wanted = rules.of(entry)
        if wanted is None:
            stored = self._stored_type(entry)
            if self.file is not None or stored not in FLOATS.values():
                return _fitting(stored, shape)
            wanted = next(ours for ours, theirs in FLOATS.items() if theirs == stored)
        if len(shape) < 2 or kept_wide(path, weight, owner):
            return "F32"
        given = rules.ruled(path)
        if not given and wanted not in WIDER and path == self._head:
            wanted = HEAD
        return _fitting(FLOATS.get(wanted, wanted.upper()), shape)

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
        own |= {"general.name": source.name, FILE_TYPE: FILE_TYPES.get(most)}
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
        same = self._same(tensor)
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
                yield from _pieces(made, tensor)


def _pieces(made: Tensor, tensor: Planned) -> Iterator[memoryview]:
    """Yields the bytes of a tensor in its type, some rows at a time."""
    import torch

    from asbuilt.kernels.quantise import quantise

    assert tuple(made.shape) == tensor.shape, f"{tensor.name}: {tuple(made.shape)} is not {tensor.shape}"
    rows = made.reshape(-1, made.shape[-1])
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(tensor.type)
    if plain is not None:
        require_range(made, plain, tensor.name)
    for part in rows.split(max(1, CHUNK // made.shape[-1])):
        stored = part.to("cpu", plain) if plain is not None else quantise(part, tensor.type.lower(), tensor.name)
        yield stored.contiguous().view(torch.uint8).numpy().data.cast("B")


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


def kept_wide(path: str, weight: Weight, owner: Part) -> bool:
    """Returns whether a weight is always written in float32: what is no matrix, nor a table of tokens, and routers."""
    table = weight.role == "table" and not path.endswith("embedding.weight")
    return weight.role in ("bias", "gain") or table or owner.kind == "router"


def _fitting(kind: str, shape: tuple[int, ...]) -> str:
    """Returns the type, or what it gives way to where rows do not divide into its blocks."""
    blocks = {found.name: found.block for found in GGML_TYPES.values()}
    while shape and shape[-1] % blocks[kind]:
        kind = INSTEAD.get(kind.lower(), "f16").upper()
    return kind


class _Rules:
    """Which format is asked for a weight."""

    def __init__(self, formats: Formats, paths: Sequence[str]) -> None:
        self._formats = formats
        self._of: dict[str, str] = {}
        for glob, format in formats.rules:
            found = [path for path in paths if _matches(path, glob)]
            if not found:
                raise InputError("no weight has such a path", field="by", value=glob, fix=near(glob, paths))
            self._of |= dict.fromkeys(found, format_named(format, "by"))
        if formats.common is not None:
            format_named(formats.common)

    def ruled(self, path: str) -> bool:
        """Returns whether a rule says the format."""
        return path in self._of

    def of(self, entry: Entry) -> str | None:
        """Returns the format of a tensor; raises InputError where its weights are asked for in several."""
        common = None if self._formats.common is None else format_named(self._formats.common)
        found = {path: self._of.get(path, common) for path in entry.paths}
        if len(set(found.values())) > 1:
            said = {path: format or "as stored" for path, format in found.items()}
            allowed = "one format for weights that lie in one tensor of a GGUF file"
            raise InputError(field="by", value=said, allowed=allowed)
        return found[entry.paths[0]]


def _matches(path: str, glob: str) -> bool:
    """Returns whether a weight's path, or the part's that holds it, matches."""
    return fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(path.removesuffix(".weight"), glob)


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

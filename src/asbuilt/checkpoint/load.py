"""Loading weights into a model: all names and shapes are checked in the headers, then each entry is copied.

Memory: the model plus its largest tensor. Nothing is allocated before every name and shape has been checked.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from asbuilt.checkpoint.adapter import read_adapter
from asbuilt.checkpoint.gguf import read_blocks, read_tensor
from asbuilt.checkpoint.own import own_table
from asbuilt.checkpoint.packed import PACKABLE, packed_entries, packed_spec
from asbuilt.checkpoint.quantised import Expanded, of_weights
from asbuilt.checkpoint.room import built_bytes, memory_errors, require_room
from asbuilt.checkpoint.safetensors import Reader
from asbuilt.checkpoint.source import Source, open_model
from asbuilt.dtypes import GGUF_FLOATS, GGUF_READABLE, OWN_BLOCKS, STORED_FLOATS, TORCH_NAMES, torch_name
from asbuilt.errors import InputError, shorten
from asbuilt.families import gguf_table, reads_packed, tensor_table
from asbuilt.families.shared.stacks import experts_as_stored
from asbuilt.families.shared.table import Entry, TensorTable, as_shaped, as_stored, is_ignored
from asbuilt.formats.gguf import GGUFTensor
from asbuilt.formats.safetensors import StoredTensor, read_folder
from asbuilt.packing import packs_weights
from asbuilt.spec import Model as ModelSpec
from asbuilt.spec import buffers, stored_weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from asbuilt.nn.model import Model

Stored = StoredTensor | GGUFTensor
Headers = Mapping[str, Stored]
COMPUTED = frozenset(TORCH_NAMES.values())
PACKED = "U8"  # the stored dtype of packed weights and their scales
WHOLE = ("I64", "I32")  # those of buffers of whole numbers
ALIGNED = 64  # bytes, as torch's allocations are
LISTED = 5  # names shown of each kind of mismatch


def load(
    source: Source | str | Path,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
    *,
    packed: bool = False,
    adapter: str | Path | None = None,
) -> Model:
    """Returns the model of a checkpoint folder or GGUF file, its weights loaded, in evaluation mode.

    `dtype` defaults to the stored one: config.json's, else the tensors'; float32 for a GGUF of quantised blocks.
    Quantised matrices of a folder are expanded to it. With `packed`, matrices and tables that a GGUF file or an MXFP4
    checkpoint stores as blocks stay packed in memory, and each product dequantises them to `dtype`; so do integers of
    other folders where blocks hold them exactly. `adapter` is a
    folder of low-rank adapters in PEFT's layout, which are added to their maps.

    Raises InputError for a source without weights, for tensors that are missing, unexpected, of another shape or no
    floats, for values beyond the range of `dtype`, for a device that is not there, for `packed` where nothing is held
    as blocks, and, before anything is allocated, for a model that the free memory does not hold.
    """
    return load_contents(Contents(as_source(source), packed=packed, adapter=adapter), dtype, device)


def load_contents(contents: Contents, dtype: torch.dtype | str | None = None, device: str = "cpu") -> Model:
    """Returns the model of tensors that are matched already; see `load`."""
    wanted, place = contents.dtype(dtype), _device(device)
    needed = contents.needs(wanted)
    if place.type == "cpu":
        require_room(needed, contents.source.name)
    with memory_errors(needed, contents.source.name):
        return _filled(contents, wanted, place)


def _filled(contents: Contents, dtype: torch.dtype, device: torch.device) -> Model:
    import torch

    from asbuilt.kernels.speed import one_thread
    from asbuilt.nn import build, stored_tensors

    built = build(contents.spec, dtype=dtype, device=device, seed=None)
    tensors = stored_tensors(built)
    empty = set(tensors)
    read = (zip(entry.paths, contents.read(entry), strict=True) for entry in contents.entries)
    taken: set[int] = set()
    with torch.no_grad(), one_thread():  # each of many small copies would wait for the others
        for found in chain(read, (contents.adapter.items(),)):
            for path, tensor in found:
                empty.remove(path)  # KeyError: a table that fills a parameter twice
                assert tensor.shape == tensors[path].shape, f"{path}: copy_ would stretch {tuple(tensor.shape)}"
                if tensors[path].is_floating_point():
                    require_range(tensor, tensors[path].dtype, path)
                if contents.source.gguf is not None and _owned(tensor, tensors[path], taken):
                    tensors[path].data = tensor
                else:
                    tensors[path].copy_(tensor)
    assert not empty, f"not in the table: {sorted(empty)}"
    return built.eval()


def _owned(tensor: Tensor, place: Tensor, taken: set[int]) -> bool:
    """Returns whether a tensor can be the parameter itself: like it, aligned, and nobody else's; then it is `taken`."""
    alike = tensor.dtype == place.dtype and tensor.device == place.device and tensor.is_contiguous()
    start = tensor.data_ptr()
    whole = all(one.untyped_storage().nbytes() == one.nbytes for one in (tensor, place))  # no view of a larger one
    if not (alike and whole and start % ALIGNED == 0) or start in taken:
        return False
    taken.add(start)
    return True


def stored_parameters(source: Source | str | Path) -> int:
    """Returns how many numbers the file stores, including buffers and duplicated ties; reads only headers."""
    source = as_source(source)
    found = stored_weights(source.spec) if source.own else ()
    packed = {path: weight.size for path, weight, _ in found if weight.format is not None}  # stored as bytes
    return sum(packed.get(name, math.prod(tensor.shape)) for name, tensor in headers(source).items())


def stored_bytes(source: Source | str | Path) -> int:
    """Returns the bytes of all stored tensors, without headers and padding; reads only headers."""
    return sum(tensor.nbytes for tensor in headers(as_source(source)).values())


def as_source(source: Source | str | Path) -> Source:
    """Returns the source itself, or the source of a name or path."""
    return source if isinstance(source, Source) else open_model(source, weights=True)


def headers(source: Source) -> Headers:
    """Returns the stored tensors' headers; raises InputError for a source without weights."""
    if source.gguf is not None:
        return source.gguf.tensors
    if source.kind == "folder" and source.path is not None:
        return read_folder(source.path)
    what = {"catalogue": "a catalogue name", "config": "a config", "spec": "a spec"}[source.kind]
    raise InputError(
        f"{what} is a description and has no weights",
        field="MODEL",
        value=source.name,
        fix="give a checkpoint folder or a .gguf file",
    )


class Contents:
    """The stored tensors of a source, matched with its spec; `read` returns one entry's tensors as in the model."""

    def __init__(self, source: Source, *, packed: bool | None = False, adapter: str | Path | None = None) -> None:
        """`packed` None keeps packed what can be, and raises nothing where that is nothing."""
        self.source, self.spec, self.headers = source, source.spec, headers(source)
        said = source.reading.quantization
        self.packed = said if said is not None and packs_weights(said) else None
        if said is not None and self.packed is None:  # the cache alone is quantised
            self.headers = of_weights(stored_only(self.headers))
        self._read = _reader(source, self.headers)
        self.table = self._table(source)
        if isinstance(self._read, Expanded):
            self.headers = self._read.without_zero_biases({n for e in self.table.entries for n in e.names})
        self.entries = match(self.table, self.spec, self.headers, str(source.path))
        self.buffers = {path for path, _, _ in buffers(self.spec)}
        named = {name for entry in self.entries for name in entry.names}
        again = ((name, path) for name, path in self.table.duplicates.items() if name in self.headers)
        self._again = [(name, path) for name, path in again if name not in named]
        self._blocks: dict[tuple[str, ...], tuple[Entry, str]] = {}
        if packed is not False and all(weight.format is None for _, weight, _ in stored_weights(self.spec)):
            self._keep_blocks(required=packed is True)

        self.adapter: Mapping[str, Tensor] = {}
        if adapter is not None:
            self._add_adapters(adapter)

    def _table(self, source: Source) -> TensorTable:
        """Returns the names of the file's tensors; of a quantised checkpoint those of the expanded ones."""
        if source.gguf is not None:
            return as_stored(gguf_table(source.family, self.spec, self.headers), self.headers)
        if source.own:
            return own_table(self.spec)
        if self.packed is None or reads_packed(source.family, self.packed):
            table = tensor_table(source.family, self.spec, self.packed)
        else:
            self._read = Expanded(stored_only(self.headers), self.packed, str(source.path))
            self.headers, table = self._read.headers, tensor_table(source.family, self.spec)
        shapes = {path: weight.shape for path, weight, _ in stored_weights(self.spec)}
        held = {name: tensor.shape for name, tensor in self.headers.items()}
        return as_shaped(experts_as_stored(as_stored(table, self.headers), shapes, self.headers), shapes, held)

    def _add_adapters(self, folder: str | Path) -> None:
        """Adds the adapters of a folder to the spec and to the tensors to load."""
        source = self.source
        if not source.family:
            raise InputError(
                "names modules of a published family, and this model is of none",
                field="adapter",
                value=str(folder),
                fix="load it from our own form, adapters included",
            )
        found = read_adapter(folder, self.spec, tensor_table(source.family, source.spec))
        self.spec, self.adapter = found.spec, found.tensors

    def _keep_blocks(self, *, required: bool) -> None:
        """Marks all weights that can stay packed as packed, in the spec and the entries."""
        formats = self._read.formats if isinstance(self._read, Expanded) else None
        found = packed_entries(self.spec, self.entries, self.headers, formats)
        again = {path for _, path in self._again}
        found = tuple((entry, format) for entry, format in found if again.isdisjoint(entry.paths))
        if not found and required:
            raise InputError(
                "holds no blocks that can stay packed",
                field="packed",
                value=self.source.name,
                allowed=f"a GGUF file with {', '.join(name for name in PACKABLE if name not in OWN_BLOCKS)}; a folder "
                "of MXFP4 or NVFP4, or of integers in groups of 32 or more one after the other (GPTQ, AWQ, "
                "compressed-tensors, mlx)",
            )
        self._blocks = {entry.paths: (entry, format) for entry, format in found}
        self.spec = packed_spec(self.spec, {path: format for entry, format in found for path in entry.paths})

    @property
    def stays_packed(self) -> bool:
        """Whether some weights stay packed in memory."""
        return bool(self._blocks)

    def dtype(self, wanted: torch.dtype | str | None) -> torch.dtype:
        """Returns the dtype to build in; see `load`."""
        import torch

        if wanted is not None:
            return dtype_of(wanted)
        said = self.source.reading.dtype
        if said in COMPUTED:
            return getattr(torch, said)
        if self.source.gguf is not None:
            return torch.float32
        # 8-bit floats are only for storage; bfloat16 represents all their values
        held = [e for e in self.entries if not self.buffers.issuperset(e.paths) and not (self.source.own and e.packed)]
        names = {stored_dtype(self.headers[name]) or "" for entry in held for name in entry.names}
        own = [getattr(torch, name if name in COMPUTED else "bfloat16") for name in names]
        return functools.reduce(torch.promote_types, own, *(() if own else (torch.float32,)))

    def needs(self, dtype: torch.dtype | str, running: int = 0) -> int:
        """Returns the bytes that loading needs: the model, plus its largest tensor in float32, or `running` if more.

        The expanded experts of a stack are in memory beside the stack.
        """
        largest = max((math.prod(tensor.shape) for tensor in self.headers.values()), default=0)
        if isinstance(self._read, Expanded):
            stacks = (entry.names for entry in self.entries if len(entry.names) > 1)
            inside = (sum(math.prod(self.headers[name].shape) for name in names) for names in stacks)
            largest = max(largest, 2 * max(inside, default=0))
        return built_bytes(self.spec, str(dtype).removeprefix("torch.")) + max(4 * largest, running)

    def read(self, entry: Entry) -> list[Tensor]:
        """Returns the tensors of the entry's paths; raises InputError if a duplicate has different values."""
        held = self._blocks.get(entry.paths)
        if held is not None:
            blocks, format = held
            return blocks.layout.load([self._blocks_of(name, format) for name in entry.names])
        tensors = entry.layout.load(alike([self._read(name) for name in entry.names]))
        for path, tensor in zip(entry.paths, tensors, strict=True):
            for name in (name for name, tied in self._again if tied == path):
                self._require_equal(tensor, name, path)
        return tensors

    def _blocks_of(self, name: str, format: str) -> Tensor:
        if self.source.gguf is not None:
            return read_blocks(self.source.gguf, name)
        return self._read.blocks(name, format) if isinstance(self._read, Expanded) else self._read(name)

    @property
    def formats(self) -> Mapping[str, int]:
        """The bytes of weights that stay packed, by format."""
        found: Counter[str] = Counter()
        for _, weight, _ in stored_weights(self.spec):
            if weight.format is not None:
                found[weight.format] += math.prod(weight.stored_shape)
        return found

    def _require_equal(self, tensor: Tensor, name: str, path: str) -> None:
        import torch

        again = self._read(name)
        common = torch.promote_types(tensor.dtype, again.dtype)
        if not torch.equal(tensor.to(common), again.to(common)):
            raise InputError(
                f"{name} is tied to {path}, but is stored with different values",
                field=str(self.source.path),
                fix='if they are not meant to be tied, set "tie_word_embeddings": false in config.json',
            )


def _reader(source: Source, stored: Headers) -> Callable[[str], Tensor]:
    if source.gguf is not None:
        return functools.partial(read_tensor, source.gguf)
    return Reader(stored_only(stored))


def stored_only(stored: Headers) -> dict[str, StoredTensor]:
    """Returns the headers of a checkpoint folder, which has no others."""
    return {name: tensor for name, tensor in stored.items() if isinstance(tensor, StoredTensor)}


def alike(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the tensors in one dtype that represents them all, since a layout joins them."""

    import torch

    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1:
        return tensors
    common = functools.reduce(torch.promote_types, sorted(dtypes, key=str))
    return [tensor.to(common) for tensor in tensors]


def stored_dtype(tensor: Stored) -> str | None:
    """Returns torch's name of the dtype after reading, None for a tensor that is not a float or cannot be read."""
    if isinstance(tensor, StoredTensor):
        return STORED_FLOATS.get(tensor.dtype)
    return GGUF_FLOATS.get(tensor.type, "float32") if tensor.type in GGUF_READABLE else None


def match(table: TensorTable, spec: ModelSpec, stored: Headers, where: str) -> tuple[Entry, ...]:
    """Returns the table's entries with the names used in the file.

    Raises InputError listing tensors that are missing, unexpected, of another shape or not floats; `where` names the
    file.
    """
    entries = table.entries
    shapes = {path: weight.stored_shape for path, weight, _ in stored_weights(spec)}
    assert sorted(path for entry in entries for path in entry.paths) == sorted(shapes), "table and spec disagree"
    wanted = {
        name: shape
        for entry in entries
        for name, shape in zip(
            entry.names, entry.layout.stored_shapes([shapes[path] for path in entry.paths]), strict=True
        )
    }
    again = {name: shapes[path] for name, path in table.duplicates.items() if name in stored}
    whole = {path for path, weight, _ in buffers(spec) if weight.whole}
    problems = list(_mismatches(table, wanted | again, stored, whole))
    if problems:
        raise InputError(f"the tensors do not match the config: {'; '.join(problems)}", field=where)
    return entries


def _mismatches(
    table: TensorTable, wanted: dict[str, tuple[int, ...]], stored: Headers, whole: set[str]
) -> Iterator[str]:
    found = {name: stored[name] for name in wanted if name in stored}
    yield from _listed("missing", [name for name in wanted if name not in stored])
    extra = (name for name in stored if name not in wanted)
    unexpected = [name for name in extra if not is_ignored(table, name)]
    yield from _listed("unexpected", [shorten(name) for name in unexpected])
    shaped = ((name, tensor.shape, wanted[name]) for name, tensor in found.items())
    yield from _listed(
        "of another shape", [f"{n} is {have}, expected {want}" for n, have, want in shaped if have != want]
    )
    packed = {name for entry in table.entries if entry.packed for name in entry.names}
    counts = {name for entry in table.entries if whole.issuperset(entry.paths) for name in entry.names}
    kinds = (
        (name, getattr(t, "dtype", None) or getattr(t, "type", ""))
        for name, t in found.items()
        if not (name in counts and isinstance(t, StoredTensor) and t.dtype in WHOLE)
        and not (isinstance(t, StoredTensor) and t.dtype == PACKED if name in packed else stored_dtype(t))
    )
    yield from _listed("of an unsupported type", [f"{name} is {kind}" for name, kind in kinds])


def _listed(what: str, items: list[str]) -> Iterator[str]:
    if items:
        more = f" and {len(items) - LISTED} more" if len(items) > LISTED else ""
        yield f"{len(items)} {what}: {', '.join(items[:LISTED])}{more}"


def dtype_of(wanted: object, field: str = "dtype") -> torch.dtype:
    """Returns the torch dtype of a name such as `bf16` or `bfloat16`; raises InputError unless models compute in it."""
    import torch

    return getattr(torch, torch_name(wanted, field))


def require_range(tensor: Tensor, dtype: torch.dtype, what: str) -> None:
    """Raises InputError if a value is outside the range of `dtype`, since it would silently become infinite."""
    import torch

    most = torch.finfo(dtype).max
    if torch.finfo(tensor.dtype).max <= most:
        return
    low, high = (float(x) for x in tensor.aminmax())
    if max(-low, high) > most:
        raise InputError(
            f"{what} has values outside the range of {dtype}",
            field="dtype",
            value=max(-low, high),
            allowed=f"up to {most:g}",
            fix="use bfloat16 or float32",
        )


def _device(name: str) -> torch.device:
    import torch

    try:
        return torch.empty(0, device=name).device
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # an unknown name, a missing device, or a build without support for it
        said = str(error).splitlines()[0]
        raise InputError(f"cannot be used: {said}", field="device", value=str(name)) from error

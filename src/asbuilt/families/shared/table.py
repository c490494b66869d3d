"""The table between a spec's paths and the names in a file: layout operations that each know their inverse.

One table loads and saves. Operations use only methods of the tensors they are given, so nothing here needs torch, not
even its types; and they know shapes too, so a file's header can be checked before any data is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from asbuilt.dtypes import FP4
from asbuilt.errors import InputError

Shape = tuple[int, ...]


class _Tensor(Protocol):
    """What layouts do with the tensors that they are given, torch's: its own methods, what they return as it comes."""

    @property
    def shape(self) -> Any: ...  # noqa: ANN401
    def __iter__(self) -> Iterator[Any]: ...
    def __add__(self, other: Any, /) -> Any: ...  # noqa: ANN401
    def __and__(self, other: Any, /) -> Any: ...  # noqa: ANN401
    def __rshift__(self, other: Any, /) -> Any: ...  # noqa: ANN401
    def __sub__(self, other: Any, /) -> Any: ...  # noqa: ANN401
    def flip(self, *dims: Any, **named: Any) -> Any: ...  # noqa: ANN401
    def flatten(self, *dims: Any, **named: Any) -> Any: ...  # noqa: ANN401
    def new_empty(self, *shape: Any, **named: Any) -> Any: ...  # noqa: ANN401
    def reshape(self, *shape: Any, **named: Any) -> Any: ...  # noqa: ANN401
    def split(self, *sizes: Any, **named: Any) -> Any: ...  # noqa: ANN401
    def t(self) -> Any: ...  # noqa: ANN401
    def unbind(self, *dims: Any, **named: Any) -> Any: ...  # noqa: ANN401
    def unflatten(self, *dims: Any, **named: Any) -> Any: ...  # noqa: ANN401
    def view(self, *shape: Any, **named: Any) -> Any: ...  # noqa: ANN401


T = TypeVar("T", bound=_Tensor)


class Layout(Protocol):
    """A reversible operation between the model's tensors and those on disk."""

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """Returns the shapes on disk of tensors that have the shapes `built` in the model."""
        ...

    def load(self, stored: Sequence[T]) -> list[T]:
        """Returns the model's tensors from those on disk."""
        ...

    def save(self, built: Sequence[T]) -> list[T]:
        """Returns the tensors on disk from the model's."""
        ...


@dataclass(frozen=True)
class Same:
    """Stored as built."""

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """The same shapes."""
        return list(built)

    def load(self, stored: Sequence[T]) -> list[T]:
        """The same tensors."""
        return list(stored)

    def save(self, built: Sequence[T]) -> list[T]:
        """The same tensors."""
        return list(built)


@dataclass(frozen=True)
class Transpose:
    """Matrices stored as (in, out), as GPT-2's Conv1D does; vectors stay as they are."""

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """Each shape reversed."""
        return [shape[::-1] for shape in built]

    def load(self, stored: Sequence[T]) -> list[T]:
        """Each transposed."""
        return [tensor.t() for tensor in stored]

    def save(self, built: Sequence[T]) -> list[T]:
        """Each transposed."""
        return [tensor.t() for tensor in built]


@dataclass(frozen=True)
class Interleave:
    """Several of the model's tensors stored as one, group by group: a group's rows of each, then the next group's.

    `sizes` are the rows of each tensor in one group. BLOOM and GPT-NeoX store q, k and v
    so for every head, Falcon for every key head with the queries that read it.
    """

    groups: int
    sizes: tuple[int, ...]

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """One shape: first dimensions added."""
        return [(sum(shape[0] for shape in built), *built[0][1:])]

    def load(self, stored: Sequence[T]) -> list[T]:
        """Each tensor's rows of all groups."""
        rest = stored[0].shape[1:]
        parts = self._by_group(stored[0]).split(list(self.sizes), 1)
        return [part.reshape(self.groups * size, *rest) for part, size in zip(parts, self.sizes, strict=True)]

    def save(self, built: Sequence[T]) -> list[T]:
        """The one tensor of the parts."""
        rest = built[0].shape[1:]
        joined = built[0].new_empty((self.groups * sum(self.sizes), *rest))
        parts = self._by_group(joined).split(list(self.sizes), 1)
        for part, tensor in zip(parts, built, strict=True):
            part.copy_(tensor.reshape(part.shape))
        return [joined]

    def _by_group(self, tensor: T) -> T:
        return tensor.view(self.groups, sum(self.sizes), *tensor.shape[1:])


class Concat(Interleave):
    """Several of the model's tensors stored as one, joined along their first (output) dimension.

    `sizes` are the first dimensions of the parts in order.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__(1, sizes)


@dataclass(frozen=True)
class StackExperts:
    """One tensor of the model, whose first dimension counts experts, stored as one tensor for each expert."""

    n_experts: int

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """The shape of one expert, as often as there are experts."""
        return [built[0][1:]] * self.n_experts

    def load(self, stored: Sequence[T]) -> list[T]:
        """The experts, stacked in order."""
        stacked = stored[0].new_empty((self.n_experts, *stored[0].shape))
        for place, tensor in zip(stacked.unbind(), stored, strict=True):
            place.copy_(tensor)
        return [stacked]

    def save(self, built: Sequence[T]) -> list[T]:
        """Each expert's own."""
        return list(built[0].unbind())


@dataclass(frozen=True)
class EachExpert:
    """Stacked tensors whose experts are stored in one stack too, each of them through `layout`."""

    layout: Layout

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """The layout's shapes, after the number of experts."""
        return [(built[0][0], *shape) for shape in self.layout.stored_shapes([shape[1:] for shape in built])]

    def load(self, stored: Sequence[T]) -> list[T]:
        """Each expert loaded."""
        return self._stacked([self.layout.load(own) for own in zip(*stored, strict=True)])

    def save(self, built: Sequence[T]) -> list[T]:
        """Each expert saved."""
        return self._stacked([self.layout.save(own) for own in zip(*built, strict=True)])

    @staticmethod
    def _stacked(experts: list[list[T]]) -> list[T]:
        stacks = [tensor.new_empty((len(experts), *tensor.shape)) for tensor in experts[0]]
        for e, own in enumerate(experts):
            for stack, tensor in zip(stacks, own, strict=True):
                stack[e].copy_(tensor)
        return stacks


@dataclass(frozen=True)
class InwardOrNot:
    """Stored as `usual`, or as `other` in files whose shapes say so; where both have the same shapes, as `usual`."""

    usual: Layout
    other: Layout

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """The usual shapes."""
        return self.usual.stored_shapes(built)

    def load(self, stored: Sequence[T]) -> list[T]:
        """As usual: `as_shaped` puts the other layout in place where a file has it."""
        return self.usual.load(stored)

    def save(self, built: Sequence[T]) -> list[T]:
        """As usual."""
        return self.usual.save(built)


def as_shaped(table: TensorTable, built: Mapping[str, Shape], stored: Mapping[str, Shape]) -> TensorTable:
    """Returns the table with the layouts that a file's shapes tell, where it may have one of two."""

    def told(one: Entry) -> Entry:
        if not isinstance(one.layout, InwardOrNot):
            return one
        shapes, found = [built[path] for path in one.paths], [stored.get(name) for name in one.names]
        other = found != one.layout.usual.stored_shapes(shapes) and found == one.layout.other.stored_shapes(shapes)
        return replace(one, layout=one.layout.other if other else one.layout.usual)

    return replace(table, entries=tuple(told(one) for one in table.entries))


MX_BLOCK = 32


@dataclass(frozen=True)
class Mxfp4:
    """A stack of matrices stored as blocks of 32 numbers of 4 bits along each row, and one power of two per block.

    Open Compute Project 2023, OCP Microscaling Formats (MX) v1.0, section 5: number times 2^(scale - 127); the lower
    half of a byte comes first. Read to bfloat16, which holds every such number exactly; never written.
    """

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """Bytes (experts, rows, blocks, 16) and scales (experts, rows, blocks)."""
        ((*rows, columns),) = built
        if columns % MX_BLOCK:
            raise InputError("mxfp4 packs rows in blocks", field="columns", value=columns, allowed="a multiple of 32")
        blocks = columns // MX_BLOCK
        return [(*rows, blocks, MX_BLOCK // 2), (*rows, blocks)]

    def load(self, stored: Sequence[T]) -> list[T]:
        """Every number times its block's power of two, one matrix after the other, since the way there is wide."""
        packed, scales = stored
        numbers = packed.new_empty(0).bfloat16().new_tensor(FP4)
        matrices = numbers.new_empty((*scales.shape[:-1], scales.shape[-1] * MX_BLOCK))
        for matrix, own, scale in zip(matrices, packed, scales, strict=True):
            codes = own.new_empty((*own.shape, 2))
            codes[..., 0], codes[..., 1] = own & 15, own >> 4
            blocks = numbers[codes.flatten(-2).int()].ldexp(scale.int().sub(127)[..., None])
            matrix.copy_(blocks.flatten(-2))
        return [matrices]

    def save(self, built: Sequence[T]) -> list[T]:
        """Raises InputError: rounding to 4 bits loses weights."""
        raise InputError("mxfp4 is read, not written", field="quantization_config")


@dataclass(frozen=True)
class AdjacentPairs:
    """Query or key rows stored so that rotary pairs are adjacent (2i, 2i+1), while the model pairs halves (i, i+d/2).

    This is what the GGUF files of llama models do to their q and k rows (and biases): the first `d_rotary` rows of each
    of `n_heads` heads are interleaved, the others kept.
    """

    n_heads: int
    d_rotary: int

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """The same shapes."""
        return list(built)

    def load(self, stored: Sequence[T]) -> list[T]:
        """Pairs split into halves."""
        return [self._reorder(tensor, (self.d_rotary // 2, 2)) for tensor in stored]

    def save(self, built: Sequence[T]) -> list[T]:
        """Halves interleaved into pairs."""
        return [self._reorder(tensor, (2, self.d_rotary // 2)) for tensor in built]

    def _reorder(self, tensor: T, split: tuple[int, int]) -> T:
        heads = tensor.reshape(self.n_heads, tensor.shape[0] // self.n_heads, *tensor.shape[1:])
        covered = heads[:, : self.d_rotary]
        pairs = covered.reshape(self.n_heads, *split, *tensor.shape[1:]).transpose(1, 2)
        reordered = heads.clone()  # a copy of its own: with a single pair `pairs` is a view of `heads`
        reordered[:, : self.d_rotary] = pairs.reshape(covered.shape)
        return reordered.reshape(tensor.shape)


@dataclass(frozen=True)
class SwappedHalves:
    """Query or key rows of heads stored with their second half first: the same RoPE then turns the other way."""

    n_heads: int

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """The same shapes."""
        return list(built)

    def load(self, stored: Sequence[T]) -> list[T]:
        """Each head's halves swapped."""
        return [self._swapped(tensor) for tensor in stored]

    def save(self, built: Sequence[T]) -> list[T]:
        """The same."""
        return self.load(built)

    def _swapped(self, tensor: T) -> T:
        halves = tensor.reshape(self.n_heads, 2, -1, *tensor.shape[1:])
        return halves.flip(1).reshape(tensor.shape)


@dataclass(frozen=True)
class Pieces:
    """One tensor of the model stored as several of the same size, divided along its first dimension."""

    count: int

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """The shape of a piece, as often as there are pieces."""
        return [(built[0][0] // self.count, *built[0][1:])] * self.count

    def load(self, stored: Sequence[T]) -> list[T]:
        """The pieces, one after the other."""
        joined = stored[0].new_empty((self.count * stored[0].shape[0], *stored[0].shape[1:]))
        for place, tensor in zip(joined.split(stored[0].shape[0]), stored, strict=True):
            place.copy_(tensor)
        return [joined]

    def save(self, built: Sequence[T]) -> list[T]:
        """Each piece."""
        return list(built[0].split(built[0].shape[0] // self.count))


@dataclass(frozen=True)
class Framed:
    """Vectors stored with so many dimensions of 1 before their own, and so many after it."""

    before: int
    after: int

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """Each shape with ones around it."""
        return [(1,) * self.before + shape + (1,) * self.after for shape in built]

    def load(self, stored: Sequence[T]) -> list[T]:
        """Each without them."""
        return [tensor.reshape((-1,)) for tensor in stored]

    def save(self, built: Sequence[T]) -> list[T]:
        """Each with them."""
        return [tensor.reshape((1,) * self.before + tuple(tensor.shape) + (1,) * self.after) for tensor in built]


@dataclass(frozen=True)
class Leading:
    """Stored with so many dimensions of 1 before its own."""

    count: int

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """Each shape with ones before it."""
        return [(1,) * self.count + shape for shape in built]

    def load(self, stored: Sequence[T]) -> list[T]:
        """Each without them."""
        return [tensor.reshape(tensor.shape[self.count :]) for tensor in stored]

    def save(self, built: Sequence[T]) -> list[T]:
        """Each with them."""
        return [tensor.reshape((1,) * self.count + tuple(tensor.shape)) for tensor in built]


@dataclass(frozen=True)
class BesideNone:
    """A vector stored as one row (1, 1, n), and beside it the rows (1, 0, n) that a model without them has."""

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """Both shapes."""
        return [(1, rows, *built[0]) for rows in (1, 0)]

    def load(self, stored: Sequence[T]) -> list[T]:
        """The vector."""
        return [stored[0].reshape((-1,))]

    def save(self, built: Sequence[T]) -> list[T]:
        """The vector, and none of its rows."""
        return [built[0].reshape((1, 1, -1)), built[0].new_empty((1, 0, built[0].shape[0]))]


@dataclass(frozen=True)
class Flattened:
    """Convolutions of patches stored as matrices; `shape` is the model's, without the first dimension."""

    shape: Shape

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """Each with all but the first dimension as one."""
        return [(shape[0], math.prod(shape[1:])) for shape in built]

    def load(self, stored: Sequence[T]) -> list[T]:
        """Each with its dimensions."""
        return [tensor.reshape(-1, *self.shape) for tensor in stored]

    def save(self, built: Sequence[T]) -> list[T]:
        """Each as a matrix."""
        return [tensor.flatten(1) for tensor in built]


@dataclass(frozen=True)
class Reshaped:
    """Tensors of the shape `built` stored in another with as many numbers in the same order."""

    built: Shape
    stored: Shape

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """The other shape for each."""
        return [self.stored for _ in built]

    def load(self, stored: Sequence[T]) -> list[T]:
        """Each as built."""
        return [tensor.reshape(self.built) for tensor in stored]

    def save(self, built: Sequence[T]) -> list[T]:
        """Each as stored."""
        return [tensor.reshape(self.stored) for tensor in built]


@dataclass(frozen=True)
class ChannelsFirst:
    """Matrices over squares of patches, stored with the patches of each channel together, not the channels of each."""

    channels: int

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """The same shapes."""
        return list(built)

    def load(self, stored: Sequence[T]) -> list[T]:
        """Each with the channels of each patch together."""
        return [self._turned(tensor, (self.channels, -1)) for tensor in stored]

    def save(self, built: Sequence[T]) -> list[T]:
        """Each with the patches of each channel together."""
        return [self._turned(tensor, (-1, self.channels)) for tensor in built]

    @staticmethod
    def _turned(tensor: T, split: tuple[int, int]) -> T:
        return tensor.unflatten(1, split).transpose(1, 2).reshape(tensor.shape)


@dataclass(frozen=True)
class Stacked:
    """Several of the model's tensors of one shape stored as one, along a new first dimension."""

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """One shape, after the number of tensors."""
        return [(len(built), *built[0])]

    def load(self, stored: Sequence[T]) -> list[T]:
        """Each tensor of the stack."""
        return list(stored[0].unbind())

    def save(self, built: Sequence[T]) -> list[T]:
        """The stack."""
        return StackExperts(len(built)).load(built)


@dataclass(frozen=True)
class PixelsLast:
    """Convolutions of patches stored as matrices whose columns are pixels, each with its channels; `shape` as built."""

    shape: Shape

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """Each with all but the first dimension as one."""
        return [(shape[0], math.prod(shape[1:])) for shape in built]

    def load(self, stored: Sequence[T]) -> list[T]:
        """Each with channels before pixels."""
        pixels = (x.reshape(x.shape[0], -1, self.shape[0]).transpose(1, 2) for x in stored)
        return [x.reshape(x.shape[0], *self.shape) for x in pixels]

    def save(self, built: Sequence[T]) -> list[T]:
        """Each as a matrix, channels last."""
        return [x.reshape(x.shape[0], self.shape[0], -1).transpose(1, 2).flatten(1) for x in built]


@dataclass(frozen=True)
class AxesApart:
    """Heads of which one half is rotated by columns and the other by rows, each pairing its own halves, as stored.

    The model pairs the halves of the whole head, the first half of the pairs by rows.
    """

    n_heads: int

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """The same shapes."""
        return list(built)

    def load(self, stored: Sequence[T]) -> list[T]:
        """The first half of each axis, rows before columns, then the second."""
        return [self._quarters(tensor).transpose(1, 2).flip(2).reshape(tensor.shape) for tensor in stored]

    def save(self, built: Sequence[T]) -> list[T]:
        """Both halves of columns, then those of rows."""
        return [self._quarters(tensor).flip(2).transpose(1, 2).reshape(tensor.shape) for tensor in built]

    def _quarters(self, tensor: _Tensor) -> Any:  # noqa: ANN401
        return tensor.reshape(self.n_heads, 2, 2, tensor.shape[0] // self.n_heads // 4, *tensor.shape[1:])


@dataclass(frozen=True)
class Chain:
    """Operations one after the other, given in the order in which saving applies them."""

    steps: tuple[Layout, ...]

    def stored_shapes(self, built: Sequence[Shape]) -> list[Shape]:
        """Shapes after every step."""
        shapes = list(built)
        for step in self.steps:
            shapes = step.stored_shapes(shapes)
        return shapes

    def load(self, stored: Sequence[T]) -> list[T]:
        """The steps undone, last first."""
        tensors = list(stored)
        for step in reversed(self.steps):
            tensors = step.load(tensors)
        return tensors

    def save(self, built: Sequence[T]) -> list[T]:
        """The steps, first to last."""
        tensors = list(built)
        for step in self.steps:
            tensors = step.save(tensors)
        return tensors


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The model's tensors at `paths` are stored under `names`, through `layout`; bytes, where they are `packed`."""

    paths: tuple[str, ...]
    names: tuple[str, ...]
    layout: Layout = field(default_factory=Same)
    packed: bool = False


@dataclass(frozen=True, kw_only=True)
class TensorTable:
    """Every tensor of one family's file.

    `ignored` maps a regular expression over whole names to the reason why such a tensor carries nothing (a buffer that
    is recomputed). `duplicates` maps a name that may be stored again to the path whose tensor it must equal (a tied
    head), or under that name alone. `prefix` is what names begin with where the model was saved inside one with a head,
    and do not where it was saved alone: a file may lack it where the table has it, and have it where the table does
    not. `older` maps ends of names to those that an older file has instead; of the entries `joined` each stands for
    those of its tensors in a file that has them as one. Each of `spellings` is how other files begin their names: pairs
    of a beginning here and the one there.
    """

    entries: tuple[Entry, ...]
    ignored: dict[str, str] = field(default_factory=dict)
    duplicates: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
    older: dict[str, str] = field(default_factory=dict)
    joined: tuple[Entry, ...] = ()
    spellings: tuple[tuple[tuple[str, str], ...], ...] = ()


def spellings(table: TensorTable) -> list[TensorTable]:
    """Returns the table in every way that a file may begin its names, its own first."""
    within = any(name.startswith(table.prefix) for entry in table.entries for name in entry.names)
    other = (table.prefix, "") if within else ("", table.prefix)
    spelled = [table, *(_begun(table, way) for way in table.spellings)]
    return spelled + ([_begun(way, (other,)) for way in spelled] if table.prefix else [])


def _begun(table: TensorTable, beginnings: Sequence[tuple[str, str]]) -> TensorTable:
    again = {_other(name, beginnings): path for name, path in table.duplicates.items()}
    joined = respelled(table.joined, beginnings)
    entries = respelled(table.entries, beginnings)
    return replace(table, entries=entries, joined=joined, duplicates=table.duplicates | again)


def as_stored(table: TensorTable, stored: Collection[str]) -> TensorTable:
    """Returns the table under the names that a file uses, as far as they are `stored`: most decide how they begin.

    Ends of names are older where stored so, and a tensor is read under the name of its duplicate where stored only so.
    """

    def found(way: TensorTable) -> int:
        return sum(name in stored for entry in way.entries for name in entry.names)

    table = max(spellings(table), key=found)
    joined = [one for one in table.joined if one.names[0] in stored]
    apart = {path for one in joined for path in one.paths}
    table = replace(table, entries=(*(one for one in table.entries if apart.isdisjoint(one.paths)), *joined))
    again: dict[str, list[str]] = {}
    for name, path in table.duplicates.items():
        if name in stored:
            again.setdefault(path, []).append(name)

    def named(entry: Entry, name: str) -> str:
        if name in stored:
            return name
        ends = (name.removesuffix(end) + older for end, older in table.older.items() if name.endswith(end))
        others = (*ends, *(again.get(entry.paths[0], ()) if entry.layout == Same() else ()))
        return next((other for other in others if other in stored), name)

    return replace(
        table, entries=tuple(replace(e, names=tuple(named(e, name) for name in e.names)) for e in table.entries)
    )


def is_ignored(table: TensorTable, name: str) -> bool:
    """Returns whether a stored tensor carries nothing, with the prefix or without."""
    names = (name, table.prefix + name, name.removeprefix(table.prefix))
    return any(re.fullmatch(pattern, one) for pattern in table.ignored for one in names)


def respelled(entries: Sequence[Entry], beginnings: Sequence[tuple[str, str]]) -> tuple[Entry, ...]:
    """Returns the entries with names that start with the first of a pair starting with the second; the first fits."""
    return tuple(replace(e, names=tuple(_other(name, beginnings) for name in e.names)) for e in entries)


def _other(name: str, beginnings: Sequence[tuple[str, str]]) -> str:
    found = ((old, new) for old, new in beginnings if name.startswith(old))
    old, new = next(found, ("", ""))
    return new + name.removeprefix(old)


def entry(path: str, name: str, layout: Layout | None = None) -> Entry:
    """Returns the entry of one tensor stored as one."""
    return Entry(paths=(path,), names=(name,), layout=layout or Same())

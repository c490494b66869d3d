"""Weights that stay packed: which tensors of a file can, the spec with them packed, and the model's bytes of them.

Blocks lie along the rows of a matrix, so a layout that only moves whole rows moves them as it moves numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from asbuilt.dtypes import BLOCKS, GGUF_PACKABLE, OWN_BLOCKS
from asbuilt.families.gguf.layouts import Each, PerHead
from asbuilt.families.shared.table import (
    AdjacentPairs,
    Chain,
    Concat,
    EachExpert,
    Entry,
    Interleave,
    Layout,
    Leading,
    Mxfp4,
    Same,
    StackExperts,
    T,
)
from asbuilt.formats.gguf import GGUFTensor
from asbuilt.formats.safetensors import StoredTensor
from asbuilt.spec import Head, Model, Packed, Part, TiedHead, TokenEmbedding, walk
from asbuilt.spec.edit import transform
from asbuilt.spec.linear import Map, maps_by_path, transform_maps

# Formats whose numbers can be computed with: what kernels/packed.py expands, known here without it.
PACKABLE = (*(name.lower() for name in GGUF_PACKABLE), *OWN_BLOCKS)
ROWS_ONLY = (Same, Concat, Interleave, StackExperts, AdjacentPairs, PerHead, Leading)


@dataclass(frozen=True)
class Mxfp4Blocks(Mxfp4):
    """The same stored tensors, laid out as blocks of a scale and 16 bytes, the way GGUF files have them.

    There a byte's lower half belongs to the first half of a block and the upper one to the second, here to neighbours.
    """

    def load(self, stored: Sequence[T]) -> list[T]:
        """Returns (..., blocks * 17) bytes."""
        packed, scales = stored
        codes = packed.new_empty((*packed.shape, 2))
        codes[..., 0], codes[..., 1] = packed & 15, packed >> 4
        first, second = codes.flatten(-2).unflatten(-1, (2, 16)).unbind(-2)
        blocks = packed.new_empty((*scales.shape, BLOCKS["mxfp4"][1]))
        blocks[..., 0], blocks[..., 1:] = scales, first | second << 4
        return [blocks.flatten(-2)]


def blocks_layout(layout: Layout) -> Layout | None:
    """Returns the layout that moves bytes of blocks as `layout` moves numbers; None where that cannot be."""
    return by_rows(layout, {Mxfp4: Mxfp4Blocks()})


def by_rows(layout: Layout, instead: Mapping[type[Layout], Layout]) -> Layout | None:
    """Returns a layout that moves rows as `layout` does, some steps replaced; None if a step moves parts of rows."""
    if type(layout) in instead:
        return instead[type(layout)]
    if isinstance(layout, ROWS_ONLY):
        return layout
    if isinstance(layout, EachExpert):
        inner = by_rows(layout.layout, instead)
        return None if inner is None else EachExpert(inner)
    if isinstance(layout, Chain | Each):
        steps = layout.steps if isinstance(layout, Chain) else layout.layouts
        made = [by_rows(step, instead) for step in steps]
        return None if None in made else type(layout)(tuple(step for step in made if step is not None))
    return None


def packed_entries(
    spec: Model,
    entries: Sequence[Entry],
    stored: Mapping[str, StoredTensor | GGUFTensor],
    formats: Callable[[str], tuple[str, ...]] | None = None,
) -> tuple[tuple[Entry, str], ...]:
    """Returns the entries whose tensors can stay blocks of a format, with that, under layouts of their bytes.

    They are the matrices of linear maps, of experts and of a head, and an embedding's table. `formats` are those that a
    tensor of a quantised folder can be held in, the smallest first.
    """
    places = _places(spec)
    found = []
    for entry in entries:
        layout = blocks_layout(entry.layout)
        if layout is None or not places.issuperset(entry.paths):
            continue
        format = _format(entry, stored) or ("" if formats is None else _common([formats(name) for name in entry.names]))
        if format in PACKABLE:
            found.append((replace(entry, layout=layout, packed=True), format))
    return tuple(found)


def _format(entry: Entry, stored: Mapping[str, StoredTensor | GGUFTensor]) -> str:
    """The one block format that an entry's tensors are stored in; empty for none."""
    if entry.packed:
        return "mxfp4"
    kinds = {"" if isinstance(t := stored[name], StoredTensor) else t.type.lower() for name in entry.names}
    return kinds.pop() if len(kinds) == 1 else ""


def _common(each: Sequence[tuple[str, ...]]) -> str:
    """The first format that is among all, empty for none."""
    return next((name for name in each[0] if all(name in others for others in each)), "")


def _places(spec: Model) -> set[str]:
    """The paths of weights that a part can hold as blocks."""
    tables = (path for path, part in walk(spec) if isinstance(part, TokenEmbedding | Head))
    return {*maps_by_path(spec), *(f"{path}.weight" for path in tables)}


def packed_spec(spec: Model, formats: Mapping[str, str]) -> Model:
    """Returns the model with the weights at these paths packed in the given formats."""

    def table(path: str, part: Part) -> Part:
        if isinstance(part, TokenEmbedding | Head):
            return replace(part, format=formats.get(f"{path}.weight"))
        return replace(part, format=formats.get("embedding.weight")) if isinstance(part, TiedHead) else part

    def matrix(path: str, one: Map) -> Map:
        return Packed(base=one.plain, format=formats[path]) if path in formats else one

    return transform_maps(transform(spec, table), matrix)

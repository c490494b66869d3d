"""Experts that a file holds otherwise than its family's own files: apart where those have a stack, or the other way.

Quantisers take stacks of experts apart, since they pack linear maps; mlx makes one stack of those that are apart, and
files of newer models hold stacks as transformers has them in memory, gate and up as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from asbuilt.families.shared.table import Concat, EachExpert, Entry, Shape, StackExperts, TensorTable

PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def experts_as_stored(table: TensorTable, shapes: Mapping[str, Shape], stored: Collection[str]) -> TensorTable:
    """Returns the table with the entries of experts as far as they are `stored` otherwise; `shapes` are the model's."""
    return replace(table, entries=tuple(one for entry in table.entries for one in _as_stored(entry, shapes, stored)))


def _as_stored(entry: Entry, shapes: Mapping[str, Shape], stored: Collection[str]) -> Iterator[Entry]:
    ends = [path.rpartition(".")[2] for path in entry.paths]
    if entry.names[0] in stored or not PARTS.keys() >= {*ends} or any(len(shapes[path]) != 3 for path in entry.paths):
        yield entry
        return
    before, experts, _ = entry.names[0].partition(".experts.")
    own, both = ends[0], f"{before}.experts.gate_up_proj"
    stack = f"{before}.switch_mlp.{PARTS[ends[0]]}.weight"
    if experts and isinstance(entry.layout, StackExperts) and stack in stored:
        yield Entry(paths=entry.paths, names=(stack,))
    elif experts and isinstance(entry.layout, StackExperts) and both in stored:
        if own == "gate":
            path, d_ff = entry.paths[0], shapes[entry.paths[0]][1]
            up = f"{path.removesuffix('gate')}up"
            yield Entry(paths=(path, up), names=(both,), layout=EachExpert(Concat((d_ff, d_ff))))
        elif own == "down":
            yield Entry(paths=entry.paths, names=(f"{before}.experts.down_proj",))
    elif experts and len(entry.names) == 1 and f"{before}.experts.0.{PARTS[ends[0]]}.weight" in stored:
        for path, end in zip(entry.paths, ends, strict=True):
            n = shapes[path][0]
            names = tuple(f"{before}.experts.{e}.{PARTS[end]}.weight" for e in range(n))
            yield Entry(paths=(path,), names=names, layout=StackExperts(n))
    else:
        yield entry

"""What families of decoders share that store queries, keys and values as one tensor: finding parts, making tables."""

from __future__ import annotations

from typing import TypeVar

from asbuilt.errors import InputError
from asbuilt.families.shared.common import named_entries
from asbuilt.families.shared.table import Entry, Interleave, Layout, Table, entry
from asbuilt.spec import Attention, Branch, Model, Part, TiedHead, weights

P = TypeVar("P", bound=Part)
TWO = ("attention", "ffn")


def expect(value: object, kind: type[P], path: str, family: str) -> P:
    """Returns `value`; raises InputError naming its path unless it is a part of that kind."""
    if not isinstance(value, kind):
        raise InputError(f"{family} has {kind.__name__} here", field=path, value=repr(value))
    return value


def branches(spec: Model, family: str, names: tuple[str, ...] = TWO) -> tuple[Branch, ...]:
    """Returns the first block's branches of these names; raises InputError unless these are all, in any order."""
    found = {branch.name: branch for branch in spec.blocks[0].branches}
    if found.keys() != set(names):
        raise InputError(f"{family} has other branches", field="blocks.0", value=list(found), allowed=", ".join(names))
    return tuple(found[name] for name in names)


def grouped(attention: Attention) -> Interleave:
    """Returns the layout of q, k, v stored by key head: its queries, its key, its value, then the next one's."""
    d_head, groups = attention.d_head, attention.n_kv_heads
    return Interleave(groups, (attention.n_heads // groups * d_head, d_head, d_head))


def fused_table(
    spec: Model,
    family: str,
    *,
    outside: dict[str, str],
    layers: str,
    stems: dict[str, str],
    fused: tuple[str, str, Layout],
    ignored: dict[str, str] | None = None,
) -> Table:
    """Returns the table of a checkpoint folder in which q, k and v of every block are one tensor.

    `outside` gives the stored stem of what is no block, `stems` those in a block, whose number follows `layers`;
    `fused` is the path of the attention in a block, the stored stem, and the layout. A tied head may be stored again.
    Raises InputError naming the first weight without a name.
    """
    path, stem, layout = fused
    inside = tuple(f"{path}.{name}" for name in "qkv")
    entries = outside_entries(spec, outside, family)
    for i, block in enumerate(spec.blocks):
        place, stored = f"blocks.{i}.", f"{layers}.{i}."
        held = {name for name, _, _ in weights(block)}
        for kind in ("weight", "bias"):
            if f"{inside[0]}.{kind}" in held:
                paths = tuple(f"{place}{name}.{kind}" for name in inside)
                entries.append(Entry(paths=paths, names=(f"{stored}{stem}.{kind}",), layout=layout))
        entries += named_entries(block, place, stems, stored, {}, family, elsewhere=inside)
    tied = isinstance(spec.head, TiedHead)
    return Table(
        entries=tuple(entries),
        ignored=ignored or {},
        duplicates={f"{outside['head']}.weight": "embedding.weight"} if tied else {},
    )


def outside_entries(spec: Model, stems: dict[str, str], family: str) -> list[Entry]:
    """Returns an entry for every weight outside the blocks; raises InputError naming the first without a name."""
    entries = []
    for name, _, _ in weights(spec):
        stem, _, kind = name.rpartition(".")
        if name.startswith("blocks."):
            continue
        if stem not in stems:
            raise InputError(f"{family} files have no name for this weight", field=name)
        entries.append(entry(name, f"{stems[stem]}.{kind}"))
    return entries

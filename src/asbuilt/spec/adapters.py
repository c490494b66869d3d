"""Low-rank adapters beside the matrices of a model's blocks, in one call."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeVar

from asbuilt.errors import InputError, near
from asbuilt.spec.linear import Lora, Map, Mapped
from asbuilt.spec.part import Part, walk

P = TypeVar("P", bound=Part)


def adapted(spec: P, rank: int, alpha: float, targets: Collection[str] | None = None) -> P:
    """Returns a model whose blocks have a low-rank adapter beside each of their linear maps, routers apart.

    `targets` are names of maps, such as `q` and `down`; None adapts all of them. What a map has around it, such as
    packed blocks, stays inside the adapter. Raises InputError for a target that no map of a block is named by, and for
    a rank that a map is too small for.
    """
    known = dict.fromkeys(name for _, part in _in_blocks(spec) for name in part.maps | part.stacks)
    for target in targets or ():
        if target not in known:
            raise InputError(
                "no matrix of a block has this name",
                field="targets",
                value=target,
                allowed=", ".join(known),
                fix=near(target, known),
            )

    def with_adapters(part: Part) -> Part:
        assert isinstance(part, Mapped)
        maps = part.maps | part.stacks
        chosen = maps if targets is None else {name: m for name, m in maps.items() if name in targets}
        return part.with_maps({name: _beside(m, rank, alpha) for name, m in chosen.items()})

    inside = {path for path, _ in _in_blocks(spec)}
    return spec.replace_where(lambda path, _: path in inside, with_adapters) if inside else spec


def without_adapters(spec: P) -> P:
    """Returns a model with its adapters taken away, and what they stood beside in their place."""

    def bare(part: Part) -> Part:
        assert isinstance(part, Mapped)
        return part.with_maps({n: m.base for n, m in (part.maps | part.stacks).items() if isinstance(m, Lora)})

    def has_some(_: str, part: Part) -> bool:
        return isinstance(part, Mapped) and any(isinstance(m, Lora) for m in (part.maps | part.stacks).values())

    return spec.replace_where(has_some, bare) if any(has_some(path, part) for path, part in walk(spec)) else spec


def _in_blocks(spec: Part) -> Iterator[tuple[str, Mapped]]:
    """Yields what has maps in the blocks of a model, and of its encoder."""
    for path, part in walk(spec):
        if isinstance(part, Mapped) and part.kind != "router" and (path.startswith("blocks.") or ".blocks." in path):
            yield path, part


def _beside(one: Map, rank: int, alpha: float) -> Lora:
    if isinstance(one, Lora):
        raise InputError("has an adapter already", field="spec", fix="take it away first, or merge it")
    return Lora(base=one, rank=rank, alpha=alpha)

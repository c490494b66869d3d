"""Adding low-rank adapters to the linear maps of a model's blocks, and removing them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from asbuilt.errors import InputError, near, one_of
from asbuilt.spec.edit import transform
from asbuilt.spec.linear import Lora, Map, Mapped
from asbuilt.spec.part import Part, walk

P = TypeVar("P", bound=Part)


def adapted(spec: P, rank: int, alpha: float, targets: Collection[str] | None = None) -> P:
    """Returns a model with a low-rank adapter on every linear map of its blocks, except routers.

    `targets` are names of maps, such as `q` and `down`; None adapts all of them. A packed map stays packed inside its
    adapter. Raises InputError for a target that matches no map of a block, and for a rank larger than a map allows.
    """
    parts = (part for path, part in walk(spec) if isinstance(part, Mapped) and _adaptable(path, part))
    known = dict.fromkeys(name for part in parts for name in part.maps | part.stacks)
    for target in targets or ():
        if target not in known:
            raise InputError(
                "no linear map of a block has this name",
                field="targets",
                value=target,
                allowed=one_of(known),
                fix=near(target, known),
            )

    def beside(path: str, part: Part) -> Part:
        if not isinstance(part, Mapped) or not _adaptable(path, part):
            return part
        maps = part.maps | part.stacks
        return part.with_maps({n: _beside(m, rank, alpha) for n, m in maps.items() if targets is None or n in targets})

    return transform(spec, beside)


def without_adapters(spec: P) -> P:
    """Returns a model without its adapters."""

    def bare(_: str, part: Part) -> Part:
        if not isinstance(part, Mapped):
            return part
        return part.with_maps({n: m.base for n, m in (part.maps | part.stacks).items() if isinstance(m, Lora)})

    return transform(spec, bare)


def _adaptable(path: str, part: Part) -> bool:
    """Returns whether this part is in a block of the model or of its encoder, and not a router."""
    return (path.startswith("blocks.") or ".blocks." in path) and part.kind != "router"


def _beside(one: Map, rank: int, alpha: float) -> Lora:
    if isinstance(one, Lora):
        raise InputError("already has an adapter", field="spec", fix="remove it first, or merge it")
    return Lora(base=one, rank=rank, alpha=alpha)

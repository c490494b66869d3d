"""Adding low-rank adapters to the linear maps of a model's blocks, and removing them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from asbuilt.errors import InputError, near, one_of
from asbuilt.spec.linear import Lora, Map, maps_by_path, transform_maps
from asbuilt.spec.part import Part

P = TypeVar("P", bound=Part)


def adapted(spec: P, rank: int, alpha: float, targets: Collection[str] | None = None) -> P:
    """Returns a model with a low-rank adapter on every linear map of its blocks, except routers.

    `targets` are names of maps, such as `q` and `down`; None adapts all of them. A packed map stays packed inside its
    adapter. Raises InputError for a target that matches no map of a block, and for a rank larger than a map allows.
    """
    known = dict.fromkeys(_name(path) for path in maps_by_path(spec) if _in_block(path))
    for target in targets or ():
        if target not in known:
            raise InputError(
                "no linear map of a block has this name",
                field="targets",
                value=target,
                allowed=one_of(known),
                fix=near(target, known),
            )

    def with_adapter(path: str, one: Map) -> Map:
        if not _in_block(path) or (targets is not None and _name(path) not in targets):
            return one
        if isinstance(one, Lora):
            raise InputError("already has an adapter", field="spec", fix="remove it first, or merge it")
        return Lora(base=one, rank=rank, alpha=alpha)

    return transform_maps(spec, with_adapter)


def without_adapters(spec: P) -> P:
    """Returns a model without its adapters."""
    return transform_maps(spec, lambda _, one: one.base if isinstance(one, Lora) else one)


def _in_block(path: str) -> bool:
    """Returns whether a matrix is in a block of the model or of its encoder."""
    return path.startswith("blocks.") or ".blocks." in path


def _name(path: str) -> str:
    """Returns a map's name, given the path of its matrix."""
    return path.removesuffix(".weight").rpartition(".")[2]

"""Adding low-rank adapters to the linear maps of a model's blocks, and removing them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import TypeVar

from asbuilt.errors import InputError, near, one_of
from asbuilt.spec.linear import Lora, Map, maps_by_path, transform_maps
from asbuilt.spec.part import Part

P = TypeVar("P", bound=Part)


def adapted(spec: P, rank: int, alpha: float, targets: Collection[str] | None = None) -> P:
    """Returns a model with a low-rank adapter on every linear map of its blocks, except routers.

    `targets` are names of maps, such as `q` and `down`, or patterns of their paths, such as `blocks.1?.*` and
    `*.mixer.body.*`; None adapts all of them. A packed map stays packed inside its adapter. Raises InputError for a
    target that matches no map of a block, and for a rank larger than a map allows.
    """
    known = [path for path in maps_by_path(spec) if _in_block(path)]
    for target in targets or ():
        if not any(_matches(path, target) for path in known):
            raise _unmatched(target, known)

    def with_adapter(path: str, one: Map) -> Map:
        if not _in_block(path) or (targets is not None and not any(_matches(path, target) for target in targets)):
            return one
        if isinstance(one, Lora):
            raise InputError("already has an adapter", field="spec", fix="remove it first, or merge it")
        return Lora(base=one, rank=rank, alpha=alpha)

    return transform_maps(spec, with_adapter)


def without_adapters(spec: P) -> P:
    """Returns a model without its adapters."""
    return transform_maps(spec, lambda _, one: one.base if isinstance(one, Lora) else one)


def is_pattern(target: str) -> bool:
    """Returns whether a target is a pattern of paths rather than the name of a map."""
    return any(letter in target for letter in ".*?[")


def _in_block(path: str) -> bool:
    """Returns whether a matrix is in a block of the model or of its encoder."""
    return path.startswith("blocks.") or ".blocks." in path


def _matches(path: str, target: str) -> bool:
    """Returns whether the matrix at a path is of a map of this name, or one whose path this pattern matches."""
    return target == _name(path) or fnmatchcase(path.removesuffix(".weight"), target)


def _name(path: str) -> str:
    """Returns a map's name, given the path of its matrix."""
    return path.removesuffix(".weight").rpartition(".")[2]


def _unmatched(target: str, paths: Iterable[str]) -> InputError:
    names = dict.fromkeys(map(_name, paths))
    return InputError(
        "no linear map of a block has this name, or a path like this",
        field="targets",
        value=target,
        allowed=f"{one_of(names)}, or a pattern such as blocks.0.*",
        fix=near(target, names),
    )

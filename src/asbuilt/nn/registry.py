"""Which module computes which part: a module says so itself, where it is defined.

A part from outside the package is built like ours once its module is registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from asbuilt.errors import InputError
from asbuilt.spec.part import Part

MODULES: dict[type[Part], Callable[..., nn.Module]] = {}
M = TypeVar("M", bound=Callable[..., nn.Module])


def computes(*parts: type[Part]) -> Callable[[M], M]:
    """Registers a module, made of (part, path), as what computes parts of these types."""

    def register(made: M) -> M:
        MODULES.update(dict.fromkeys(parts, made))
        return made

    return register


def module(part: Part, path: str) -> nn.Module:
    """Returns the module of `part`, its parameters uninitialised; raises InputError where none is registered."""
    if type(part) not in MODULES:
        raise InputError(
            "no module computes this part",
            field=path or "spec",
            value=type(part).__name__,
            fix="register one: asbuilt.nn.registry.computes(PartType)",
        )
    return MODULES[type(part)](part, path)


def optional(part: Part | None, path: str) -> nn.Module | None:
    """Returns the module of a part, or None where there is none."""
    return None if part is None else module(part, path)

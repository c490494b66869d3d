"""Which module computes which part: a module says so itself, where it is defined.

A part from outside the package is built like ours once its module is registered.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TypeVar

from torch import nn

from asbuilt.errors import InputError
from asbuilt.spec.part import Part

MODULES: dict[type[Part], Callable[..., nn.Module]] = {}
SPEC, NN = "asbuilt.spec", "asbuilt.nn"
M = TypeVar("M", bound=Callable[..., nn.Module])


def computes(*parts: type[Part]) -> Callable[[M], M]:
    """Registers a module, made of (part, path), as what computes parts of these types."""

    def register(made: M) -> M:
        MODULES.update(dict.fromkeys(parts, made))
        return made

    return register


def registered(kind: type[Part]) -> Callable[..., nn.Module] | None:
    """Returns what makes the module of a part of this type; None where nothing is registered."""
    if kind not in MODULES:
        _import_mirror(kind)
    return MODULES.get(kind)


def module(part: Part, path: str) -> nn.Module:
    """Returns the module of `part`, its parameters uninitialised; raises InputError where none is registered."""
    made = registered(type(part))
    if made is None:
        raise InputError(
            "no module is registered for this part",
            field=path or "spec",
            value=type(part).__name__,
            fix="register one: asbuilt.nn.registry.computes(PartType)",
        )
    return made(part, path)


def _import_mirror(kind: type[Part]) -> None:
    """Imports nn/x.py for a part of spec/x.py, where there is one: the module in it registers itself."""
    package, _, name = kind.__module__.rpartition(".")
    if package == SPEC and find_spec(f"{NN}.{name}") is not None:
        import_module(f"{NN}.{name}")


def optional(part: Part | None, path: str) -> nn.Module | None:
    """Returns the module of a part, or None where there is none."""
    return None if part is None else module(part, path)

"""The registry of modules by part: a module registers itself where it is defined.

A part from outside the package is built like a built-in one once its module is registered.
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
    """Registers a module, constructed from (part, path), for parts of these types."""

    def register(made: M) -> M:
        MODULES.update(dict.fromkeys(parts, made))
        return made

    return register


def registered(kind: type[Part]) -> Callable[..., nn.Module] | None:
    """Returns the constructor of the module for parts of this type; None if none is registered."""
    if kind not in MODULES:
        _import_mirror(kind)
    return MODULES.get(kind)


def module(part: Part, path: str) -> nn.Module:
    """Returns the module of `part`, with uninitialised parameters; raises InputError if none is registered."""
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
    """Imports nn/x.py for a part of spec/x.py, if it exists: its module registers itself."""
    package, _, name = kind.__module__.rpartition(".")
    if package == SPEC and find_spec(f"{NN}.{name}") is not None:
        import_module(f"{NN}.{name}")


def optional(part: Part | None, path: str) -> nn.Module | None:
    """Returns the module of a part, or None for None."""
    return None if part is None else module(part, path)

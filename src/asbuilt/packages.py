"""Packages that import what they make public on first use, and packages that can also be called.

`asbuilt.plan(model, gpu=...)` beside `asbuilt.plan.serve`: a call runs the function of the same name in `asbuilt.api`,
which is imported on the first call; the packages do not depend on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package that is called as the function of the same name in `asbuilt.api`."""

    def __call__(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  as the function declares
        """Calls the function."""
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(f"asbuilt.api.{name}"), name)(*args, **options)

    def __setattr__(self, name: str, value: object) -> None:
        """Sets an attribute, but for a module that has the name of something public, which the import system sets."""
        if not (isinstance(value, ModuleType) and name in vars(self).get("PUBLIC", {})):
            super().__setattr__(name, value)


def make_callable(name: str) -> None:
    """Turns the package of this name, while it is being imported, into a `CallablePackage`."""
    sys.modules[name].__class__ = CallablePackage


def on_first_use(name: str, public: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns `__getattr__` of the package of this name, whose public names are imported from the modules given."""

    def imported(wanted: str) -> Any:  # noqa: ANN401  whatever has the name
        if wanted not in public:
            raise AttributeError(f"module {name!r} has no attribute {wanted!r}")
        found = getattr(import_module(public[wanted]), wanted)
        setattr(sys.modules[name], wanted, found)
        return found

    return imported

"""Packages that can also be called: `asbuilt.plan(model, gpu=...)` beside `asbuilt.plan.serve`.

A call runs the function of the same name in `asbuilt.api`, which is imported on the first call; the packages do not
depend on it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package that is called as the function of the same name in `asbuilt.api`."""

    def __call__(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  as the function declares
        """Calls the function."""
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(f"asbuilt.api.{name}"), name)(*args, **options)


def make_callable(name: str) -> None:
    """Turns the package of this name, while it is being imported, into a `CallablePackage`."""
    sys.modules[name].__class__ = CallablePackage

"""One file per family, each with its `CASE`; found by being here."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from harness import ParityCase

_modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
CASES: dict[str, ParityCase] = {module.CASE.family: module.CASE for module in _modules}

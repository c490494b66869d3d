"""Writes parts.md: a page section for every part, from what the part says of itself. `python docs/make_parts.py`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from asbuilt.kernels.memory import Memory
from asbuilt.kernels.memory.registry import registered as memory_registered
from asbuilt.nn.registry import registered
from asbuilt.spec.json import PARTS
from asbuilt.spec.part import Part

PAGE = Path(__file__).with_name("parts.md")
DECLARATIONS = {
    "holds": "holds",
    "buffers": "holds beside, untrained",
    "multiplies": "multiplies",
    "remembers": "remembers",
    "saves": "saves for the backward pass",
    "peak_bytes": "needs while it runs",
    "shard": "on one of several devices",
}
HEAD = """# Parts

What each part of a model is, and what it says about itself: the declarations from which costs, modules, checkpoints and
caches follow. Made from the parts' own docstrings by `docs/make_parts.py`; a test holds it to them.
"""


def page() -> str:
    """Returns the whole page."""
    by_file: dict[str, list[type[Part]]] = {}
    for part in PARTS.values():
        by_file.setdefault(part.__module__.rsplit(".", 1)[1], []).append(part)
    sections = []
    for file, parts in by_file.items():
        sections += [f"## {file}", *(section(part) for part in parts)]
    return "\n\n".join([HEAD.strip(), *sections]) + "\n"


def section(part: type[Part]) -> str:
    """Returns one part's section: what it is, its fields, its declarations, its module."""
    said = [f"### {part.__name__}", inspect.cleandoc(part.__doc__ or "")]
    said.append("\n".join(["```", f"{part.__name__}(", *(f"    {line}," for line in _fields(part)), ")", "```"]))
    told = field_docs(part)
    said.append("\n".join(f"- `{field.name}`: {told.get(field.name, '')}" for field in fields(part)))
    declared = _of_memory(part) | vars(part)
    own = {name: text for name, text in DECLARATIONS.items() if name in declared}
    said.append("\n".join(f"- **{text}**: {_first(declared[name].__doc__)}" for name, text in own.items()))
    module = registered(part)
    if module is not None:
        said.append(f"Built by `{module.__module__}.{module.__name__}`.")
    return "\n\n".join(text for text in said if text)


def _of_memory(part: type[Part]) -> dict[str, Any]:
    """Returns the attributes of the part's memory class, none if it has no class of its own."""
    found = memory_registered(part)
    return {} if found is Memory else dict(vars(found))


def field_docs(part: type[Part]) -> dict[str, str]:
    """Returns what stands below each field of a part, its own and those of the parts that it is made from."""
    told: dict[str, str] = {}
    for base in reversed(part.__mro__):
        if issubclass(base, Part) and base is not Part:
            made = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(made, ast.ClassDef)
            told |= dict(_documented(made.body))
    return told


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, doc in pairwise(body):
        text = doc.value.value if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) else None
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
            yield field.target.id, _first(text)


def _fields(part: type[Part]) -> list[str]:
    return [
        f"{field.name}: {field.type}" + ("" if field.default is MISSING else f" = {field.default!r}")
        for field in fields(part)
    ]


def _first(doc: str | None) -> str:
    """The docstring in one line."""
    return " ".join(inspect.cleandoc(doc or "").split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""A spec as readable text: one part per line, defaults omitted, equal neighbours folded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from itertools import groupby

from asbuilt.spec.part import Part

# A part that fits on one line of this length is not split into its fields.
LINE = 110


def show(part: Part, indent: int = 0) -> str:
    """Returns `part` as text on several lines, with nested parts indented."""
    one = _one_line(part)
    if len(one) + indent <= LINE and "×" not in one:
        return one
    pad = " " * (indent + 2)
    lines = [f"{pad}{name}={_value(value, indent + 2)}," for name, value in _shown_fields(part)]
    return f"{type(part).__name__}(\n" + "\n".join(lines) + f"\n{' ' * indent})"


def _shown_fields(part: Part) -> Iterator[tuple[str, object]]:
    for field in fields(part):
        value = getattr(part, field.name)
        if field.default is MISSING or value != field.default:
            yield field.name, value


def _one_line(part: Part) -> str:
    told = ", ".join(f"{name}={_flat(value)}" for name, value in _shown_fields(part))
    return f"{type(part).__name__}({told})"


def _flat(value: object) -> str:
    if isinstance(value, Part):
        return _one_line(value)
    if isinstance(value, tuple) and any(isinstance(item, Part) for item in value):
        return "[" + ", ".join(f"{n} × {_flat(item)}" if n > 1 else _flat(item) for n, item in _grouped(value)) + "]"
    return repr(value)


def _grouped(items: tuple[object, ...]) -> list[tuple[int, object]]:
    return [(len(list(group)), item) for item, group in groupby(items)]


def _value(value: object, indent: int) -> str:
    if isinstance(value, Part):
        return show(value, indent)
    if isinstance(value, tuple) and any(isinstance(item, Part) for item in value):
        pad = " " * (indent + 2)
        lines = [
            pad + (f"{n} × " if n > 1 else "") + (show(item, indent + 2) if isinstance(item, Part) else repr(item))
            for n, item in _grouped(value)
        ]
        return "[\n" + ",\n".join(lines) + f",\n{' ' * indent}]"
    return repr(value)

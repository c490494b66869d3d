"""The derivation of every line of a plan: the formula, the formula with numbers, the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from asbuilt.plan.lines import Line, figure
from asbuilt.shown import line


def explain(lines: Iterable[Line]) -> Iterator[str]:
    """Yields the text that derives each of `lines`, escaped since machines' names and sources are untrusted."""
    for derived in lines:
        yield from map(line, _derivation(derived))


def _derivation(derived: Line) -> Iterator[str]:
    yield derived.name
    if derived.symbols and derived.symbols != derived.figures:
        yield f"    = {derived.symbols}"
    if derived.figures:
        yield f"    = {derived.figures}"
    yield f"    = {figure(derived)}"
    if derived.source:
        yield f"    constants: {derived.source}"
    if derived.note:
        yield f"    note: {derived.note}"

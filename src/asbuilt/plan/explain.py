"""Every line of a plan as a person would derive it aloud: the formula, the numbers put in, the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from asbuilt.plan.lines import Line, figure
from asbuilt.shown import line


def explain(lines: Iterable[Line]) -> Iterator[str]:
    """Yields the text lines that derive each of `lines`, in their order; machines' names and sources are strangers'."""
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

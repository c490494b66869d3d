"""Every line of a plan as a person would derive it aloud: the formula, the numbers put in, the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from asbuilt.plan.lines import Line, figure


def explain(lines: Iterable[Line]) -> Iterator[str]:
    """Yields the text lines that derive each of `lines`, in their order."""
    for line in lines:
        yield line.name
        if line.symbols and line.symbols != line.figures:
            yield f"    = {line.symbols}"
        if line.figures:
            yield f"    = {line.figures}"
        yield f"    = {figure(line)}"
        if line.source:
            yield f"    constants: {line.source}"
        if line.note:
            yield f"    note: {line.note}"

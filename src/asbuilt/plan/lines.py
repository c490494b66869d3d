"""One line of a plan: a figure, the formula it comes from, and the numbers that were put in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from asbuilt.shown import number

Number = int | float
PLACE = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A figure of a plan.

    `formula` is arithmetic (+ − × / min max floor ceil) over places such as `{weights}`, each a key of `numbers`, and
    putting the numbers in gives `value`. `source` says where constants come from that no declaration gives. `note` is
    what a person should know beside it.
    """

    name: str
    value: Number
    unit: str = "bytes"
    formula: str = ""
    numbers: Mapping[str, Number] = field(default_factory=dict)
    source: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        assert {*PLACE.findall(self.formula)} == {*self.numbers}, f"{self.name}: {self.formula} of {self.numbers}"

    @property
    def symbols(self) -> str:
        """The formula with names."""
        return PLACE.sub(lambda place: place[1], self.formula)

    @property
    def figures(self) -> str:
        """The formula with the numbers put in."""
        return PLACE.sub(lambda place: written(self.numbers[place[1]]), self.formula)


def written(value: Number) -> str:
    """Returns 8,030,261,248 or 0.9: no digit lost that a person would calculate with."""
    return number(value, 9)


def figure(line: Line) -> str:
    """Returns the value with its unit; bytes also in GB and GiB, seconds also in milliseconds."""
    if line.unit == "bytes" and abs(line.value) >= 1e6:
        return f"{written(line.value)} bytes = {line.value / 1e9:,.3f} GB = {line.value / 2**30:,.3f} GiB"
    if line.unit == "seconds" and abs(line.value) < 1:
        return f"{number(line.value * 1e3, 6)} ms"
    return f"{written(line.value)} {line.unit}".rstrip()


def total(name: str, lines: Mapping[str, Number], **more: str) -> Line:
    """Returns the line that adds up `lines`, name by name."""
    formula = " + ".join(f"{{{key}}}" for key in lines) or "0"
    return Line(name=name, value=sum(lines.values()), formula=formula, numbers=dict(lines), **more)

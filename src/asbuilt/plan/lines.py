"""One line of a plan: a figure, its formula, and the numbers in it."""

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

    `formula` is arithmetic (+ − × / min max floor ceil) over placeholders such as `{weights}`, the keys of `numbers`,
    and evaluates to `value`. `source` is the source of constants that are not declared. `note` is a remark for the
    user.
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
        """The formula with numbers substituted."""
        return PLACE.sub(lambda place: written(self.numbers[place[1]]), self.formula)


def written(value: Number) -> str:
    """Returns 8,030,261,248 or 0.9: the number without loss of precision."""
    return number(value, 9)


def figure(line: Line) -> str:
    """Returns the value with its unit; bytes also in GB and GiB, seconds also in milliseconds."""
    if line.unit == "bytes" and abs(line.value) >= 1e6:
        return f"{written(line.value)} bytes = {line.value / 1e9:,.3f} GB = {line.value / 2**30:,.3f} GiB"
    if line.unit == "seconds" and abs(line.value) < 1:
        return f"{number(line.value * 1e3, 6)} ms"
    return f"{written(line.value)} {line.unit}".rstrip()


def total(name: str, lines: Mapping[str, Number], **more: str) -> Line:
    """Returns the line that is the sum of `lines`."""
    formula = " + ".join(f"{{{key}}}" for key in lines) or "0"
    return Line(name=name, value=sum(lines.values()), formula=formula, numbers=dict(lines), **more)

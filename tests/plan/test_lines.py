"""A line's numbers, put into its formula, give its value; and the explanation shows both."""

from __future__ import annotations

import pytest

from asbuilt.plan.explain import explain
from asbuilt.plan.lines import Line, figure, number, total


def test_an_explained_line() -> None:
    line = Line(name="weights", value=16, formula="{parameters} × {bytes each}",
                numbers={"parameters": 8, "bytes each": 2}, source="declared")  # fmt: skip
    said = list(explain([line]))
    assert said == [
        "weights", "    = parameters × bytes each", "    = 8 × 2", "    = 16 bytes", "    constants: declared",
    ]  # fmt: skip


def test_a_formula_names_its_numbers() -> None:
    with pytest.raises(AssertionError):
        Line(name="weights", value=16, formula="{parameters}", numbers={})


def test_a_total() -> None:
    line = total("all", {"a": 1, "b": 2})
    assert (line.value, line.symbols, line.figures) == (3, "a + b", "1 + 2")


def test_units() -> None:
    assert "1.000 GiB" in figure(Line(name="x", value=2**30))
    assert figure(Line(name="x", value=0.0125, unit="seconds")) == "12.5 ms"
    assert number(8_030_261_248) == "8,030,261,248"
    assert number(0.9) == "0.9"

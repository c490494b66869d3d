"""A line's numbers, put into its formula, give its value; and the explanation shows both."""

from __future__ import annotations

import pytest

from asbuilt.plan.explain import explain
from asbuilt.plan.lines import Line, figure, number, total


def test_an_explained_line() -> None:
    line = Line(
        name="weights",
        value=16,
        formula="{parameters} × {bytes each}",
        numbers={"parameters": 8, "bytes each": 2},
        source="declared",
    )
    said = list(explain([line]))
    assert said == [
        "weights",
        "    = parameters × bytes each",
        "    = 8 × 2",
        "    = 16 bytes",
        "    constants: declared",
    ]


def test_a_formula_names_its_numbers() -> None:
    with pytest.raises(AssertionError):
        Line(name="weights", value=16, formula="{parameters}", numbers={})


def test_a_total() -> None:
    line = total("all", {"a": 1, "b": 2})
    assert (line.value, line.symbols, line.figures) == (3, "a + b", "1 + 2")


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (999_999, "bytes", "999,999 bytes"),
        (1_000_000, "bytes", "1,000,000 bytes = 0.001 GB = 0.001 GiB"),
        (-1_500_000_000, "bytes", "-1,500,000,000 bytes = -1.500 GB = -1.397 GiB"),
        (1_000_000, "tokens", "1,000,000 tokens"),
        (0.5, "seconds", "500 ms"),
        (1, "seconds", "1 seconds"),
        (1.5, "seconds", "1.5 seconds"),
        (0.123456789, "seconds", "123.457 ms"),
        (1234.567891234, "FLOPs", "1,234.56789 FLOPs"),
        (3, "", "3"),
    ],
)
def test_figures(value: float, unit: str, said: str) -> None:
    assert figure(Line(name="x", value=value, unit=unit)) == said


def test_what_is_said_of_a_line_without_a_formula() -> None:
    assert list(explain([Line(name="x", value=1, unit="", note="why")])) == ["x", "    = 1", "    note: why"]
    same = Line(name="x", value=4, unit="", formula="2 + 2")
    assert list(explain([same])) == ["x", "    = 2 + 2", "    = 4"]


def test_a_total_of_nothing() -> None:
    assert (total("all", {}).value, total("all", {}).symbols) == (0, "0")


def test_units() -> None:
    assert "1.000 GiB" in figure(Line(name="x", value=2**30))
    assert figure(Line(name="x", value=0.0125, unit="seconds")) == "12.5 ms"
    assert number(8_030_261_248) == "8,030,261,248"
    assert number(0.9) == "0.9"

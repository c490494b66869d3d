"""Messages fit on a screen and are one line, whatever a stranger's file is called or holds."""

from __future__ import annotations

import sys

import pytest

from asbuilt.errors import InputError, near, one_of, shorten

HUGE = "x" * 10**7
SCREEN = 80 * 24 + 40  # and the words between


@pytest.mark.parametrize("piece", ["problem", "field", "allowed", "fix", "value"])
def test_no_piece_of_a_message_is_longer_than_a_screen(piece: str) -> None:
    pieces = {"problem": "not read", "field": "f", "value": 1, "allowed": "a", "fix": "do"} | {piece: HUGE}
    said = str(InputError(pieces.pop("problem"), **pieces))
    assert len(said) < 700
    assert said.count("…") == 1


def test_all_of_them_together_fit_on_a_screen() -> None:
    assert len(str(InputError(HUGE, field=HUGE, value=[HUGE] * 2, allowed=HUGE, fix=HUGE))) <= SCREEN


def test_the_end_of_a_long_path_is_kept() -> None:
    said = str(InputError("not read", field="/" + "d" * 1000 + "/model.safetensors"))
    assert said.startswith("/ddd")
    assert "d/model.safetensors: not read" in said


def test_what_fits_is_not_cut() -> None:
    said = InputError("not read", field="f", value="v", allowed="a" * 640, fix="x" * 320)
    assert str(said) == f"f: not read (got 'v'; must be {'a' * 640}); {'x' * 320}"
    assert (said.problem, said.field, said.value, said.fix) == ("not read", "f", "v", "x" * 320)


def test_a_message_is_one_line_without_control_characters() -> None:
    said = str(InputError("no\nError: forged\x1b[2J", field="a\u202eb", allowed="\u2028", fix="c\rd"))
    assert said == r"a\u202eb: no\nError: forged\x1b[2J (must be \u2028); c\rd"


def test_the_grammar_of_a_message() -> None:
    assert (
        str(InputError(field="n", value=0, allowed="at least 1", fix="try 2")) == "n: must be at least 1, got 0; try 2"
    )
    assert str(InputError("too long", field="s", value="ab")) == "s: too long (got 'ab')"
    assert str(InputError(field="n", allowed=one_of((1, 2, 4)))) == "n: must be 1, 2 or 4"
    assert str(InputError("missing", fix="give one")) == "missing; give one"
    assert (one_of(["a"]), one_of([])) == ("a", "")


@pytest.mark.parametrize("value", ["\x1b]0;title\x07", b"\x9b2J", ["\u2066"], {"\n": 1}])
def test_a_value_is_shown_as_python_writes_it(value: object) -> None:
    assert repr(value) in str(InputError("no", value=value))


def test_values_that_python_does_not_print() -> None:
    nested: list[object] = []
    for _ in range(sys.getrecursionlimit() + 10):
        nested = [nested]
    assert shorten(nested) == "list, too long to print"
    assert shorten(10**5000) == "int, too long to print"


def test_a_hint_for_a_huge_name_takes_no_time() -> None:
    assert near("lama-3-8b" + HUGE, ["llama-3-8b"]) == ""
    assert near("a" * 200 + HUGE, ["a" * 200]) == f"did you mean {'a' * 200!r}?"  # by what it begins with
    assert near("lama-3-8b", ["llama-3-8b"]) == "did you mean 'llama-3-8b'?"

"""What a terminal obeys is written out; what people write in any script is left as it is."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from asbuilt.shown import cut, line, number, prose, size, time

CONTROLS = [*range(0x20), *range(0x7F, 0xA0)]
HIDDEN = [
    0xAD,
    0x61C,
    0x180E,
    0x200B,
    0x200E,
    0x200F,
    *range(0x2028, 0x202F),
    *range(0x2060, 0x2070),
    0xFEFF,
    0xFFF9,
    0xFFFB,
    0xD800,
    0xDFFF,
    0xE0001,
    0xE0020,
    0xE007F,
]


@pytest.mark.parametrize("code", [*CONTROLS, *HIDDEN, 0x200C, 0x200D, 0x3164, 0xFE0F, 0xE0100])
def test_a_name_obeys_nothing_and_hides_nothing(code: int) -> None:
    shown = line(f"a{chr(code)}b")
    assert shown.isascii()
    assert shown.isprintable()
    assert shown[2:-1].lstrip("uxU").lstrip("0") in (f"{code:x}", *"ntr", "")
    assert (shown[0], shown[1], shown[-1]) == ("a", "\\", "b")


@pytest.mark.parametrize("code", [code for code in [*CONTROLS, *HIDDEN] if code not in (9, 10)])
def test_generated_text_obeys_nothing(code: int) -> None:
    assert prose(f"a{chr(code)}b") == line(f"a{chr(code)}b")


def test_every_character_that_is_kept_is_one_that_draws_or_is_blank() -> None:
    """Over all of Unicode: what `prose` keeps is of a category that no terminal obeys."""
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        category = unicodedata.category(character)
        if prose(character) == character:
            assert category not in ("Cc", "Cs", "Zl", "Zp") or character in "\n\t"
            assert category != "Cf" or unicodedata.name(character).startswith(("ARABIC", "SYRIAC", "KAITHI"))
        else:
            assert (
                category in ("Cc", "Cf", "Cs", "Zl", "Zp") or code == 0x2065 or code >> 12 == 0xE0 or code >> 4 == 0xFFF
            )


@pytest.mark.parametrize(
    "text", ["naïve Zürich", "日本語", "می\u200cخواهم", "👩\u200d👧", "क्\u200dष", "a\tb\nc", "\u00a0", "\ue0b0"]
)
def test_text_of_every_script_is_left(text: str) -> None:
    assert prose(text) == text


def test_joiners_that_join_nothing_are_shown() -> None:
    assert prose("a\u200db") == r"a\u200db"
    assert prose("\u200dé") == r"\u200dé"
    assert prose("é\u200d\u200dé") == "é\u200d\\u200dé"
    assert prose("\u200dé", before="é") == "\u200dé"


def test_escapes_are_those_of_python() -> None:
    assert line("\x00\x1b\n\t\r\x9b\u202e\U000e0001") == r"\x00\x1b\n\t\r\x9b\u202e\U000e0001"
    assert line("plain [red] name") == "plain [red] name"


def test_cut() -> None:
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdefg", 6) == "abcde…"
    assert cut("abcdefg", 6, 2) == "abc…fg"
    assert len(cut("x" * 5000)) == 1600


@pytest.mark.parametrize(
    ("value", "plain", "four"),
    [
        (0, "0", "0"),
        (8_030_261_248, "8,030,261,248", "8,030,261,248"),
        (-12345, "-12,345", "-12,345"),
        (13489.7, "13,489.7", "13,490"),
        (-13489.7, "-13,489.7", "-13,490"),
        (999.96, "1,000.0", "1,000"),
        (9999.6, "9,999.6", "10,000"),
        (12.345, "12.3", "12.35"),
        (10.0, "10.0", "10"),
        (9.996, "10", "9.996"),
        (1.0, "1", "1"),
        (0.0012345, "0.00123", "0.001234"),
        (0.0001, "0.0001", "0.0001"),
        (1e-5, "1e-5", "1e-5"),
        (1.25e-7, "1.25e-7", "1.25e-7"),
        (9.64e22, "9.64e22", "9.64e22"),
        (1e12, "1,000,000,000,000.0", "1,000,000,000,000"),
        (2.039e12, "2,039,000,000,000.0", "2,039,000,000,000"),
        (0.0, "0.0", "0"),
        (float("inf"), "inf", "inf"),
        (float("nan"), "nan", "nan"),
    ],
)
def test_numbers_have_no_exponent_where_one_can_count(value: float, plain: str, four: str) -> None:
    assert (number(value), number(value, 4)) == (plain, four)


def test_sizes_name_both_units() -> None:
    assert size(999) == "999 bytes"
    assert size(1000) == "1.00 kB (0.98 KiB)"
    assert size(10**6) == "1.00 MB (0.95 MiB)"
    assert size(10**9) == "1.00 GB (0.93 GiB)"
    assert size(8_030_261_248) == "8.03 GB (7.48 GiB)"
    assert size(-5e9) == "-5.00 GB (-4.66 GiB)"


def test_times() -> None:
    assert [time(t) for t in (1234.6, 1.0, 0.9996, 0.0204, 1e-3, 1.25e-4, 1e-6, 0)] == [
        "1,235 s",
        "1 s",
        "1,000 ms",
        "20.4 ms",
        "1 ms",
        "125 µs",
        "1 µs",
        "0 µs",
    ]

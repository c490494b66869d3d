"""Displaying untrusted text safely: control characters are escaped, never sent to the terminal.

A model's names, messages and generated tokens are whatever its author chose. Sent raw to a terminal they could set its
title, clear it, reverse the text direction, or forge a line of asbuilt's output.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence

# Printable according to Python, but invisible: fillers, a joiner and selectors that could disguise a name.
UNSEEN = {
    *map(chr, (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0)),
    *map(chr, range(0xFE00, 0xFE10)),
    *map(chr, range(0xE0100, 0xE01F0)),
}
JOINERS = ("\u200c", "\u200d")
# Of category Cf and visible all the same: signs before Arabic, Syriac and Kaithi numbers.
PREPENDED = {*map(chr, range(0x0600, 0x0606)), *map(chr, (0x06DD, 0x070F, 0x0890, 0x0891, 0x08E2, 0x110BD, 0x110CD))}
IGNORED = re.compile("[\u2065\ufff0-\ufff8\U000e0000-\U000e0fff]")  # unassigned, and never displayed
SCREEN = 1600  # characters that fit on a screen


def line(text: str) -> str:
    """Returns the text as one line, with control, direction and invisible characters escaped, newlines and tabs too."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() and c not in UNSEEN else escape(c) for c in text)


def prose(text: str, before: str = "") -> str:
    """Returns text for a terminal: newlines and tabs stay, every other control character is escaped.

    A joiner stays between two non-ASCII letters or emoji; `before` is the text to the left.
    """
    if text.isprintable():
        return text
    shown, left = [], before[-1:]
    for character in text:
        kept = _stays(character, left)
        shown.append(character if kept else escape(character))
        left = character if kept else ""
    return "".join(shown)


def _stays(character: str, left: str) -> bool:
    if character.isprintable() or character in "\n\t" or character in PREPENDED:
        return True
    if character in JOINERS:
        return left > "\x7f" and left.isprintable()
    return unicodedata.category(character) in ("Zs", "Co", "Cn") and not IGNORED.fullmatch(character)


def escape(character: str) -> str:
    """Returns the character's escape sequence, as in a Python string literal."""
    code = ord(character)
    named = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}.get(character)
    return named or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def cut(text: str, limit: int = SCREEN, end: int = 0) -> str:
    """Returns the text, shortened to `limit` characters if longer: its beginning, an ellipsis and the last `end`."""
    return text if len(text) <= limit else text[: limit - 1 - end] + "…" + text[len(text) - end :]


def number(value: int | float, digits: int | None = None) -> str:
    """Returns a number with thousands separators, 8,030,261,248, and an exponent only where it is very large or small.

    A float has `digits` significant digits without trailing zeros: 13,490, 0.00123, 9.64e22. By default it has one
    decimal place, and three significant digits below 10.
    """
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value) or value == 0:
        return f"{value:.1f}" if digits is None else f"{value:g}"
    size = abs(value)
    if not 1e-4 <= size < 1e15:
        mantissa, exponent = f"{value:.{(digits or 3) - 1}e}".split("e")
        return f"{_trimmed(mantissa)}e{int(exponent)}"
    if digits is None and size >= 10:
        return f"{value:,.1f}"
    rounded = float(f"{value:.{digits or 3}g}")  # 999.96 rounds up to one more integer digit
    after = max(0, (digits or 3) - 1 - math.floor(math.log10(abs(rounded))))
    return _trimmed(f"{value:,.{after}f}")


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def size(nbytes: int | float) -> str:
    """Returns bytes in both decimal and binary units, since GB and GiB differ by 7%.

    Negative for a shortfall.
    """
    for power, (decimal, binary) in ((3, ("GB", "GiB")), (2, ("MB", "MiB")), (1, ("kB", "KiB"))):
        if abs(nbytes) >= 1000**power:
            return f"{nbytes / 1000**power:,.2f} {decimal} ({nbytes / 1024**power:,.2f} {binary})"
    return f"{nbytes:,} bytes"


def time(seconds: float) -> str:
    """Returns seconds, milliseconds or microseconds with three significant digits."""
    for least, factor, unit in ((1, 1, "s"), (1e-3, 1e3, "ms")):
        if seconds >= least:
            return f"{number(float(seconds * factor), 3)} {unit}"
    return f"{number(float(seconds * 1e6), 3)} µs"


def shape(numbers: Sequence[int] | None) -> str:
    """Returns a shape as "4096 x 14336"."""
    return "" if numbers is None else " x ".join(map(str, numbers))


def ranges(numbers: Sequence[int]) -> str:
    """Returns "0-2, 5" for 0, 1, 2, 5."""
    said: list[list[int]] = []
    for i in numbers:
        if said and said[-1][1] == i - 1:
            said[-1][1] = i
        else:
            said.append([i, i])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in said)


def defaults_line(defaults: Mapping[str, int | bool]) -> str:
    """Returns the line that lists the sizes missing from config.json, which are defaults of transformers' class."""
    said = ", ".join(f"{key} {json.dumps(value)}" for key, value in defaults.items())
    return f"Not in config.json, taken from the class's defaults: {said}"

"""How text from anywhere is shown to a person: a stranger's control characters are written out, never obeyed.

A model's names, messages and generated tokens are whatever its author put there. Sent raw to a terminal they set its
title, clear it, turn lines around, or forge a line of ours.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence

# What Python calls printable and nobody sees: fillers, a joiner and selectors that hide what a name is.
UNSEEN = {
    *map(chr, (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0)),
    *map(chr, range(0xFE00, 0xFE10)),
    *map(chr, range(0xE0100, 0xE01F0)),
}
JOINERS = ("\u200c", "\u200d")
# Of category Cf and seen all the same: signs that go before Arabic, Syriac and Kaithi numbers.
PREPENDED = {*map(chr, range(0x0600, 0x0606)), *map(chr, (0x06DD, 0x070F, 0x0890, 0x0891, 0x08E2, 0x110BD, 0x110CD))}
IGNORED = re.compile("[\u2065\ufff0-\ufff8\U000e0000-\U000e0fff]")  # without a meaning yet, and never to be drawn
SCREEN = 1600  # characters that a person can read at once


def line(text: str) -> str:
    """Returns one line: control, direction and invisible characters as escapes, newlines and tabs too."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() and c not in UNSEEN else escape(c) for c in text)


def prose(text: str, before: str = "") -> str:
    """Returns text for a terminal as it is, newlines and tabs in it, but every other control character as an escape.

    A joiner stays where it joins two letters that are not Latin, or pictures; `before` is what stands to its left.
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
    """Returns what a Python string literal would have for the character."""
    code = ord(character)
    named = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}.get(character)
    return named or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def cut(text: str, limit: int = SCREEN, end: int = 0) -> str:
    """Returns the text, of one longer than `limit` characters what it begins with and the last `end`."""
    return text if len(text) <= limit else text[: limit - 1 - end] + "…" + text[len(text) - end :]


def number(value: int | float, digits: int | None = None) -> str:
    """Returns a number with its thousands apart, 8,030,261,248, and an exponent only where nobody would count zeros.

    With `digits`, so many significant ones of what is no whole number, no zeros at its end: 13,490, 0.00123, 9.64e22.
    Without, one after the point, and three significant ones below 10.
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
    rounded = float(f"{value:.{digits or 3}g}")  # 999.96 has a digit less after the point than it seems
    after = max(0, (digits or 3) - 1 - math.floor(math.log10(abs(rounded))))
    return _trimmed(f"{value:,.{after}f}")


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def size(nbytes: int | float) -> str:
    """Returns bytes in units of 1000 and of 1024, both named, since in GB and GiB the two differ by 7%.

    Negative where something is lacking.
    """
    for power, (decimal, binary) in ((3, ("GB", "GiB")), (2, ("MB", "MiB")), (1, ("kB", "KiB"))):
        if abs(nbytes) >= 1000**power:
            return f"{nbytes / 1000**power:,.2f} {decimal} ({nbytes / 1024**power:,.2f} {binary})"
    return f"{nbytes:,} bytes"


def time(seconds: float) -> str:
    """Returns seconds, milliseconds or microseconds with three digits."""
    for least, factor, unit in ((1, 1, "s"), (1e-3, 1e3, "ms")):
        if seconds >= least:
            return f"{number(float(seconds * factor), 3)} {unit}"
    return f"{number(float(seconds * 1e6), 3)} µs"


def shape(numbers: Sequence[int] | None) -> str:
    """Returns 4096 x 14336."""
    return "" if numbers is None else " x ".join(map(str, numbers))


def ranges(numbers: Sequence[int]) -> str:
    """Returns 0-2, 5 for 0, 1, 2, 5."""
    said: list[list[int]] = []
    for i in numbers:
        if said and said[-1][1] == i - 1:
            said[-1][1] = i
        else:
            said.append([i, i])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in said)


def defaults_line(defaults: Mapping[str, int | bool]) -> str:
    """Returns the line that says which sizes stand in no config, and are those of transformers' class."""
    said = ", ".join(f"{key} {json.dumps(value)}" for key, value in defaults.items())
    return f"Not in config.json, taken from the class's defaults: {said}"

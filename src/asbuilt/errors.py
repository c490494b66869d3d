"""The exception for invalid input: it names what is wrong and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from asbuilt.shown import cut, line

# The maximum length of each piece, in characters: a whole message fits on a screen whatever an untrusted file contains.
PROBLEM, FIELD, VALUE, ALLOWED, FIX = 560, 320, 80, 640, 320
NAME = 200  # characters of a misspelt name that are compared with the known names


class InputError(Exception):
    """Input that asbuilt refuses, as a one-line message: the field, the problem, the value, what it must be, the fix.

    `FIELD: PROBLEM (got VALUE; must be ALLOWED); FIX`, or `FIELD: must be ALLOWED, got VALUE; FIX` where there is
    nothing to add to that. `allowed` therefore completes "must be", and `fix` is an imperative or a short clause.
    The command line prints the message and exits with code 2; any other exception that escapes is a bug in asbuilt.
    """

    def __init__(
        self, problem: str = "", *, field: str = "", value: object = None, allowed: str = "", fix: str = ""
    ) -> None:
        self.problem, self.field, self.value, self.allowed, self.fix = problem, field, value, allowed, fix
        got = "" if value is None else f"got {shorten(value)}"
        must = allowed and f"must be {cut(allowed, ALLOWED)}"
        if problem:
            details = "; ".join(filter(None, (got, must)))
            message = cut(problem, PROBLEM) + (f" ({details})" if details else "")
        else:
            message = ", ".join(filter(None, (must, got)))
        where = f"{cut(field, FIELD, FIELD // 2)}: " if field else ""
        then = f"; {cut(fix, FIX)}" if fix else ""
        super().__init__(line(where + message + then))


def shorten(value: object, limit: int = VALUE) -> str:
    """Returns `repr(value)` cut to `limit` characters, since an untrusted value may be megabytes long."""
    try:
        text = repr(value[:limit] if isinstance(value, str | bytes | bytearray) else value)
    except (ValueError, RecursionError):  # an integer with more digits than Python prints, or deep nesting
        text = f"{type(value).__name__}, too long to print"
    return cut(text, limit)


def near(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Returns a hint such as "did you mean 'llama-3-8b'?", or an empty string where nothing is similar enough."""
    close = difflib.get_close_matches(name[:NAME].lower(), list(known), n=3, cutoff=cutoff)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""


def one_of(values: Iterable[object]) -> str:
    """Returns "a, b or c", as `allowed` of a choice."""
    *others, last = [*map(str, values)] or [""]
    return f"{', '.join(others)} or {last}" if others else last

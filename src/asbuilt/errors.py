"""The one exception that a person's own input can raise: it names what was wrong and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from asbuilt.shown import cut, line

# Characters of each piece of a message, which together fit on a screen whatever a stranger's file is called or holds.
PROBLEM, FIELD, VALUE, ALLOWED, FIX = 560, 320, 80, 640, 320
NAME = 200  # of a name whose like is looked for


class InputError(Exception):
    """Input that asbuilt refuses: field, value, what is allowed and what to do, in one message of one line.

    The command line prints it and exits with code 2; everything else that escapes is a fault of ours.
    """

    def __init__(
        self, problem: str, *, field: str = "", value: object = None, allowed: str = "", fix: str = ""
    ) -> None:
        self.problem, self.field, self.value, self.allowed, self.fix = problem, field, value, allowed, fix
        said = cut(problem, PROBLEM)
        if field:
            said = f"{cut(field, FIELD, FIELD // 2)}: {said}"
        if value is not None:
            said += f" (got {shorten(value)})"
        if allowed:
            said += f"; allowed: {cut(allowed, ALLOWED)}"
        if fix:
            said += f"; {cut(fix, FIX)}"
        super().__init__(line(said))


def shorten(value: object, limit: int = VALUE) -> str:
    """Returns `repr(value)` cut to `limit` characters, since the value may be a stranger's megabyte."""
    try:
        text = repr(value[:limit] if isinstance(value, str | bytes | bytearray) else value)
    except (ValueError, RecursionError):  # a number of more digits than Python prints, lists within lists
        text = f"{type(value).__name__}, too long to print"
    return cut(text, limit)


def near(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Returns a hint such as "did you mean 'llama-3-8b'?", or an empty string where nothing is as near as `cutoff`."""
    close = difflib.get_close_matches(name[:NAME].lower(), list(known), n=3, cutoff=cutoff)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""

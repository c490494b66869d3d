"""How commands print: one JSON document, or tables, drawn with rich on a terminal and as plain text when piped.

Output contains untrusted names, so each line is escaped (`shown.line`). On a terminal a table shows the columns that
fit: numbers are never wrapped, and omitted columns are named.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Sequence

from asbuilt.cli.streams import draw
from asbuilt.files import json_text
from asbuilt.shown import line, number, ranges, shape, size
from asbuilt.tables import Cell, Column, cells_of, measured, plain

__all__ = ["count", "print_json", "ranges", "say", "shape", "size", "table", "warn", "write"]

count = number
# What json leaves unescaped but a terminal may interpret: DEL, C1, directions, separators, joiners, surrogates.
BEYOND, OBEYED = re.compile("[\x7f-\U0010ffff]"), ("Cc", "Cf", "Cs", "Zl", "Zp")
GAP = 2  # between columns: rich adds a space to the right of each, and its box another between them


def print_json(document: object) -> None:
    """Prints one JSON document and nothing else; NaN and infinities become null, since JSON cannot spell them."""
    plain = not (sys.stdout.encoding or "").lower().startswith("utf")
    print(BEYOND.sub(_harmless, json_text(document, plain=plain)))


def _harmless(found: re.Match[str]) -> str:
    character = found[0]
    return json.dumps(character)[1:-1] if unicodedata.category(character) in OBEYED else character


def say(text: str = "") -> None:
    """Prints one line on stdout, wrapped at words on a narrower terminal."""
    shown = line(text)
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else len(shown)
    if cells_of(shown) > room:
        begun = " " * (len(shown) - len(shown.lstrip()) + GAP)
        shown = textwrap.fill(shown, room, subsequent_indent=begun, break_long_words=False, break_on_hyphens=False)
    print(shown)


def warn(text: str) -> None:
    """Prints one line on stderr."""
    print(line(text), file=sys.stderr)


def write(text: str) -> None:
    """Writes generated text immediately: raw to a pipe, with control characters escaped on a terminal."""
    sys.stdout.write(text)
    sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, drop: Sequence[str] = ()) -> None:
    """Prints a table; columns of numbers are right-aligned.

    On a terminal that is too narrow, columns are omitted: those of `drop` in order, then from the right, but never the
    first.
    """
    made = [measured(name, [row[i] for row in rows]) for i, name in enumerate(columns)]
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns
        kept, left_out = fitting(made, drop, room)
        _draw(line(title), kept, widths(kept, room), left_out, room)
    else:
        print(plain(title, made))


def fitting(columns: list[Column], drop: Sequence[str], room: int) -> tuple[list[Column], list[str]]:
    """Returns the columns that fit, in order, and the names of the others."""
    first = [column for name in drop for column in columns if column.name == name]
    order = [*first, *(column for column in reversed(columns[1:]) if column.name not in drop)]
    left_out: list[Column] = []
    for column in order:
        kept = [other for other in columns if other not in left_out]
        if len(kept) <= 2 or _needed(kept) <= room:
            break
        left_out.append(column)
    return [column for column in columns if column not in left_out], [column.name for column in left_out]


def _needed(columns: Sequence[Column]) -> int:
    return sum(column.least for column in columns) + GAP * (len(columns) - 1)


def widths(columns: Sequence[Column], room: int) -> list[int]:
    """Returns the width of each column: spare width goes where it saves the most lines.

    If not even two columns fit, text is wrapped anywhere, but figures never are.
    """
    given = [column.least for column in columns]
    free = room - _needed(columns)
    while free > 0 and (wanting := [i for i, column in enumerate(columns) if given[i] < column.widest]):
        neediest = max(wanting, key=lambda i: columns[i].widest / given[i])
        given[neediest] += 1
        free -= 1
    while free < 0 and (words := [i for i, column in enumerate(columns) if not column.right and given[i] > 1]):
        given[max(words, key=given.__getitem__)] -= 1
        free += 1
    return given


def _draw(title: str, columns: Sequence[Column], given: Sequence[int], left_out: Sequence[str], room: int) -> None:
    """Draws with rich, without interpreting markup or emoji names such as `:smile:`."""
    from io import StringIO

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column, width in zip(columns, given, strict=True):
        drawn.add_column(Text(column.name), justify="right" if column.right else "left", overflow="fold", width=width)
    for row in zip(*(column.cells for column in columns), strict=True):
        drawn.add_row(*map(Text, row))
    console = Console(file=StringIO(), force_terminal=True, width=room, highlight=False, emoji=False, markup=False)
    console.print(Text(f"\n{title}", style="bold"))
    console.print(drawn)
    if left_out:
        said = f"no room for {', '.join(name or 'notes' for name in left_out)}: --json or a pipe shows all"
        console.print(Text(said, style="dim"))
    draw(sys.stdout, console.file.getvalue())  # type: ignore[attr-defined]

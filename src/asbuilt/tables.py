"""Tables as plain text, Markdown and HTML; `cli.output` draws them on a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asbuilt.shown import line, number

Cell = str | int | float
FIGURE = re.compile(r"[+−-]?[0-9][0-9,]*(\.[0-9]+)?(e-?[0-9]+)?%?")  # what is right-aligned
EMPTY = ("", "-")
SHORT = 28  # characters of text that is never wrapped
NARROW = 20  # the least width to which longer text is wrapped


@dataclass(frozen=True)
class Table:
    """A title, column names, rows, and the columns that a narrow terminal drops first."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    drop: tuple[str, ...] = ()

    def numeric(self, column: int) -> bool:
        """Returns whether a column has numbers in every row, and is therefore right-aligned."""
        return bool(self.rows) and all(not isinstance(row[column], str) for row in self.rows)


def shown(cell: Cell) -> str:
    """Returns a cell as one line of text."""
    return line(cell) if isinstance(cell, str) else number(cell)


def markdown(tables: Iterable[Table]) -> str:
    """Returns the tables as GitHub's Markdown."""
    return "\n\n".join(_markdown(table) for table in tables) + "\n"


def _markdown(table: Table) -> str:
    ends = ["---:" if table.numeric(i) else "---" for i in range(len(table.columns))]
    lines = [table.columns, ends, *([shown(cell) for cell in row] for row in table.rows)]
    rows = ["| " + " | ".join(line(cell).replace("|", "\\|") for cell in row) + " |" for row in lines]
    return f"### {line(table.title)}\n\n" + "\n".join(rows)


def escaped(text: str) -> str:
    """Returns text for HTML, on one line and without control characters."""
    import html  # slow to import, and only notebooks need it

    return html.escape(line(text))


def html(tables: Iterable[Table]) -> str:
    """Returns the tables as HTML; every text is escaped."""
    return "".join(_html(table) for table in tables)


def _html(table: Table) -> str:
    right = [table.numeric(i) for i in range(len(table.columns))]
    head = "".join(f"<th>{escaped(name)}</th>" for name in table.columns)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="text-align:{"right" if to_right else "left"}">{escaped(shown(cell))}</td>'
            for cell, to_right in zip(row, right, strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    caption = f"<caption>{escaped(table.title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """A column's name and texts; its width is `widest` unwrapped and `least` if wrapped at words."""

    name: str
    cells: tuple[str, ...]
    right: bool
    widest: int
    least: int


def measured(name: str, cells: Sequence[Cell]) -> Column:
    """Measures a column: headers wrap at words, and so does text that is not a name, figure or size."""
    texts = tuple(line(cell) if isinstance(cell, str) else number(cell) for cell in cells)
    widest = max(map(cells_of, [name, *texts]))
    words = [min(SHORT, cells_of(word)) for text in texts for word in text.split()]
    broken = max([NARROW, *words])
    text = max(map(cells_of, texts), default=0)
    right = any(map(FIGURE.fullmatch, texts)) and all(FIGURE.fullmatch(text) for text in texts if text not in EMPTY)
    least = max([text if right or text <= SHORT else broken, *map(cells_of, name.split())])
    return Column(name=line(name), cells=texts, right=right, widest=widest, least=least)


def cells_of(text: str) -> int:
    """Returns the width of the text in terminal cells: two for a wide character, none for a combining one."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(character) in ("W", "F") for character in text)
    return len(text) + wide - sum(unicodedata.category(character) in ("Mn", "Me") for character in text)


def joined(items: Iterable[str | Table]) -> str:
    """Returns lines and tables joined as plain text."""
    return "\n".join(text(item) if isinstance(item, Table) else line(item) for item in items)


def text(table: Table) -> str:
    """Returns the table as plain text, its columns aligned."""
    return plain(table.title, [measured(name, [row[i] for row in table.rows]) for i, name in enumerate(table.columns)])


def plain(title: str, columns: Sequence[Column]) -> str:
    """Returns a table of measured columns as plain text: a blank line, the title, the header, the rows."""
    lines = ["", line(title)]
    for i in range(-1, len(columns[0].cells) if columns else -1):
        cells = [(column.name if i < 0 else column.cells[i], column) for column in columns]
        padding = [" " * (column.widest - cells_of(text)) for text, column in cells]
        padded = [
            space + text if column.right else text + space for (text, column), space in zip(cells, padding, strict=True)
        ]
        lines.append("  " + "  ".join(padded).rstrip())
    return "\n".join(lines)

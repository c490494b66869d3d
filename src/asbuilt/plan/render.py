"""Tables of a plan as Markdown and as HTML; the command line prints them itself."""

from __future__ import annotations

import html as escaping
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asbuilt.shown import line, number

Cell = str | int | float


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns, the rows, and which columns a narrow screen does without first."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    drop: tuple[str, ...] = ()

    def numeric(self, column: int) -> bool:
        """Whether a column holds numbers in every row, and is set to the right."""
        return bool(self.rows) and all(not isinstance(row[column], str) for row in self.rows)


def shown(cell: Cell) -> str:
    """Returns a cell as text on one line."""
    return line(cell) if isinstance(cell, str) else number(cell)


def markdown(tables: Iterable[Table]) -> str:
    """Returns the tables as GitHub's Markdown."""
    return "\n\n".join(_markdown(table) for table in tables) + "\n"


def _markdown(table: Table) -> str:
    ends = ["---:" if table.numeric(i) else "---" for i in range(len(table.columns))]
    lines = [table.columns, ends, *([shown(cell) for cell in row] for row in table.rows)]
    rows = ["| " + " | ".join(line(cell).replace("|", "\\|") for cell in row) + " |" for row in lines]
    return f"### {line(table.title)}\n\n" + "\n".join(rows)


def html(tables: Iterable[Table]) -> str:
    """Returns the tables as HTML; every text is escaped."""
    return "".join(_html(table) for table in tables)


def _html(table: Table) -> str:
    right = [table.numeric(i) for i in range(len(table.columns))]
    head = "".join(f"<th>{escaping.escape(name)}</th>" for name in table.columns)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="text-align:{"right" if to_right else "left"}">{escaping.escape(shown(cell))}</td>'
            for cell, to_right in zip(row, right, strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    caption = f"<caption>{escaping.escape(table.title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

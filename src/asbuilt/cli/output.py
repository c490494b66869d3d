"""How commands print: one JSON document, or tables, drawn with rich on a terminal and plain where piped."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import click

Cell = str | int | float


def print_json(document: object) -> None:
    """Prints one JSON document and nothing else."""
    click.echo(json.dumps(document, indent=1, ensure_ascii=False))


def count(value: int | float) -> str:
    """Returns a number with its thousands apart, 8,030,261,248; what is no whole number with three digits at least."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if abs(value) >= 10 or not value else f"{value:.3g}"


def size(nbytes: int) -> str:
    """Returns bytes in units of 1000 and of 1024, both named, since in GB and GiB the two differ by 7%."""
    for power, (decimal, binary) in ((3, ("GB", "GiB")), (2, ("MB", "MiB")), (1, ("kB", "KiB"))):
        if nbytes >= 1000**power:
            return f"{nbytes / 1000**power:,.2f} {decimal} ({nbytes / 1024**power:,.2f} {binary})"
    return f"{nbytes} bytes"


def shape(numbers: Sequence[int] | None) -> str:
    """Returns 4096 x 14336."""
    return "" if numbers is None else " x ".join(map(str, numbers))


def ranges(numbers: Sequence[int]) -> str:
    """Returns 0-2, 5 for 0, 1, 2, 5."""
    said: list[list[int]] = []
    for number in numbers:
        if said and said[-1][1] == number - 1:
            said[-1][1] = number
        else:
            said.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in said)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Prints a table; columns that hold numbers in every row are set to the right."""
    texts = [[cell if isinstance(cell, str) else count(cell) for cell in row] for row in rows]
    right = [bool(rows) and all(not isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    if sys.stdout.isatty():
        _draw(title, columns, texts, right)
    else:
        _plain(title, columns, texts, right)


def _plain(title: str, columns: Sequence[str], texts: list[list[str]], right: list[bool]) -> None:
    widths = [max(map(len, [name, *(row[i] for row in texts)])) for i, name in enumerate(columns)]
    click.echo(f"\n{title}")
    for row in [list(columns), *texts]:
        cells = zip(row, widths, right, strict=True)
        padded = [text.rjust(width) if to_right else text.ljust(width) for text, width, to_right in cells]
        click.echo("  " + "  ".join(padded).rstrip())


def _draw(title: str, columns: Sequence[str], texts: list[list[str]], right: list[bool]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(box=SIMPLE_HEAD)
    for name, to_right in zip(columns, right, strict=True):
        drawn.add_column(name, justify="right" if to_right else "left", overflow="fold")
    for row in texts:
        drawn.add_row(*map(escape, row))
    console = Console()
    console.print(f"\n[bold]{escape(title)}[/bold]", highlight=False)
    console.print(drawn, highlight=False)

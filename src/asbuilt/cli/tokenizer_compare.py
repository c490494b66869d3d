"""`asbuilt tokenizer compare`: bytes per token by kind of text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from asbuilt.cli.output import count, print_json, say, table
from asbuilt.cli.tokenizer import tokenizer_of

if TYPE_CHECKING:
    from asbuilt.text.compare import Compared

LARGEST = 1 << 26  # bytes of a text


@click.command()
@click.argument("tokenizers", nargs=-1, required=True, metavar="TOKENIZER...")
@click.option("--text", metavar="[KIND=]FILE", multiple=True, help="Compare on this text instead of the samples.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def compare(tokenizers: tuple[str, ...], text: tuple[str, ...], as_json: bool) -> None:
    """Print how many bytes of text a token of each TOKENIZER holds, by kind of text: prose, code, digits, scripts.

    TOKENIZER is a tokenizer.json, a folder with one, a .gguf file, or a hub id. With several, the change is in the
    number of tokens, from the first. The samples are short: use --text for what your model will read.
    """
    from asbuilt.text.compare import SAMPLES
    from asbuilt.text.compare import compare as compared

    opened = [tokenizer_of(name) for name in tokenizers]
    rows = compared(opened, dict(map(_text, text)) or SAMPLES)
    vocabularies = [one.n_vocab for one in opened]
    if as_json:
        print_json({"tokenizers": _named(tokenizers, vocabularies), "rows": [_row(row) for row in rows]})
        return
    shown = _short(tokenizers)
    columns = ["text", "bytes", *shown, *(f"change {name}" for name in shown[1:])]
    cells = [
        (row.kind, row.bytes, *(f"{x:.2f}" for x in row.bytes_per_token), *map(_percent, row.change[1:]))
        for row in rows
    ]
    table("Bytes per token", columns, cells)
    for name, n_vocab in zip(shown, vocabularies, strict=True):
        say(f"{name}: {count(n_vocab)} tokens")


def _text(said: str) -> tuple[str, str]:
    from asbuilt.errors import InputError
    from asbuilt.files import read_text

    kind, equals, file = said.partition("=")
    if not equals or Path(said).exists():
        kind, file = Path(said).name, said
    if not kind:
        raise InputError(field="--text", value=said, allowed="KIND=FILE or FILE")
    return kind, read_text(Path(file), LARGEST, "--text")


def _percent(change: float) -> str:
    return f"{round(100 * change):+d}%"


def _short(names: tuple[str, ...]) -> list[str]:
    """Returns the last part of each path, or the whole where two would be the same."""
    last = [Path(name).parent.name if Path(name).name == "tokenizer.json" else Path(name).name for name in names]
    return [name if last.count(short) > 1 or not short else short for name, short in zip(names, last, strict=True)]


def _named(names: tuple[str, ...], vocabularies: list[int]) -> list[dict[str, object]]:
    return [{"name": name, "n_vocab": n_vocab} for name, n_vocab in zip(names, vocabularies, strict=True)]


def _row(row: Compared) -> dict[str, object]:
    return {
        "kind": row.kind,
        "bytes": row.bytes,
        "characters": row.characters,
        "tokens": list(row.tokens),
        "bytes_per_token": list(row.bytes_per_token),
        "change": list(row.change),
    }

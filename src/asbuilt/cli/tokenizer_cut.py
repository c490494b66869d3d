"""`asbuilt tokenizer cut`: the pre-tokens of a text, and the merges that encode each, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli.output import count, print_json, say, table
from asbuilt.cli.tokenizer import tokenizer_of

if TYPE_CHECKING:
    from asbuilt.text.cut import Cut

MOST_STEPS = 200  # rows that are printed; --json has all


@click.command()
@click.argument("text")
@click.option("--tokenizer", "name", metavar="TOKENIZER", help="A tokenizer.json, its folder, a .gguf file, a hub id.")
@click.option("--pattern", help="Only split: gpt2, cl100k, o200k or none.  [default: gpt2 without a TOKENIZER]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
def cut(text: str, name: str | None, pattern: str | None, as_json: bool) -> None:
    """Print how TEXT is cut: its pre-tokens, their bytes, and with --tokenizer the merges in the order they happen.

    At each step the adjacent pair of the lowest rank is merged, the leftmost of equals; pairs do not cross pre-tokens.
    """
    if name is not None and pattern is not None:
        raise click.UsageError("give --tokenizer or --pattern, not both")
    if name is None:
        _split(text, pattern or "gpt2", as_json)
        return
    from asbuilt.text.cut import cut as cut_

    tokenizer = tokenizer_of(name)
    made = cut_(tokenizer, text)
    shown = {token: _shown(tokenizer.spelled(token)) for one in made for token in _spelled(one)}
    if as_json:
        print_json({"text": text, "tokenizer": name, "pre_tokens": [_document(one, shown) for one in made]})
    else:
        _print(made, shown, text)


def _split(text: str, pattern: str, as_json: bool) -> None:
    from asbuilt.text.train import pre_tokens

    pieces = pre_tokens(text, pattern)
    if as_json:
        rows = [{"text": _shown(piece), "bytes": list(piece)} for piece in pieces]
        print_json({"text": text, "pattern": pattern, "pre_tokens": rows})
        return
    rows = [(i + 1, repr(_shown(piece)), piece.hex(" "), len(piece)) for i, piece in enumerate(pieces)]
    table(f"Pre-tokens of {pattern}", ("", "pre-token", "bytes", "number"), rows)


def _shown(piece: bytes) -> str:
    r"""Returns the text of bytes; those that are no text as \xNN."""
    return piece.decode(errors="backslashreplace")


def _spelled(one: Cut) -> set[str]:
    """Returns the tokens that a pre-token has at any step."""
    first = () if one.whole else tuple(one.piece)
    return {one.piece, *first, *one.tokens, *(token for step in one.steps for token in step.word)}


def _document(one: Cut, shown: dict[str, str]) -> dict[str, Any]:
    return {
        "text": shown[one.piece],
        "tokens": [shown[token] for token in one.tokens],
        "ids": list(one.ids),
        "steps": [
            {
                "rank": step.rank,
                "pair": [shown[token] for token in step.pair],
                "tokens": [shown[token] for token in step.word],
            }
            for step in one.steps
        ],
    }


def _print(made: list[Cut], shown: dict[str, str], text: str) -> None:
    rows = [
        (i + 1, repr(shown[one.piece]), _row(one.tokens, shown), " ".join(map(str, one.ids)), len(one.steps))
        for i, one in enumerate(made)
    ]
    table("Pre-tokens", ("", "pre-token", "tokens", "ids", "merges"), rows, drop=("merges", "ids"))
    steps = [(i + 1, step) for i, one in enumerate(made) for step in one.steps]
    if steps:
        cells = [
            (number, step.rank, _row(step.pair, shown), _row(step.word, shown)) for number, step in steps[:MOST_STEPS]
        ]
        table("Merges", ("pre-token", "rank", "pair", "becomes"), cells)
    if len(steps) > MOST_STEPS:
        say(f"{count(len(steps) - MOST_STEPS)} more merges: --json has all")
    tokens = sum(len(one.tokens) for one in made)
    say(f"{count(len(text.encode()))} bytes, {count(len(made))} pre-tokens, {count(tokens)} tokens")


def _row(tokens: tuple[str, ...], shown: dict[str, str]) -> str:
    return "|".join(shown[token] for token in tokens)

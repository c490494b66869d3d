"""`asbuilt tokenizer`: train, compare and take apart tokenizers; each command is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from asbuilt.text.tokenizer import Tokenizer

COMMANDS = ("train", "compare", "cut")


class Tokenizers(click.Group):
    """A group that imports `asbuilt.cli.tokenizer_NAME` only when that command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the commands in the order of `--help`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command, None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        return getattr(import_module(f"asbuilt.cli.tokenizer_{cmd_name}"), cmd_name)


@click.group(cls=Tokenizers)
def tokenizer() -> None:
    """Train tokenizers on your texts, compare them by kind of text, and see how one cuts a text."""


def tokenizer_of(name: str) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json, its folder, a GGUF file, or whatever else names a model."""
    from pathlib import Path

    from asbuilt.errors import InputError
    from asbuilt.text.tokenizer import TOKENIZER, Tokenizer

    path = Path(name)
    if path.name == TOKENIZER or (path / TOKENIZER).is_file():
        return Tokenizer.from_file(path)
    if name.endswith(".gguf"):
        from asbuilt.formats.gguf import read_header

        return Tokenizer.from_gguf(read_header(path))
    from asbuilt.checkpoint.source import open_model

    found = open_model(name).tokenizer()
    if found is None:
        raise InputError("has no tokenizer", field="TOKENIZER", value=name, allowed="a tokenizer.json or its folder")
    return found

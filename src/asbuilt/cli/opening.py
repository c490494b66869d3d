"""What all commands that open a model share: `--allow-unread KEY` and its warning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from asbuilt.cli.output import warn

if TYPE_CHECKING:
    from asbuilt.checkpoint.source import Source

C = TypeVar("C", bound=Callable[..., Any])


def allow_unread_option(command: C) -> C:
    """Adds `--allow-unread KEY`, which may be given several times, as `allow_unread`."""
    said = "Ignore a config key that the family does not know; rope_scaling.KEY for a nested one."
    return click.option("--allow-unread", metavar="KEY", multiple=True, help=said)(command)


def opened(model: str, allow_unread: Sequence[str], *, weights: bool = False) -> Source:
    """Returns the source as `open_model` does, and prints its notes and a warning about ignored keys on stderr."""
    from asbuilt.checkpoint.source import open_model

    source = open_model(model, weights=weights, allow_unread=allow_unread)
    _warn(allow_unread, source)
    return source


def opened_all(models: Sequence[str], allow_unread: Sequence[str], *, weights: bool = False) -> list[Source]:
    """Returns several sources; raises InputError for a key to be ignored that none of them has."""
    from asbuilt.errors import InputError

    used: set[str] = set()
    sources = [_with_needed(model, allow_unread, weights, used) for model in models]
    for key in allow_unread:
        if key not in used:
            raise InputError("none of the configs has such an unknown key", field="allow-unread", value=key)
    _warn(allow_unread, *sources)
    return sources


def _with_needed(model: str, allow_unread: Sequence[str], weights: bool, used: set[str]) -> Source:
    """Returns the source; adds the keys that were ignored to `used`."""
    from asbuilt.checkpoint.source import open_model
    from asbuilt.families import UnreadKeys

    needed: list[str] = []
    while True:
        try:
            return open_model(model, weights=weights, allow_unread=needed)
        except UnreadKeys as error:
            more = [key for key in allow_unread if key in error.keys and key not in needed]
            if not more:
                raise
            needed += more
            used.update(more)


def _warn(allow_unread: Sequence[str], *sources: Source) -> None:
    if allow_unread:
        said = ", ".join(allow_unread)
        warn(f"warning: ignored unread keys: {said}; their effect on the model is not taken into account")
    for source in sources:
        for key, note in source.reading.notes.items():
            warn(f"note: {source.name}: {key}: {note}")

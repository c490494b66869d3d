"""What was typed, as it was typed: the names and texts of options, before they are read."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

KEPT = "asbuilt.typed"


@dataclass(frozen=True, kw_only=True)
class Typed:
    """The words after the command, and the text of each option, by its name as it was typed.

    Options that may be given several times have a list of texts, switches have true.
    """

    words: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The words as a shell reads them."""
        return f"asked: {shlex.join(self.words)}"


class Echoing(click.Command):
    """A command that keeps what was typed; `typed(ctx)` returns it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the arguments, and keeps them if they are valid."""
        words = list(self.spread(args))
        options = tuple(words)  # click empties the list
        rest = super().parse_args(ctx, words)
        ctx.meta[KEPT] = Typed(words=tuple(args), options=_options(self.params, options))
        return rest

    def spread(self, args: Sequence[str]) -> Iterable[str]:
        """Returns the words that click reads: those that were typed, with what is left out of them."""
        return args


def typed(ctx: click.Context) -> Typed:
    """Returns what was typed after the command."""
    return ctx.meta[KEPT]


def command(ctx: click.Context, *, without: Collection[str] = (), more: Collection[str] = ()) -> str:
    """Returns the command line for a shell, arguments first, without the options of these names, with `more` words."""
    names = []
    at = ctx
    while at.parent is not None:
        names.append(at.info_name or "")
        at = at.parent
    kept = {name: text for name, text in typed(ctx).options.items() if name not in without}
    words = sorted(kept.items(), key=lambda one: one[0].startswith("-"))
    return shlex.join(["asbuilt", *reversed(names), *(word for one in words for word in _words(*one)), *more])


def _words(name: str, text: Any) -> Iterator[str]:  # noqa: ANN401
    for one in text if isinstance(text, list) else [text]:
        if name.startswith("-"):
            yield name
        if one is not True:
            yield one


def _options(params: Sequence[click.Parameter], words: Sequence[str]) -> dict[str, Any]:
    """Returns valid words by option, those of arguments under their metavar."""
    named = {name: p for p in params if isinstance(p, click.Option) for name in (*p.opts, *p.secondary_opts)}
    argument = next(p for p in params if isinstance(p, click.Argument))
    called = (argument.metavar or argument.human_readable_name).strip(".")
    found: dict[str, Any] = {}
    at = 0
    while at < len(words):
        name, equals, text = words[at].partition("=")
        at += 1
        if name == "--":  # what follows are arguments
            named = {}
        elif name not in named:
            _put(found, called, argument, words[at - 1])
        elif equals:
            _put(found, name, named[name], text)
        elif _bare(named[name], words[at : at + 1]):
            _put(found, name, named[name], True)
        else:
            _put(found, name, named[name], words[at])
            at += 1
    return found


def _bare(option: click.Option, following: Sequence[str]) -> bool:
    """Returns whether an option has no text: a switch, or one whose text may be left out, before another option."""
    optional = isinstance(option.flag_value, str | int)
    return option.is_flag or (optional and (not following or following[0].startswith("-")))


def _put(found: dict[str, Any], name: str, param: click.Parameter, value: str | bool) -> None:
    if getattr(param, "multiple", False) or param.nargs == -1:
        found.setdefault(name, []).append(value)
    else:
        found[name] = value

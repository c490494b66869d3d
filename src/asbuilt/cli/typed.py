"""A command as it was typed, made again from what click read of it."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator

import click


def command(ctx: click.Context, *, without: Collection[str] = (), more: Collection[str] = ()) -> str:
    """Returns the command line of `ctx` for a shell, without the parameters of these names, with `more` words."""
    names = []
    at = ctx
    while at.parent is not None:
        names.append(at.info_name or "")
        at = at.parent
    return shlex.join(["asbuilt", *reversed(names), *_words(ctx, without), *more])


def _words(ctx: click.Context, without: Collection[str]) -> Iterator[str]:
    given = click.core.ParameterSource.COMMANDLINE
    for param in sorted(ctx.command.params, key=lambda one: isinstance(one, click.Option)):
        value = ctx.params.get(param.name or "")
        if param.name in without or ctx.get_parameter_source(param.name or "") is not given:
            continue
        values = value if isinstance(value, tuple) else (value,)
        if isinstance(param, click.Argument):
            yield from map(str, values)
        elif isinstance(param, click.Option) and param.is_flag and isinstance(value, bool):
            yield _long(param.opts if value else param.secondary_opts)
        else:
            for each in values:
                yield from (_long(param.opts), str(each))


def _long(spellings: list[str]) -> str:
    return next(one for one in (*spellings, "") if one.startswith("--"))

"""`asbuilt diff`: where two checkpoints, or ours and what transformers makes of one, part on the same text."""

from __future__ import annotations

import math

import click
from click.core import ParameterSource

from asbuilt.cli.opening import allow_unread_option, opened_all
from asbuilt.cli.output import print_json, table, warn
from asbuilt.errors import InputError

TEXT = "An as-built drawing records what was really built."


@click.command()
@click.argument("first")
@click.argument("second", required=False)
@click.option("--transformers", is_flag=True, help="Let transformers run SECOND, or FIRST itself; a checkpoint folder.")
@click.option("--text", default=TEXT, show_default=True, help="What both read.")
@click.option(
    "--tolerance", default=1e-4, show_default=True, type=click.FloatRange(0), help="Relative difference allowed."
)
@allow_unread_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
@click.pass_context
def diff(
    ctx: click.Context,
    first: str,
    second: str | None,
    transformers: bool,
    text: str,
    tolerance: float,
    allow_unread: tuple[str, ...],
    as_json: bool,
) -> None:
    """Runs the checkpoints FIRST and SECOND on one text, and names the first path whose activations differ.

    Both are run in float32, with the same token ids. Exit code 1 where they differ by more than the tolerance.
    """
    if second is None and not transformers:
        raise InputError("missing", field="SECOND", fix="give another checkpoint, or --transformers")
    if math.isnan(tolerance):
        raise InputError("not a number", field="tolerance", value=tolerance, allowed="a number from 0")
    one, other = opened_all((first, second or first), allow_unread, weights=True)
    from asbuilt.api import diff as compared

    given = ctx.get_parameter_source("text") is not ParameterSource.DEFAULT
    found = compared.diff(one, other, transformers=transformers, text=text if given else None, tolerance=tolerance)
    if as_json:
        print_json(found.document())
    else:
        made = found.table()
        table(made.title, made.columns, made.rows)
        warn(found.note)
    ctx.exit(0 if found.same else 1)

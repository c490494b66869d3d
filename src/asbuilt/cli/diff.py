"""`asbuilt diff`: where two checkpoints, or asbuilt and transformers on one checkpoint, first diverge."""

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
@click.option(
    "--transformers", is_flag=True, help="Run SECOND (or FIRST, if alone), a checkpoint folder, with transformers."
)
@click.option("--text", default=TEXT, show_default=True, help="The text that both read.")
@click.option(
    "--tolerance",
    default=1e-4,
    show_default=True,
    type=click.FloatRange(0),
    help="Largest relative difference that counts as equal.",
)
@allow_unread_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
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
    """Run the checkpoints FIRST and SECOND on the same text, and name the first path whose activations differ.

    Both run in float32 on the same token ids. The exit code is 1 if they differ by more than the tolerance.
    """
    if second is None and not transformers:
        raise InputError("missing", field="SECOND", fix="give a second checkpoint, or --transformers")
    if math.isnan(tolerance):
        raise InputError(field="tolerance", value=tolerance, allowed="a number of at least 0")
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

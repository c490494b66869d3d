"""`asbuilt describe`: a model's structure and costs, from its description alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli import html as web
from asbuilt.cli.echo import Echoing
from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import print_json, say, table, warn
from asbuilt.cli.types import LARGEST, Tokens

if TYPE_CHECKING:
    from asbuilt.spec import Model


@click.command(cls=Echoing)
@click.argument("model")
@click.option("--seq", type=Tokens(), help="Tokens per sequence; by default 1024, or the context length if shorter.")
@click.option("--batch", type=click.IntRange(1, LARGEST), default=1, show_default=True, help="Number of sequences.")
@click.option(
    "--images", type=click.IntRange(0, LARGEST), default=0, show_default=True, help="Images, or sounds, per sequence."
)
@click.option(
    "--sounds",
    type=click.IntRange(0, LARGEST),
    default=0,
    show_default=True,
    help="Sounds per sequence of a model that reads images too, each of full length.",
)
@click.option(
    "--dtype", default="bf16", show_default=True, help="Dtype of weights and activations; also q4_k, q4_k_m, q8_0 ..."
)
@click.option(
    "--kv-dtype",
    help="Format of the cache: bf16, fp8, int8:head ...; by default --dtype if a float of 16 bits or more, else bf16.",
)
@allow_unread_option
@web.html_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@click.pass_context
def describe(
    ctx: click.Context,
    model: str,
    seq: int | None,
    batch: int,
    images: int,
    sounds: int,
    dtype: str,
    kv_dtype: str | None,
    allow_unread: tuple[str, ...],
    html: str | None,
    as_json: bool,
) -> None:
    """Describe MODEL and its costs: parameters, FLOPs, bytes, cache, shapes. Nothing is run."""
    from asbuilt import description

    web.check(html)
    source = opened(model, allow_unread)
    _warn_of_length(source.spec, seq)
    asked = {"seq": seq, "batch": batch, "images": images, "sounds": sounds}
    made = description.describe(source, **asked, dtype=dtype, kv_dtype=kv_dtype or None)  # type: ignore[arg-type]
    if as_json:
        print_json(made.document())
    else:
        _print(made.document())
    if html is not None:
        web.save(html, ctx, [web.case(source.name, {"describe": web.printed(ctx, made.document())})])


def _warn_of_length(spec: Model, seq: int | None) -> None:
    context = spec.max_positions
    if "tokens" not in spec.reads:
        if seq not in (None, context):
            warn(f"warning: --seq is ignored: an image has {context} tokens")
    elif seq is not None and seq > context:
        warn(f"warning: --seq {seq} exceeds the context length of {context} tokens")


def _print(document: dict[str, Any]) -> None:
    from asbuilt.description.tables import printed

    for item in printed(document):
        if isinstance(item, str):
            say(item)
        else:
            table(item.title, item.columns, item.rows, drop=item.drop)

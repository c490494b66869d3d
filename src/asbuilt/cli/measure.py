"""`asbuilt measure`: a model's predicted figures beside those measured on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from asbuilt.cli import html as web
from asbuilt.cli.echo import Echoing
from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import print_json, say, table, warn
from asbuilt.cli.running import threads_option
from asbuilt.cli.types import Tokens
from asbuilt.dtypes import CALIBRATED

if TYPE_CHECKING:
    from asbuilt.measure import Report


@click.command(cls=Echoing)
@click.argument("model")
@click.option(
    "--dtype",
    type=click.Choice(("auto", *CALIBRATED)),
    default="auto",
    show_default=True,
    help="Dtype to run in. auto: bf16 where weights are stored so and fp32 is not faster here, else fp32.",
)
@click.option("--refresh", is_flag=True, help="Recalibrate this machine instead of using the cached calibration.")
@threads_option
@click.option(
    "--kv-dtype",
    help="Measure the cache in this format too, and the loss with it: bf16, fp8, int8:head, fp8:head, int4:head ...",
)
@click.option("--text", metavar="FILE", help="Measure that loss on this text; by default on one that MODEL samples.")
@click.option("--tokens", type=Tokens(least=2), default=8192, show_default=True, help="At most so many of the text.")
@click.option(
    "--packed/--expanded",
    default=None,
    help="Keep the weights of a GGUF file or MXFP4 checkpoint packed, or expand them; by default as `generate` does.",
)
@click.option("--training", is_flag=True, help="Measure what training takes instead, beside what `plan train` says.")
@click.option("--batch", type=Tokens(), help="Sequences of a micro-batch, with --training; by default 4.")
@click.option("--seq", type=Tokens(), help="Tokens of a sequence, with --training; by default 128, or the context.")
@allow_unread_option
@web.html_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@click.pass_context
def measure(
    ctx: click.Context,
    model: str,
    dtype: str,
    refresh: bool,
    threads: int | None,
    kv_dtype: str | None,
    text: str | None,
    tokens: int,
    packed: bool | None,
    training: bool,
    batch: int | None,
    seq: int | None,
    allow_unread: tuple[str, ...],
    html: str | None,
    as_json: bool,
) -> None:
    """Predict MODEL's figures from its description, run it, and print both.

    A description without weights is run with random ones, since no figure depends on their values. Speeds are those
    with the native kernels where they are there; --expanded adds what a training step saves. With --training it
    trains a model of random weights instead: state, saved bytes, peak memory, FLOPs and speed without, with selective
    and with full activation checkpointing, in float32. The exit code is 1
    if any figure other than a speed misses its tolerance.
    """
    web.check(html)
    source = opened(model, allow_unread, weights=not training)
    from asbuilt.api.measure import measure as measured
    from asbuilt.api.running import use_threads

    use_threads(threads, "--threads")
    asked = {"kv_dtype": kv_dtype or None, "text": text, "tokens": tokens, "packed": packed, "training": training}
    asked |= {"batch": batch, "seq": seq}
    report = measured(source, dtype=dtype, refresh=refresh, **asked, say=_say, warn=_warn)  # type: ignore[arg-type]
    if as_json:
        print_json(report.document())
    else:
        _print(report)
    if html is not None:
        documents = {"measure": web.printed(ctx, report.document())}
        documents["describe"] = web.described(model, source, allow_unread)
        web.save(html, ctx, [web.case(report.title, documents)])
    ctx.exit(0 if report.ok else 1)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        warn(f"{text} ...")


def _warn(text: str) -> None:
    warn(f"warning: {text}")


def _print(report: Report) -> None:
    say(report.title)
    made = report.table()
    table(made.title, made.columns, made.rows)
    for told in report.beside:
        say(told)

"""`asbuilt measure`: what was predicted of a model beside what is measured of it on this machine."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import print_json, say, size, table, warn
from asbuilt.errors import InputError

if TYPE_CHECKING:
    from asbuilt.checkpoint.source import Source
    from asbuilt.measure import Report, Row
    from asbuilt.nn.modules import Model

DTYPES = ("fp32", "bf16")  # those that the machine is calibrated for
TOKENS = 512


@click.command()
@click.argument("model")
@click.option("--dtype", type=click.Choice(DTYPES), help="To run in; as stored where that is one of these, else fp32.")
@click.option("--refresh", is_flag=True, help="Calibrate this machine anew instead of using what is cached.")
@allow_unread_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
@click.pass_context
def measure(
    ctx: click.Context, model: str, dtype: str | None, refresh: bool, allow_unread: tuple[str, ...], as_json: bool
) -> None:
    """Predicts MODEL's figures from its description, runs it, and prints both.

    A description without weights is run with random ones: no figure depends on them. Exit code 1 where a figure that is
    no speed misses its tolerance.
    """
    source = opened(model, allow_unread, weights=True)
    if not source.spec.decodes or source.spec.language_head is None:
        raise InputError(
            "only models that predict the next token are measured",
            field="MODEL",
            value=source.name,
            fix="`asbuilt describe` says what it costs",
        )
    chosen = dtype or ("bf16" if source.reading.dtype == "bfloat16" else "fp32")
    _require_room(source, chosen)
    from asbuilt import measure as measuring

    report = measuring.measure(_built(source, chosen), name=source.name, refresh=refresh, say=_say, warn=_warn)
    if as_json:
        print_json(_document(report))
    else:
        _print(report)
    ctx.exit(0 if report.ok else 1)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        warn(f"{text} ...")


def _warn(text: str) -> None:
    warn(f"warning: {text}")


def _require_room(source: Source, dtype: str) -> None:
    """Raises InputError where the weights and one training step are more than this machine's memory."""
    from asbuilt import cost, memory
    from asbuilt.spec import Pass

    run = Pass(tokens=min(TOKENS, source.spec.max_positions), width=int(cost.dtype(dtype).block_bytes))
    kept = cost.saved(source.spec, run)
    needed = cost.weight_bytes(source.spec, dtype) + kept.all + kept.loss
    have = memory.total()
    if have is not None and needed > have:
        raise InputError(
            "too large to be run on this machine",
            field="MODEL",
            value=source.name,
            allowed=f"{size(have)} of memory, and it needs {size(needed)}",
            fix="`asbuilt describe` runs nothing",
        )


def _built(source: Source, dtype: str) -> Model:
    import torch

    from asbuilt.checkpoint.load import load
    from asbuilt.dtypes import TORCH_NAMES
    from asbuilt.nn import build

    wanted: torch.dtype = getattr(torch, TORCH_NAMES[dtype])
    if source.has_weights or source.kind == "folder":
        return load(source, wanted)
    return build(source.spec, dtype=wanted).eval()


def _document(report: Report) -> dict[str, Any]:
    return {
        "model": report.model,
        "dtype": report.dtype,
        "machine": asdict(report.machine),
        "rows": [_row(row) for row in report.rows],
        "notes": list(report.notes),
        "ok": report.ok,
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "figure": row.figure,
        "unit": row.unit,
        "predicted": row.predicted,
        "measured": row.measured,
        "error": row.error,
        "tolerance": row.tolerance,
        "ok": row.ok,
    }


def _print(report: Report) -> None:
    machine = report.machine.machine
    say(f"{report.model} in {report.dtype} on {machine['processor']}, {machine['threads']} threads")
    columns = ("figure", "unit", "predicted", "measured", "difference", "")
    rows = [(r.figure, r.unit, r.predicted, r.measured, _difference(r), _verdict(r)) for r in report.rows]
    table("Predicted and measured", columns, rows)
    for note in report.notes:
        say(f"note: {note}")


def _difference(row: Row) -> str:
    return "0" if row.predicted == row.measured else f"{row.error:+.2%}"


def _verdict(row: Row) -> str:
    """Says whether the figure is within its tolerance, and plainly where it is not."""
    if not row.tolerance:
        return "exact" if row.ok else "MISSED: should be exact"
    return f"within {row.tolerance:.0%}" if row.ok else f"MISSED: should be within {row.tolerance:.0%}"

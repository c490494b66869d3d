"""`asbuilt plan train`: what training a model takes, and which layout of GPUs does it fastest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import print_json, say, table, warn, write
from asbuilt.cli.types import Tokens
from asbuilt.dtypes import TRAINED
from asbuilt.plan.train.optimizers import OPTIMIZERS
from asbuilt.plan.train.options import Options
from asbuilt.plan.train.shares import CHECKPOINTING
from asbuilt.plan.train.stages import OFFLOADS
from asbuilt.shown import defaults_line

if TYPE_CHECKING:
    from asbuilt.catalog.machine import Machine
    from asbuilt.plan.train.plan import Subject, TrainPlan
    from asbuilt.plan.train.search import Ranked

F = TypeVar("F", bound=Callable[..., Any])
CHUNKS = 8  # of the loss, where --chunked-loss says no number


def _option(name: str, *spellings: str, **said: Any) -> Callable[[F], F]:  # noqa: ANN401  what click.option takes
    """An option whose default is that of the field of `Options` with its name, under other spellings before that."""
    names = (*spellings, f"--{name.replace('_', '-')}", name)
    return click.option(*names, default=getattr(Options, name), show_default=True, **said)


def _rate(nbytes: float) -> str:
    """Bytes/s as they are given: 50GB/s."""
    return f"{nbytes / 1e9:g}GB/s"


@click.command()
@click.argument("model", required=False)
@click.option("--parameters", metavar="N", help="In place of MODEL, so many parameters: 7.5e9, 70B.")
@click.option("--gpu", required=True, metavar="NAME", help="A machine (`asbuilt machines`), a TOML file, or numbers.")
@_option("gpus", type=int, help="How many.")
@_option("batch", "--micro-batch", type=int, help="Sequences of one micro-batch of a replica.")
@click.option("--seq", type=Tokens(), help=f"Tokens per sequence; {Options.seq}, or the context if less.")
@_option("accumulate", type=int, help="Micro-batches of one step.")
@_option("optimizer", help=", ".join(OPTIMIZERS))
@_option("dtype", help=f"Of weights and activations: {', '.join(TRAINED)}.")
@click.option("--gradient-dtype", help="Of gradients; as --dtype.")
@click.option(
    "--master/--no-master", default=Options.master, show_default=True, help="An fp32 copy of narrower weights."
)
@_option("zero", type=int, help="ZeRO stage 0 to 3; 3 is FSDP.")
@_option("tp", type=int, help="Tensor parallel degree.")
@_option("pp", type=int, help="Pipeline stages (1F1B).")
@_option("ep", type=int, help="Expert parallel degree, out of dp x cp.")
@_option("cp", type=int, help="Context parallel degree (ring attention).")
@click.option(
    "--interleave",
    type=int,
    metavar="CHUNKS",
    help="Model chunks of a pipeline stage, 1 for plain 1F1B; as many as the run allows.",
)
@click.option(
    "--sequence-parallel/--no-sequence-parallel",
    default=Options.sequence_parallel,
    show_default=True,
    help="Divide by tokens what --tp leaves whole.",
)
@_option("checkpointing", help=", ".join(CHECKPOINTING))
@click.option(
    "--chunked-loss",
    type=int,
    is_flag=False,
    flag_value=CHUNKS,
    default=Options.chunked_loss,
    metavar="[CHUNKS]",
    help=f"Compute the loss in so many pieces; {CHUNKS} if none is said.",
)
@_option("offload", help=", ".join(OFFLOADS))
@click.option("--lora", type=int, metavar="RANK", help="Train adapters of this rank, all else frozen.")
@click.option("--targets", metavar="NAMES", help="Matrices with adapters: q,v; all of the blocks if none are said.")
@click.option("--qlora", is_flag=True, help="Hold frozen matrices in NF4, doubly quantised.")
@click.option("--tokens", metavar="N", help="How many to train on, 15T; 20 per parameter.")
@_option("kernel_efficiency", type=float, help="Share of the dense rate that a GPU reaches while it computes.")
@click.option(
    "--mfu",
    "--utilisation",
    "utilisation",
    type=float,
    help="Model FLOPs utilisation of the whole step, as runs report it (0.4): nothing is added to it.",
)
@click.option("--price", type=float, help="Of one GPU's hour.")
@_option("reserve", "--reserve-share", type=float, help="Share of memory left alone.")
@_option("node", type=int, help="GPUs that share the fast link.")
@click.option("--network", default=_rate(Options.network), show_default=True, help="Per GPU, between nodes.")
@click.option(
    "--host", default=_rate(Options.host), show_default=True, help="Between a GPU and the host's memory, for --offload."
)
@click.option("--search", "searching", is_flag=True, help="Rank the layouts that fit by the time of a step.")
@allow_unread_option
@click.option("--plot", metavar="FILE", help="Memory and a step's time as a picture: .svg, .png or .pdf.")
@click.option("--explain", is_flag=True, help="Every formula with its numbers.")
@click.option("--markdown", is_flag=True, help="Tables in Markdown.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of tables.")
@click.pass_context
def train(
    ctx: click.Context,
    model: str | None,
    parameters: str | None,
    gpu: str,
    network: str,
    host: str,
    targets: str | None,
    tokens: str | None,
    allow_unread: tuple[str, ...],
    searching: bool,
    plot: str | None,
    explain: bool,
    markdown: bool,
    as_json: bool,
    **fields: Any,  # noqa: ANN401  the options that Options checks
) -> None:
    """What training MODEL takes: memory, FLOPs, time, money. Exits 1 where it does not fit."""
    from asbuilt import plots
    from asbuilt.catalog.quantities import parse_bytes, parse_count
    from asbuilt.plan.train.plan import plan
    from asbuilt.plan.train.search import search

    if plot is not None:
        plots.check(Path(plot))
    machine = _machine(gpu)
    subject, seq, defaults = _subject(model, parameters, allow_unread, fields.pop("seq"))
    options = Options(
        seq=seq,
        targets=None if targets is None else tuple(name.strip() for name in targets.split(",")),
        tokens=None if tokens is None else parse_count(tokens, "tokens"),
        network=parse_bytes(network, "network", per_second=True),
        host=parse_bytes(host, "host", per_second=True),
        **fields,
    )
    made = plan(subject, machine, options)
    ranked = search(subject, machine, options) if searching else None
    _print(made, ranked, defaults, explain=explain, markdown=markdown, as_json=as_json)
    if plot is not None:
        plots.save_training(made, Path(plot))
    ctx.exit(0 if (ranked.fitting if ranked is not None else made.fits) else 1)


def _machine(name: str) -> Machine:
    """The machine of that name, or this one, measured."""
    from asbuilt.catalog import machines

    if name != "this":
        return machines.resolve(name)
    from asbuilt.measure import this_machine

    return this_machine(say=lambda text: warn(f"{text} ..."), warn=lambda text: warn(f"warning: {text}"))


def _subject(
    model: str | None, parameters: str | None, allow_unread: tuple[str, ...], seq: int | None
) -> tuple[Subject, int, dict[str, int | bool]]:
    """What is trained, on sequences of how many tokens, and the sizes that no config says."""
    from asbuilt.catalog.quantities import parse_count
    from asbuilt.errors import InputError
    from asbuilt.plan.train.plan import Subject

    if (model is None) == (parameters is None):
        both = "both are given" if model is not None else "missing"
        raise InputError(both, field="MODEL", allowed="a model, or --parameters N in its place")
    if parameters is not None:
        number = parameters.replace("B", "G").replace("b", "g")
        return Subject(parameters=parse_count(number, "parameters")), Options.seq if seq is None else seq, {}
    assert model is not None
    source = opened(model, allow_unread)
    spec = source.spec
    if seq is not None and seq > spec.max_positions:
        warn(f"warning: --seq {seq} is beyond the context of {spec.max_positions} tokens")
    seq = min(Options.seq, spec.max_positions) if seq is None else seq
    return Subject(spec), seq, source.reading.defaults


def _print(
    plan: TrainPlan,
    ranked: Ranked | None,
    defaults: dict[str, int | bool],
    *,
    explain: bool,
    markdown: bool,
    as_json: bool,
) -> None:
    from asbuilt.plan import explain as derivation
    from asbuilt.plan import render
    from asbuilt.plan.train import report

    if as_json:
        found = {} if ranked is None else {"search": report.ranked_document(ranked)}
        print_json(report.document(plan) | {"defaults": defaults} | found)
        return
    if defaults:
        say(defaults_line(defaults))
    tables = report.tables(plan)
    if ranked is not None:
        tables = [report.ranked_table(ranked)]
    if explain and ranked is None:
        for text in derivation.explain(plan.lines):
            say(text)
    elif markdown:
        write(render.markdown(tables))
    else:
        for made in tables:
            table(made.title, made.columns, made.rows, drop=made.drop)

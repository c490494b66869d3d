"""`asbuilt plan train`: what training a model takes, and which layout of GPUs does it fastest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli.opening import allow_unread_option, defaults_line, opened
from asbuilt.cli.output import print_json, table

if TYPE_CHECKING:
    from asbuilt.catalog.machine import Machine
    from asbuilt.plan.search import Ranked
    from asbuilt.plan.training import Subject, TrainPlan

OPTIMIZERS = ("adamw", "adamw-8bit", "adafactor", "sgd-momentum", "muon")


@click.command()
@click.argument("model", required=False)
@click.option("--parameters", metavar="N", help="In place of MODEL, so many parameters: 7.5e9, 70B.")
@click.option("--gpu", required=True, metavar="NAME", help="A machine (`asbuilt machines`), a TOML file, or numbers.")
@click.option("--gpus", type=int, default=1, show_default=True, help="How many.")
@click.option("--batch", type=int, default=1, show_default=True, help="Sequences of one micro-batch of a replica.")
@click.option("--seq", type=int, help="Tokens per sequence; 4096, or the context if less.")
@click.option("--accumulate", type=int, default=1, show_default=True, help="Micro-batches of one step.")
@click.option("--optimizer", default="adamw", show_default=True, help=", ".join(OPTIMIZERS))
@click.option("--dtype", default="bf16", show_default=True, help="Of weights and activations: bf16, fp16, fp32.")
@click.option("--gradient-dtype", help="Of gradients; as --dtype.")
@click.option("--master/--no-master", default=True, show_default=True, help="An fp32 copy of narrower weights.")
@click.option("--zero", type=int, default=0, show_default=True, help="ZeRO stage 0 to 3; 3 is FSDP.")
@click.option("--tp", type=int, default=1, show_default=True, help="Tensor parallel degree.")
@click.option("--pp", type=int, default=1, show_default=True, help="Pipeline stages (1F1B).")
@click.option("--ep", type=int, default=1, show_default=True, help="Expert parallel degree, out of dp x cp.")
@click.option("--cp", type=int, default=1, show_default=True, help="Context parallel degree (ring attention).")
@click.option("--sequence-parallel/--no-sequence-parallel", default=True, show_default=True,
              help="Divide by tokens what --tp leaves whole.")  # fmt: skip
@click.option("--checkpointing", default="none", show_default=True, help="none, selective, full")
@click.option("--chunked-loss", type=int, is_flag=False, flag_value=8, default=1, metavar="[CHUNKS]",
              help="Compute the loss in so many pieces; 8 if none is said.")  # fmt: skip
@click.option("--offload", default="none", show_default=True, help="none, optimizer, activations, all")
@click.option("--lora", type=int, metavar="RANK", help="Train adapters of this rank, all else frozen.")
@click.option("--targets", metavar="NAMES", help="Matrices with adapters: q,v; all of the blocks if none are said.")
@click.option("--qlora", is_flag=True, help="Hold frozen matrices in NF4, doubly quantised.")
@click.option("--tokens", metavar="N", help="How many to train on, 15T; 20 per parameter.")
@click.option("--utilisation", type=float, default=0.4, show_default=True, help="Share of the dense rate.")
@click.option("--price", type=float, help="Of one GPU's hour.")
@click.option("--reserve", type=float, default=0.05, show_default=True, help="Share of memory left alone.")
@click.option("--node", type=int, default=8, show_default=True, help="GPUs that share the fast link.")
@click.option("--network", default="50GB/s", show_default=True, help="Per GPU, between nodes.")
@click.option("--host", default="25GB/s", show_default=True, help="Between a GPU and the host's memory, for --offload.")
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
    from asbuilt.plan.options import Options
    from asbuilt.plan.search import search
    from asbuilt.plan.training import plan

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

    return this_machine(say=lambda text: click.echo(f"{text} ...", err=True))


def _subject(
    model: str | None, parameters: str | None, allow_unread: tuple[str, ...], seq: int | None
) -> tuple[Subject, int, dict[str, int | bool]]:
    """What is trained, on sequences of how many tokens, and the sizes that no config says."""
    from asbuilt.catalog.quantities import parse_count
    from asbuilt.errors import InputError
    from asbuilt.plan.options import Options
    from asbuilt.plan.training import Subject

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
        click.echo(f"warning: --seq {seq} is beyond the context of {spec.max_positions} tokens", err=True)
    seq = min(Options.seq, spec.max_positions) if seq is None else seq
    return Subject(spec), seq, source.reading.defaults


def _print(plan: TrainPlan, ranked: Ranked | None, defaults: dict[str, int | bool], *, explain: bool, markdown: bool,
           as_json: bool) -> None:  # fmt: skip
    from asbuilt.plan import explain as derivation
    from asbuilt.plan import render, training_report

    if as_json:
        found = {} if ranked is None else {"search": training_report.ranked_document(ranked)}
        print_json(training_report.document(plan) | {"defaults": defaults} | found)
        return
    if defaults:
        click.echo(defaults_line(defaults))
    tables = training_report.tables(plan)
    if ranked is not None:
        tables = [training_report.ranked_table(ranked)]
    if explain and ranked is None:
        click.echo("\n".join(derivation.explain(plan.lines)))
    elif markdown:
        click.echo(render.markdown(tables), nl=False)
    else:
        for made in tables:
            table(made.title, made.columns, made.rows)

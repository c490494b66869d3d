"""`asbuilt plan train`: what training a model takes, and which parallel layout is fastest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from asbuilt.cli import html as web
from asbuilt.cli.echo import Echoing, Typed, typed
from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import print_json, say, table, warn, write
from asbuilt.cli.types import Tokens
from asbuilt.dtypes import TRAINED
from asbuilt.kernels.memory.loss import LOSSES
from asbuilt.plan.train.choices import CHECKPOINTING, OFFLOADS
from asbuilt.plan.train.optimizers import OPTIMIZERS
from asbuilt.plan.train.options import Options, require_read
from asbuilt.plan.train.schedule import SCHEDULES
from asbuilt.shown import defaults_line

if TYPE_CHECKING:
    from asbuilt.catalog.machine import Machine
    from asbuilt.checkpoint.source import Source
    from asbuilt.families import Reading
    from asbuilt.plan.train.plan import TrainPlan
    from asbuilt.plan.train.search import Ranked
    from asbuilt.plan.train.subject import Subject

F = TypeVar("F", bound=Callable[..., Any])
CHUNKS = 8  # of the loss, if --chunked-loss has no number


def _option(name: str, *spellings: str, **said: Any) -> Callable[[F], F]:  # noqa: ANN401  what click.option accepts
    """An option whose default is that of the field of `Options` with its name, under other spellings before that."""
    names = (*spellings, f"--{name.replace('_', '-')}", name)
    return click.option(*names, default=getattr(Options, name), show_default=True, **said)


def _rate(nbytes: float) -> str:
    """Returns bytes/s as an option takes them: 50GB/s."""
    return f"{nbytes / 1e9:g}GB/s"


@click.command(cls=Echoing)
@click.argument("model", required=False)
@click.option("--parameters", metavar="N", help="A number of parameters in place of MODEL: 7.5e9, 70B.")
@click.option("--gpu", required=True, metavar="NAME", help="A name from `asbuilt machines`, a TOML file, or numbers.")
@_option("gpus", type=int, help="Number of GPUs.")
@_option("batch", "--micro-batch", type=int, help="Sequences per micro-batch and replica.")
@click.option(
    "--seq", type=Tokens(), help=f"Tokens per sequence; by default {Options.seq}, or the context length if shorter."
)
@_option("accumulate", type=int, help="Micro-batches per step (gradient accumulation).")
@_option("optimizer", help=", ".join(OPTIMIZERS))
@_option("dtype", help=f"Dtype of weights and activations: {', '.join(TRAINED)}.")
@click.option("--gradient-dtype", help="Dtype of gradients; by default --dtype.")
@click.option(
    "--master/--no-master",
    default=Options.master,
    show_default=True,
    help="Keep fp32 master weights beside narrower ones.",
)
@_option("zero", type=int, help="ZeRO stage 0 to 3; 3 is FSDP.")
@_option("tp", type=int, help="Tensor parallel degree.")
@_option("pp", type=int, help="Pipeline stages.")
@click.option(
    "--schedule",
    help=f"Pipeline schedule: {', '.join(SCHEDULES)}; by default interleaved if the run allows, else 1f1b.",
)
@click.option(
    "--hsdp", type=int, metavar="N", help="ZeRO shards over groups of N ranks, which average their gradients."
)
@_option("ep", type=int, help="Expert parallel degree, a divisor of dp x cp.")
@_option("cp", type=int, help="Context parallel degree (ring attention).")
@click.option("--gather-context", is_flag=True, help="Gather the context's keys and values: no ring (asbuilt train).")
@click.option(
    "--interleave",
    type=int,
    metavar="CHUNKS",
    help="Model chunks per pipeline stage, 1 for plain 1F1B; by default as many as the run allows.",
)
@click.option(
    "--sequence-parallel/--no-sequence-parallel",
    default=Options.sequence_parallel,
    show_default=True,
    help="Sequence parallelism: divide activations that --tp replicates by tokens.",
)
@click.option(
    "--divide-vocabulary/--no-divide-vocabulary",
    default=Options.divide_vocabulary,
    show_default=True,
    help="Whether --tp divides embedding, head and loss by the vocabulary too.",
)
@click.option("--fp8", is_flag=True, help="Products of the blocks in fp8; weights and saved tensors stay in --dtype.")
@click.option("--fp8-dispatch", is_flag=True, help="Send rows to experts in fp8 (their results in --dtype).")
@click.option("--expert-nodes", type=int, metavar="N", help="The most nodes that a token's experts are on.")
@click.option("--overlap-experts", is_flag=True, help="Rows go to experts while others are computed; so does dualpipe.")
@click.option("--overlap-tensor", is_flag=True, help="Tensor-parallel sums overlap with products (AsyncTP).")
@_option("pad_vocabulary", type=int, help="Pad it to a multiple of this and --tp (Megatron-LM: 128).")
@_option("checkpointing", help=", ".join(CHECKPOINTING))
@click.option("--documents", is_flag=True, help="Documents of one sequence do not attend to each other.")
@click.option(
    "--chunked-loss",
    type=int,
    is_flag=False,
    flag_value=CHUNKS,
    default=Options.chunked_loss,
    metavar="[CHUNKS]",
    help=f"Compute the loss in this many chunks; {CHUNKS} without a number.",
)
@_option("loss", help="Whose cross-entropy of tokens it is: " + ", ".join(LOSSES))
@_option("offload", help=", ".join(OFFLOADS))
@click.option(
    "--lora", type=int, metavar="RANK", help="Train LoRA adapters of this rank, with all other weights frozen."
)
@click.option("--targets", metavar="NAMES", help="Linear maps with adapters: q,v; by default all in the blocks.")
@click.option("--qlora", is_flag=True, help="Store frozen matrices in NF4 with double quantisation.")
@click.option(
    "--tokens",
    metavar="N",
    help="Training tokens, such as 15T, or pairs; by default 20 per parameter, or CLIP's 12.8B pairs.",
)
@click.option(
    "--kernel-efficiency",
    type=float,
    help="A lower bound of the step: all that a GPU computes at this fraction of the dense rate. By default products, "
    "scores, memory and links have their own.",
)
@click.option(
    "--attention-efficiency",
    type=float,
    help="Fraction of the dense rate that attention's kernel reaches, 0.5 by default; on H100 FlashAttention-2 0.35, "
    "FlashAttention-3 0.75.",
)
@click.option(
    "--mfu",
    "--utilisation",
    "utilisation",
    type=float,
    help="Model FLOPs utilisation of the whole step, as runs report it (0.4); includes all overheads.",
)
@_option("effective_time", type=float, help="Fraction of a run's time that is steps.")
@click.option("--price", type=float, help="Price of one GPU-hour.")
@_option("reserve", "--reserve-share", type=float, help="Fraction of memory left unused.")
@_option("node", type=int, help="GPUs per node, connected by the fast link.")
@click.option("--network", default=_rate(Options.network), show_default=True, help="Bandwidth per GPU between nodes.")
@click.option(
    "--host",
    default=_rate(Options.host),
    show_default=True,
    help="Bandwidth between a GPU and host memory, for --offload.",
)
@click.option(
    "--tokens-per-step", metavar="N", help="Tokens (or pairs) of one step, such as 4M, in place of --accumulate."
)
@click.option(
    "--search",
    "searching",
    is_flag=True,
    help="Rank the layouts that fit by step time, with other micro-batches if --micro-batch is not given.",
)
@allow_unread_option
@click.option("--plot", metavar="FILE", help="Write a plot of memory and step time: .svg, .png or .pdf.")
@web.html_option
@click.option("--explain", is_flag=True, help="Print every formula with its numbers.")
@click.option("--markdown", is_flag=True, help="Print tables in Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
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
    tokens_per_step: str | None,
    searching: bool,
    plot: str | None,
    html: str | None,
    explain: bool,
    markdown: bool,
    as_json: bool,
    **fields: Any,  # noqa: ANN401  the options that Options checks
) -> None:
    """Plan training MODEL: memory, FLOPs, time, money. The exit code is 1 if it does not fit."""
    from asbuilt import plots
    from asbuilt.catalog.quantities import parse_bytes, parse_count
    from asbuilt.plan.train.options import stepping
    from asbuilt.plan.train.plan import plan
    from asbuilt.plan.train.search import MICRO_BATCHES, search

    if plot is not None:
        plots.check(Path(plot))
    web.check(html)
    machine = _machine(gpu)
    subject, seq, source = _subject(model, parameters, allow_unread, fields.pop("seq"))
    read = None if source is None else source.reading
    options = Options(
        seq=seq,
        targets=None if targets is None else tuple(name.strip() for name in targets.split(",")),
        tokens=None if tokens is None else parse_count(tokens, "tokens"),
        network=parse_bytes(network, "network", per_second=True),
        host=parse_bytes(host, "host", per_second=True),
        **fields,
    )
    if not searching:
        require_read(options)
    given = ctx.get_parameter_source("accumulate") is not click.core.ParameterSource.DEFAULT
    if tokens_per_step is not None:
        options = stepping(options, parse_count(tokens_per_step, "tokens-per-step"), subject.each(options), given=given)
    free = ctx.get_parameter_source("batch") is click.core.ParameterSource.DEFAULT
    made = plan(subject, machine, options)
    batches = MICRO_BATCHES if free else (options.batch,)
    ranked = search(subject, machine, options, batches=batches) if searching else None
    _print(made, ranked, read, typed(ctx), explain=explain, markdown=markdown, as_json=as_json)
    if plot is not None:
        plots.save_training(made, Path(plot))
    if html is not None:
        documents = {"train": web.printed(ctx, _document(made, ranked, read, typed(ctx))), "ranks": web.ranks(made)}
        if source is not None and model is not None:
            documents["describe"] = web.described(model, source, allow_unread)
        title = f"Training {made.model} on {made.trial.layout.gpus} x {made.machine.name}"
        web.save(html, ctx, [web.case(title, documents)])
    ctx.exit(0 if (ranked.fitting if ranked is not None else made.fits) else 1)


def _machine(name: str) -> Machine:
    """Returns the machine of this name, or this one, measured."""
    from asbuilt.catalog import machines

    if name != "this":
        return machines.resolve(name)
    from asbuilt.measure import this_machine

    return this_machine(say=lambda text: warn(f"{text} ..."), warn=lambda text: warn(f"warning: {text}"))


def _subject(
    model: str | None, parameters: str | None, allow_unread: tuple[str, ...], seq: int | None
) -> tuple[Subject, int, Source | None]:
    """Returns what is trained, the sequence length, and the model, if one is given."""
    from asbuilt.catalog.quantities import parse_count
    from asbuilt.errors import InputError
    from asbuilt.plan.train.subject import Subject

    if (model is None) == (parameters is None):
        both = "MODEL and --parameters are both given" if model is not None else "missing"
        raise InputError(both, field="MODEL", allowed="a model, or left out in favour of --parameters N")
    if parameters is not None:
        number = parameters.replace("B", "G").replace("b", "g")
        return Subject(parameters=parse_count(number, "parameters")), Options.seq if seq is None else seq, None
    assert model is not None
    source = opened(model, allow_unread)
    spec = source.spec
    if seq is not None and seq > spec.max_positions:
        warn(f"warning: --seq {seq} exceeds the context length of {spec.max_positions} tokens")
    seq = min(Options.seq, spec.max_positions) if seq is None else seq
    return Subject(spec), seq, source


def _document(plan: TrainPlan, ranked: Ranked | None, read: Reading | None, words: Typed) -> dict[str, Any]:
    from asbuilt.api.plan import train_document
    from asbuilt.plan.train import report

    found = {} if ranked is None else {"search": report.ranked_document(ranked)}
    return train_document(plan, read) | found | {"typed": words.options}


def _print(
    plan: TrainPlan,
    ranked: Ranked | None,
    read: Reading | None,
    words: Typed,
    *,
    explain: bool,
    markdown: bool,
    as_json: bool,
) -> None:
    from asbuilt.api.plan import packed_by
    from asbuilt.plan import explain as derivation
    from asbuilt.plan import render
    from asbuilt.plan.train import report

    defaults, published = {} if read is None else read.defaults, packed_by(read)
    if as_json:
        print_json(_document(plan, ranked, read, words))
        return
    if defaults:
        say(defaults_line(defaults))
    if published is not None:
        say(f"The weights are published quantised ({published}); training holds them as --dtype and --qlora say.")
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
    if not markdown:
        say()
        say(words.line)

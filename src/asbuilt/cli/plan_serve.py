"""`asbuilt plan serve`: whether a model fits a machine, how many users, how fast, and what to change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli import html as web
from asbuilt.cli.echo import Echoing, Typed, typed
from asbuilt.cli.opening import allow_unread_option, opened_all
from asbuilt.cli.output import print_json, say, table, warn, write
from asbuilt.cli.types import Tokens
from asbuilt.cli.workload import workload_options
from asbuilt.errors import InputError
from asbuilt.plan.serve.conventions import CHOICES, CHUNK, MEANING, SIZES, Conventions
from asbuilt.shown import defaults_line

if TYPE_CHECKING:
    from asbuilt.catalog.machine import Machine
    from asbuilt.checkpoint.source import Source
    from asbuilt.plan import ServePlan

THIS = "this"
# Conventions that engines set themselves.
ENGINES_OWN = ("utilisation", "page", "block_size", "windows", "kernel", "reserve")
LARGEST_FILE = 1 << 24
RATES = ("network", "host")
TIMES = ("latency_target", "first_token_target")
SWITCHES = (
    "memory",
    "utilisation",
    "reserve",
    "overhead",
    "workspace",
    "page",
    "block_size",
    "embedding",
    "flops",
    "scores",
    "count",
    "windows",
    "kernel",
    "targets",
    "node",
    "network",
    "host",
)


class Serve(Echoing):
    """A command that takes several machines after one `--gpu`, as in `--gpu h100-sxm h200`."""

    def spread(self, args: Sequence[str]) -> Iterator[str]:
        """Inserts `--gpu` before each further machine name."""
        return _spread(args)


def _spread(args: Sequence[str]) -> Iterator[str]:
    """Yields the arguments; a word after `--gpu X` is another machine if it names one, otherwise a model."""
    after = False
    for i, word in enumerate(args):
        value = i > 0 and args[i - 1] == "--gpu"
        if after and not value and _is_machine(word):
            yield "--gpu"
        elif not value:
            after = word == "--gpu" or word.startswith("--gpu=")
        yield word
        after = after or value


def _is_machine(word: str) -> bool:
    if word.startswith("-"):
        return False
    from asbuilt.catalog import machines

    try:
        return word == THIS or bool(machines.resolve(word))
    except InputError:
        return False


def _default(name: str) -> str:
    """Returns the default of a convention that engines set, as the help has it."""
    value = getattr(Conventions, name)
    shown = ("page" if value else "no-page") if isinstance(value, bool) else value
    return f"[default: {shown}, or the engine's]"


def _convention_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds an option for each convention, with the meaning of its values in the help."""
    for name in reversed(CHOICES):
        said = "; ".join(f"{value}: {meaning}" for value, meaning in MEANING[name].items())
        command = click.option(
            f"--{name}",
            type=click.Choice(CHOICES[name]),
            default=None if name in ENGINES_OWN else getattr(Conventions, name),
            show_default=name not in ENGINES_OWN,
            help=f"{said[0].upper()}{said[1:]}." + (f"  {_default(name)}" if name in ENGINES_OWN else ""),
        )(command)
    return command


@click.command(cls=Serve)
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "--gpu",
    "gpus_named",
    metavar="NAME...",
    multiple=True,
    required=True,
    help="A name from `asbuilt machines`, a MIG slice of one (h100-sxm-3g.40gb), a TOML file, numbers "
    "(memory=80GB,bandwidth=2TB/s,bf16=312T), a name with some numbers replaced (h100-sxm,bf16=990T), or `this`, "
    "which is measured.",
)
@click.option("--gpus", type=int, help="Number of GPUs; by default as many as the degrees need.")
@click.option(
    "--tp", type=int, help="Tensor parallel degree; by default the largest that the model allows within one node."
)
@click.option("--pp", type=int, help="Pipeline stages; by default --gpus divided by --tp.")
@click.option("--ep", type=int, help="Expert parallel degree.")
@click.option(
    "--redundant-experts",
    type=int,
    metavar="N",
    help="Further replicas of routed experts, spread with them over --ep devices (vLLM's num_redundant_experts).",
)
@click.option(
    "--expert-loads",
    metavar="FILE",
    help="Measured loads of experts, a line of numbers for each layer or one for all, by which replicas are placed.",
)
@click.option(
    "--prefill-gpus",
    metavar="N[,tp=T,...]",
    help="Disaggregated serving: GPUs that compute prompts alone, with a layout of their own (tp, pp, ep, chunk).",
)
@click.option("--decode-gpus", metavar="N[,tp=T,...]", help="GPUs that write answers alone, beside --prefill-gpus.")
@click.option(
    "--kv-transfer",
    type=click.Choice(("after", "layerwise")),
    help="Whether a cache is sent after its prompt, or each layer's while the next are computed.  [default: after]",
)
@click.option(
    "--context",
    type=Tokens(),
    help="Tokens per user: 8192, 128k (128,000), 128K (131,072); by default 8192, or the model's context if shorter.",
)
@click.option("--prompt", type=Tokens(), help="Tokens of the prompt whose first token is timed; by default one chunk.")
@click.option("--chunk", type=Tokens(), help=f"Tokens per prefill chunk.  [default: {CHUNK}, or the engine's]")
@click.option(
    "--engine",
    metavar="NAME",
    default="ideal",
    show_default=True,
    help="Plan what this engine does: ideal (the conventions alone), vllm-0.19, vllm-0.11, sglang, tensorrt-llm, "
    "llama.cpp, or asbuilt. It sets memory, chunk, pages, windows and the sampler where no option does.",
)
@click.option("--max-num-seqs", type=int, help="The most sequences that run at once.  [default: the engine's]")
@click.option("--users", "--batch", "users", type=int, help="Concurrent users; by default as many as fit.")
@click.option(
    "--dtype",
    help="Dtype of weights: bf16, fp8, int4, q4_k, q4_k_m ...; with scales int4:128, int8:128, fp8:128; or "
    "`quantised`: as in the quantization_config or GGUF file, the default if there is one.  [bf16]",
)
@click.option(
    "--kv-dtype",
    help="Format of the cache: bf16, fp8 ..., or with scales for each token and head int8:head, fp8:head, int4:head. "
    "By default that of activations: bf16, or the weights' if fp16 or wider; or the one that quantised weights are "
    "published for.",
)
@click.option("--latency-target", metavar="TIME", help="Longest time per generated token, such as 20ms.")
@click.option("--first-token-target", metavar="TIME", help="Longest time to the first token, such as 0.5s.")
@click.option(
    "--bandwidth-efficiency",
    type=float,
    default=1.0,
    show_default=True,
    help="Fraction of the bandwidth that is reached.",
)
@click.option(
    "--compute-efficiency",
    type=float,
    default=1.0,
    show_default=True,
    help="Fraction of the FLOP rate that is reached.",
)
@click.option(
    "--efficiency", "measured", metavar="FILE", help="Take both from a file that `asbuilt measure --json` printed."
)
@click.option(
    "--memory-utilisation",
    "--utilisation",
    "utilisation",
    type=float,
    help=f"Fraction of memory that is used.  {_default('utilisation')}",
)
@click.option("--reserve-size", "--reserve", "reserve", metavar="SIZE", help="Memory kept free beyond that.")
@click.option("--overhead", metavar="SIZE", help="One figure that replaces activations, logits and workspace.")
@click.option("--workspace", metavar="SIZE", help="CUDA graphs and libraries; by default 1GiB, nothing on a CPU.")
@click.option("--page/--no-page", default=None, help=f"Whether the cache is paged.  {_default('page')}")
@click.option("--block-size", type=int, help=f"Tokens per page.  {_default('block_size')}")
@click.option(
    "--node",
    type=int,
    default=Conventions.node,
    show_default=True,
    help="Devices per node, connected by the fast link.",
)
@click.option(
    "--network",
    metavar="RATE",
    default=f"{Conventions.network / 1e9:g}GB/s",
    show_default=True,
    help="Bandwidth of one device to other nodes; 400Gb/s is 50GB/s.",
)
@click.option(
    "--host",
    metavar="RATE",
    default=f"{Conventions.host / 1e9:g}GB/s",
    show_default=True,
    help="Bandwidth between a GPU and host memory.",
)
@click.option(
    "-ngl",
    "--n-gpu-layers",
    "gpu_layers",
    type=int,
    metavar="N",
    help="As in llama.cpp: the last N layers, of which the output is one, on the GPU, the others in host memory.",
)
@click.option(
    "--n-cpu-moe",
    "cpu_moe",
    type=int,
    metavar="N",
    help="As in llama.cpp: the routed experts of the first N layers in host memory.",
)
@click.option("--cpu", metavar="NAME", help="The processor that computes what is in host memory: a name, or numbers.")
@click.option(
    "--kv-host", metavar="SIZE", help="Host memory for the caches of waiting sequences, for each copy of the model."
)
@click.option("--lora", type=int, metavar="N", help="Keep N LoRA adapters beside the model (vLLM's --max-loras).")
@click.option("--lora-rank", type=int, metavar="R", help="Their rank (vLLM's --max-lora-rank).")
@click.option("--lora-targets", metavar="NAMES", help="Linear maps that have them: q,v; by default all in the blocks.")
@workload_options
@_convention_options
@allow_unread_option
@click.option("--plot", metavar="FILE", help="Write plots of the plans: .svg, .png or .pdf.")
@web.html_option
@click.option("--explain", is_flag=True, help="Print every formula with its numbers.")
@click.option("--markdown", is_flag=True, help="Print tables in Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@click.pass_context
def serve(
    ctx: click.Context,
    models: tuple[str, ...],
    gpus_named: tuple[str, ...],
    measured: str | None,
    allow_unread: tuple[str, ...],
    plot: str | None,
    html: str | None,
    price: tuple[str, ...],
    search: bool,
    explain: bool,
    markdown: bool,
    as_json: bool,
    **options: Any,  # noqa: ANN401  what asbuilt.plan.serve takes, and the switches
) -> None:
    """Plan serving MODEL on machine NAME: whether it fits, how many users, how fast. Nothing is run.

    Several models or machines are compared in a table. The exit code is 1 if it does not fit.
    """
    plots = None if plot is None else _plots(Path(plot))
    web.check(html)
    sources = opened_all(models, allow_unread)
    plans = list(_plans(sources, gpus_named, measured, price, options))
    if plots is not None and plot is not None:
        plots.save(plans, Path(plot))
    defaults = {source.name: source.reading.defaults for source in sources}
    said = typed(ctx)
    documents = _documents(plans, defaults, said, search=search) if as_json or html is not None else []
    if as_json:
        print_json({"plans": documents} if len(plans) > 1 else documents[0])
    else:
        _print(plans, defaults, said, search=search, explain=explain, markdown=markdown)
    if html is not None:
        named = [(name, source) for name, source in zip(models, sources, strict=True) for _ in gpus_named]
        web.save(html, ctx, web.served(ctx, named, plans, documents, allow_unread))
    answers = [bool(plan.layouts) for plan in plans] if search else [_met(plan) for plan in plans]
    ctx.exit(0 if all(answers) else 1)


def _met(plan: ServePlan) -> bool:
    """Returns whether the plan fits within its targets; a model without users has only those."""
    return plan.fits or (plan.users is None and all(plan.targets.values()))


def _plots(path: Path) -> ModuleType:
    """Returns the plotting module, after checking that it can write to `path`."""
    from asbuilt import plots

    plots.check(path)
    return plots


def _plans(
    sources: list[Source],
    gpus: tuple[str, ...],
    measured: str | None,
    price: tuple[str, ...],
    options: dict[str, Any],
) -> Iterator[ServePlan]:
    from asbuilt.api.plan import precision, timed_here
    from asbuilt.api.workload import prices, workload
    from asbuilt.plan import serve as plan
    from asbuilt.plan.serve.expert_loads import read_loads

    conventions, options = _conventions(options), _times(options)
    if options["lora_targets"] is not None:
        options["lora_targets"] = tuple(name.strip() for name in options["lora_targets"].split(","))
    options["workload"] = workload(options)
    if options["expert_loads"] is not None:
        options["expert_loads"] = read_loads(Path(options["expert_loads"]))
    paid = prices(price, len(gpus))
    machines = [_machine(name) for name in gpus]
    for source in sources:
        if measured is not None:
            options |= _efficiency(Path(measured), source)
        here = timed_here(source, options, _progress) if THIS in gpus and measured is None else None
        for named, machine, each in zip(gpus, machines, paid, strict=True):
            asked: dict[str, Any] = options | {"dtype": precision(source, options["dtype"]), "price": each}
            asked["timed"] = here if named == THIS else None
            yield plan(source.spec, machine, name=source.name, conventions=conventions, **asked)


def _machine(name: str) -> Machine:
    from asbuilt.catalog import machines

    if name != THIS:
        return machines.resolve(name)
    from asbuilt.measure import this_machine

    return this_machine(say=_progress, warn=lambda text: warn(f"warning: {text}"))


def _progress(text: str) -> None:
    warn(f"{text} ...")


def _conventions(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the conventions that were given; the others are the engine's."""
    from asbuilt.catalog.quantities import parse_bytes, parse_size

    said = {name: options.pop(name) for name in SWITCHES}
    for name in SIZES:
        if said[name] is not None:
            said[name] = parse_size(said[name], name)
    for name in RATES:
        said[name] = parse_bytes(said[name], name, per_second=True)
    return {name: value for name, value in said.items() if value is not None}


def _times(options: dict[str, Any]) -> dict[str, Any]:
    from asbuilt.catalog.quantities import parse_bytes, parse_time

    given: dict[str, Any] = {
        name: parse_time(options[name], name.replace("_", "-")) for name in TIMES if options[name] is not None
    }
    if options["kv_host"] is not None:
        given["kv_host"] = parse_bytes(options["kv_host"], "kv-host")
    return options | given


def _efficiency(path: Path, source: Source) -> dict[str, float]:
    from asbuilt.files import read_regular
    from asbuilt.plan.serve.efficiency import from_measured

    text = read_regular(path, LARGEST_FILE, "efficiency")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(field="efficiency", value=str(path), allowed="a JSON file") from error
    bandwidth, compute = from_measured(document, source.spec, source.name)
    return {"bandwidth_efficiency": bandwidth, "compute_efficiency": compute}


def _documents(
    plans: list[ServePlan], defaults: dict[str, dict[str, int | bool]], said: Typed, *, search: bool
) -> list[dict[str, Any]]:
    """Returns the document of each plan, with its layouts after a search."""
    from asbuilt.api.plan import serve_document
    from asbuilt.plan.serve.report_workload import layouts

    documents = [serve_document(plan, defaults[plan.asked.name]) | {"typed": said.options} for plan in plans]
    if search:
        documents = [made | {"layouts": layouts(plan)} for made, plan in zip(documents, plans, strict=True)]
    return documents


def _print(
    plans: list[ServePlan],
    defaults: dict[str, dict[str, int | bool]],
    words: Typed,
    *,
    search: bool,
    explain: bool,
    markdown: bool,
) -> None:
    from asbuilt.plan import render
    from asbuilt.plan.serve import report_workload
    from asbuilt.plan.serve.report import compare
    from asbuilt.plan.serve.report_workload import found

    for name, said in defaults.items():
        if said:
            say(f"{name}: {defaults_line(said)}")
    if explain:
        for i, plan in enumerate(plans):
            for text in [*([""] if i else []), plan.title, "", *plan.explain().split("\n")]:
                say(text)
    elif search:
        for made in map(found, plans):
            write(render.markdown([made])) if markdown else table(made.title, made.columns, made.rows, drop=made.drop)
    else:
        tables = (
            plans[0].tables()
            if len(plans) == 1
            else [
                compare(plans),
                *([report_workload.compare(plans)] if plans[0].served else []),
                *(_change(plan) for plan in plans),
            ]
        )
        tables = [made for made in tables if made.rows]
        if markdown:
            write(render.markdown(tables))
        for made in tables if not markdown else ():
            table(made.title, made.columns, made.rows, drop=made.drop)
    if not markdown:
        say()
        say(words.line)


def _change(plan: ServePlan) -> Any:  # noqa: ANN401
    from asbuilt.plan.render import Table
    from asbuilt.plan.serve.report import notes, suggestions

    rows = [*notes(plan).rows, *(tuple(map(str, row[:2])) for row in suggestions(plan).rows[:1])]
    return Table(plan.title, ("note", ""), rows)

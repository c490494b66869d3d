"""`asbuilt train`: trains a model by a recipe."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from asbuilt.cli.output import count, print_json, say, size, table, warn
from asbuilt.cli.running import threads_option
from asbuilt.cli.streams import draw
from asbuilt.shown import line

if TYPE_CHECKING:
    from asbuilt.train.loop import Progress
    from asbuilt.train.recipe import Recipe


@click.command()
@click.argument("recipe")
@click.argument("changes", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--show", is_flag=True, help="Print the whole recipe with every default, and train nothing.")
@click.option("--dry-run", is_flag=True, help="Print what the run would take on this machine, and train nothing.")
@click.option("--resume", is_flag=True, help="Continue the run in run.out from its last checkpoint.")
@threads_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end.")
def train(
    recipe: str, changes: tuple[str, ...], show: bool, dry_run: bool, resume: bool, threads: int | None, as_json: bool
) -> None:
    """Train a model by RECIPE, a TOML file or the name of a shipped one, with changes such as optimizer.lr=3e-4.

    The run's folder, run.out, gets a log, checkpoints, and the trained model as a folder that other commands and
    transformers load, or adapters for the model that is tuned. A stopped run goes on with --resume as if it had never
    stopped.
    """
    from asbuilt.train import recipe as recipes

    given = recipes.read(recipe, changes)
    if show:
        print_json(recipes.to_dict(given)) if as_json else say_all(recipes.dumps(given))
        return
    from asbuilt.api.running import use_threads

    use_threads(threads, "--threads")
    if dry_run:
        _plan(given, as_json)
        return
    from asbuilt.api.train import train as trained
    from asbuilt.train.export import ADAPTER

    per = "pair" if given.data.preferences or given.data.objective == "contrastive" else "token"
    outcome = trained(given, resume=resume, report=Line(per))
    if int(os.environ.get("RANK", "0")):
        return  # the first of many processes speaks for all
    if as_json:
        kind = "adapter" if outcome.exported.name == ADAPTER else "model"
        print_json({**asdict(outcome), "folder": str(outcome.folder), kind: str(outcome.exported)})
        return
    said = "" if outcome.validation is None else f", validation loss {outcome.validation:.4f} nats per {per}"
    say(f"{count(outcome.steps)} steps, {count(outcome.tokens)} tokens in {clock(outcome.seconds)}{said}")
    if outcome.exported.name == ADAPTER:
        say(f"{outcome.exported}: the adapters; asbuilt generate {given.model.source} --adapter {outcome.exported}")
    else:
        say(f"{outcome.exported}: the model; asbuilt generate, measure and transformers load it")


def say_all(text: str) -> None:
    """Prints the lines of a text."""
    for one in text.rstrip("\n").split("\n"):
        say(one)


class Line:
    """Progress on stderr: one line that is drawn again on a terminal, a line for each report elsewhere."""

    def __init__(self, per: str = "token") -> None:
        self._per = per

    def __call__(self, at: Progress) -> None:
        """Draws what a run reports."""
        if at.note is not None:
            warn(f"warning: {at.note}")
            return
        if at.precision is not None:
            warn(f"precision {at.precision}")
            return
        if at.validation is not None:
            end = "\x1b[K\n" if sys.stderr.isatty() else ""
            bits = "" if at.bits_per_byte is None else f", {at.bits_per_byte:.4f} bits per byte"
            said = f"step {at.step}/{at.steps}: validation loss {at.validation:.4f} nats per {self._per}{bits}"
            self._draw(said + found(at), end)
            return
        if at.sample is not None:
            end = "\x1b[K\n" if sys.stderr.isatty() else ""
            self._draw(f'step {at.step}/{at.steps}: sample "{line(at.sample)}"', end)
            return
        rate, left = count(round(at.tokens_per_second)), clock(at.seconds_left)
        share = "" if at.mfu is None else f", MFU {at.mfu:.0%}"
        self._draw(f"step {at.step}/{at.steps}: loss {at.loss:.4f}, {rate} tokens/s{share}, {left} left", "\x1b[K")

    def _draw(self, text: str, end: str) -> None:
        if sys.stderr.isatty():
            draw(sys.stderr, f"\r{text}{end}")
        else:
            warn(text)


def found(at: Progress) -> str:
    """Returns how many images and texts were found among all, in words; nothing without such pairs."""
    if at.texts_found is None or at.images_found is None or not at.candidates:
        return ""
    shares = f"{at.texts_found:.1%} of texts and {at.images_found:.1%} of images are found"
    return f"; among {at.candidates} pairs {shares} (by chance {1 / at.candidates:.1%})"


def clock(seconds: float) -> str:
    """Returns a time as people say it: 42 s, 3 min 20 s, 5 h 12 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _plan(given: Recipe, as_json: bool) -> None:
    """Prints the parameters, FLOPs, memory and time of the run on this machine."""
    from asbuilt.measure import this_machine
    from asbuilt.train.device import device_of
    from asbuilt.train.loop import described, read_data
    from asbuilt.train.planned import likely, planned
    from asbuilt.train.tune import base_spec

    if given.parallel.ranks < 2 and device_of(given.run.device).type == "cuda":
        warn("warning: planned for the processor; asbuilt plan train --gpu plans GPUs")
    with TemporaryDirectory() as there:  # nothing stays of a run that is only planned
        _, vocabulary, note = read_data(given, Path(there))
    if note:
        warn(f"warning: {note}")
    spec = base_spec(given, described(given, vocabulary.n_vocab, vocabulary.end_id))
    machine = this_machine(say=lambda text: warn(f"{text} ..."), warn=lambda text: warn(f"warning: {text}"))
    plan = planned(given, spec, machine)
    step = plan.trial.step
    precision = likely(given, machine)
    timed = planned(given, spec, machine, narrow=True).trial.step if precision == "bf16" else step
    seconds = plan.tokens / step.tokens * timed.seconds
    each, per = plan.unit, plan.unit.removesuffix("s")
    chosen = ", the faster by its products' rate; the run measures it" if given.step.precision == "auto" else ""
    document: dict[str, Any] = {
        "model": plan.model,
        "n_vocab": spec.n_vocab,
        "parameters": plan.parameters,
        "trained_parameters": plan.state.gradients // 4,
        "unit": each,
        "flops_per_token": plan.flops_per_token,
        "tokens": plan.tokens,
        "tokens_per_step": step.tokens,
        "state_bytes": plan.state.total,
        "activation_bytes": plan.activation_bytes,
        "logits_bytes": plan.logits_bytes,
        "bytes": plan.per_device_bytes,
        "memory_bytes": plan.trial.memory,
        "fits": plan.fits,
        "precision": precision,
        "seconds": seconds,
        "seconds_per_step": timed.seconds,
        "ranks": plan.trial.layout.gpus,
        "sent_bytes_per_step": {name: traffic.bytes for name, traffic in step.communication.items()},
    }
    if as_json:
        print_json(document)
        return
    rows = [
        ("parameters", count(plan.parameters)),
        ("trained parameters", count(plan.state.gradients // 4)),
        *((f"FLOPs per {per}, {name}", count(round(value))) for name, value in plan.flops_per_token.items()),
        (f"training {each}", count(round(plan.tokens))),
        (f"{each} per step", count(round(step.tokens))),
        ("weights, gradients, optimizer", size(plan.state.total)),
        ("saved activations", size(plan.activation_bytes)),
        ("total memory", f"{size(plan.per_device_bytes)} of {size(plan.trial.memory)}"),
        ("precision of products", f"{precision}{chosen}"),
        ("time", f"{clock(seconds)}, {timed.seconds:.3g} s per step"),
        *((f"sent per step: {name}", size(sent.bytes)) for name, sent in step.communication.items() if sent.bytes),
    ]
    table(f"{plan.model} on {machine.name}; nothing is trained", ("", "planned"), rows)

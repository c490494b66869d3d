"""`asbuilt.plan(model, gpu)`: how well a machine serves a model, or what training it there takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from asbuilt.dtypes import short_name
from asbuilt.errors import InputError, one_of

if TYPE_CHECKING:
    from asbuilt.catalog.machine import Machine
    from asbuilt.checkpoint.given import Given
    from asbuilt.checkpoint.source import Source
    from asbuilt.families import Reading
    from asbuilt.plan import ServePlan, TrainPlan
    from asbuilt.plan.precision import Precision
    from asbuilt.plan.serve.efficiency import Timed

TASKS = ("serve", "train")
THIS = "this"
# Engines whose speed is that of asbuilt's own kernels.
OURS = ("ideal", "asbuilt")
Say = Callable[[str], None]


@overload
def plan(
    model: Given,
    gpu: Machine | str,
    *,
    task: Literal["serve"] = "serve",
    allow_unread: Sequence[str] = (),
    **options: Any,  # noqa: ANN401
) -> ServePlan: ...


@overload
def plan(
    model: Given,
    gpu: Machine | str,
    *,
    task: Literal["train"],
    allow_unread: Sequence[str] = (),
    **options: Any,  # noqa: ANN401
) -> TrainPlan: ...


def plan(
    model: Given,
    gpu: Machine | str,
    *,
    task: Literal["serve", "train"] = "serve",
    allow_unread: Sequence[str] = (),
    **options: Any,
) -> ServePlan | TrainPlan:
    """Returns a plan of serving a model on `gpu` (`task="serve"`) or of training it there ("train"); nothing is run.

    `model` is a spec, a built model, a source, a catalogue name or a path; `gpu` is a machine, a value of `--gpu`, or
    `this`, which is measured. Options are those of `asbuilt.plan.serve` (context, users, dtype ...) and of
    `asbuilt.plan.train` (gpus, tp, zero, seq ...). Weights are as published unless `dtype` is given. Raises
    InputError naming the invalid argument.
    """
    from asbuilt.checkpoint.given import source_of
    from asbuilt.plan import serve, train

    if task not in TASKS:
        raise InputError(field="task", value=task, allowed=one_of(TASKS))
    source = source_of(model, allow_unread=allow_unread)
    machine = _machine(gpu)
    if task == "train":
        return train(source.spec, machine, **options)
    if options.get("kv_dtype") is not None:
        options["kv_dtype"] = short_name(options["kv_dtype"])
    if gpu == THIS and options.get("timed") is None:
        options["timed"] = timed_here(source, options)
    options["dtype"] = precision(source, options.get("dtype"))
    return serve(source.spec, machine, **{"name": source.name, **options})


def timed_here(source: Source, options: Mapping[str, Any], say: Say = lambda text: None) -> Timed | None:
    """Returns the times of a model's packed weights on this machine, from stacks of layers that are timed now.

    None where `generate` would not keep them packed, its layers are no native call, another format or engine is
    planned, or efficiencies are given.
    """
    planned = options.get("dtype") is None and options.get("engine", OURS[0]) in OURS
    given = any(options.get(name, 1) != 1 for name in ("bandwidth_efficiency", "compute_efficiency"))
    if not planned or given or not source.has_weights or not source.spec.generates:
        return None
    from asbuilt.api.running import Running, contents_of
    from asbuilt.measure import native_stacks, report
    from asbuilt.plan.serve.efficiency import Timed

    contents = contents_of(source, Running(), (report.PREFILL, report.STEPS))
    if not contents.formats:
        return None
    say("timing stacks of layers")
    prompt, past, _ = report.sizes(source.spec)
    found = native_stacks.seconds_here(contents.spec, "fp32", prompt)
    return None if found is None else Timed(prompt=prompt, prefill=found[0], past=past, decode=found[1])


def precision(source: Source, dtype: object = None) -> Precision | str:
    """Returns the requested format, by default the one in which the weights are published, else bf16."""
    from asbuilt.plan.precision import Precision
    from asbuilt.plan.quantised import QUANTISED, mixed, published, quantised

    if isinstance(dtype, Precision):
        return dtype
    if dtype is not None and dtype != QUANTISED:
        return mixed(source.spec, dtype if isinstance(dtype, str) else short_name(dtype), source.family)
    found = published(source.reading, source.gguf)
    return found or ("bf16" if dtype is None else quantised(source.spec, None, None, source.family))


def serve_document(made: ServePlan, defaults: Mapping[str, int | bool]) -> dict[str, Any]:
    """Returns the document that `asbuilt plan serve --json` prints; `defaults` are those that the config left out."""
    return made.document() | {"defaults": defaults}


def train_document(made: TrainPlan, read: Reading | None) -> dict[str, Any]:
    """Returns the document that `asbuilt plan train --json` prints; `read` is None without a model."""
    from asbuilt.plan.train.report import document

    defaults = {} if read is None else read.defaults
    return document(made) | {"defaults": defaults, "published": packed_by(read)}


def packed_by(read: Reading | None) -> str | None:
    """Returns the method by which the published weights are quantised, None if they are not."""
    from asbuilt.plan.stored.methods import read_packing

    if read is None or read.quantization is None:
        return None
    try:
        return read_packing(read.quantization).method
    except InputError:  # training does not depend on it
        return str(read.quantization.get("quant_method"))


def _machine(gpu: Machine | str) -> Machine | str:
    if gpu != THIS:
        return gpu
    from asbuilt.measure import this_machine

    return this_machine()

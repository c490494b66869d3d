"""A training plan as plain data (its JSON document, whose keys are never removed) and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from asbuilt.plan.lines import Line
from asbuilt.plan.render import Cell, Table
from asbuilt.plan.train.options import ASSUMPTIONS, SIX
from asbuilt.shown import number

if TYPE_CHECKING:
    from asbuilt.plan.train.plan import TrainPlan, Trial
    from asbuilt.plan.train.search import Ranked

CONVENTIONS = {
    "not_counted": "what does not follow from a number of parameters: the real bytes and seconds are higher",
    "per_device_bytes": "a device of the fullest pipeline stage at its peak",
    "ladder": "the lines sum to per_device_bytes; running_bytes is the running sum",
    "state_bytes": "on that device, after ZeRO; offloaded state is included here and subtracted in the ladder",
    "activation_bytes": "saved by the blocks for the backward pass, of all micro-batches in flight",
    "logits_bytes": "one float32 tensor of the logits processed at once, on the stage that computes the loss",
    "unit": "what tokens, of a run, a step or a second, and FLOPs per token count: tokens, or pairs of image and text",
    "flops_total": "6ND: N active parameters, D tokens; of pairs each tower's N, and D its own tokens",
    "flops": "a product (a,b)x(b,c) counts 2abc; backward is twice forward, or once if the weight is frozen",
    "days": "for all tokens, at the time of a step, over the effective time if the step's is expected; "
    "days_of_layout is the same",
    "gpu_hours": "the same of all GPUs; published_run has those at the utilisation of the nearest published whole run, "
    "with its restarts, warm-ups and evaluations",
    "step": "expected: products, scores and passes over memory at what kernels reach of the rates, plus the bubble, "
    "exposed communication and the optimizer's step, which are modelled_seconds; with a kernel efficiency a lower "
    "bound, at the memory's and the links' full rates; or, if a utilisation is given, 6ND at that, and nothing else",
    "mfu": "model FLOPs of a step, without recomputation, relative to what all GPUs could do in its time at the dense "
    "rate: by 6ND, by every product, and with masked pairs skipped",
    "communication": "bytes that one device sends per step, with ring algorithms",
    "layout": "GPUs = dp x tp x pp x cp; ep takes its ranks from dp x cp",
    "batch": "sequences of one micro-batch of one replica; a step has batch x accumulate x dp",
    "units": "1 GB = 10^9 bytes, 1 GiB = 2^30 bytes",
}


def document(plan: TrainPlan) -> dict[str, Any]:
    """Returns the whole plan as plain data."""
    trial, options, layout = plan.trial, plan.trial.options, plan.trial.layout
    step, stage = trial.step, trial.fullest
    return {
        "fits": plan.fits,
        "not_counted": list(plan.not_counted),
        "model": plan.model,
        "gpu": plan.machine.name,
        "gpus": layout.gpus,
        "parameters": {"total": plan.parameters, "active": plan.active},
        "ladder": _ladder(plan.ladder[:-1]),
        "state_bytes": {
            "weights": plan.state.weights,
            "gradients": plan.state.gradients,
            "master": plan.state.master,
            "optimizer": sum(plan.state.optimizer.values()),
            "optimizer_pieces": dict(plan.state.optimizer),
            "total": plan.state.total,
        },
        "activation_bytes": plan.activation_bytes,
        "logits_bytes": plan.logits_bytes,
        "per_device_bytes": plan.per_device_bytes,
        "host_bytes": stage.on_host,
        "memory_bytes": trial.memory,
        "reserve_bytes": trial.reserve,
        "flops_total": plan.flops_total,
        "flops_per_token": plan.flops_per_token,
        "unit": plan.unit,
        "tokens": plan.tokens,
        "chinchilla_tokens": None if plan.unit == "pairs" else plan.chinchilla_tokens,
        "days": plan.days,
        "days_of_layout": plan.days,
        "gpu_hours": plan.gpu_hours,
        "published_run": {
            "name": plan.published.name,
            "mfu": plan.published.mfu,
            "gpu_hours": plan.published_hours,
            "source": plan.published.source,
        },
        "money": plan.money,
        "layout": {
            "dp": layout.dp,
            "tp": layout.tp,
            "pp": layout.pp,
            "ep": layout.ep,
            "cp": layout.cp,
            "zero": layout.zero,
            "hsdp": layout.hsdp,
        },
        "stage": {"fullest": stage.section.stage.number, "micro_batches_in_flight": stage.in_flight},
        "step": {
            "seconds": step.seconds,
            "tokens": step.tokens,
            "tokens_per_second": step.tokens / step.seconds,
            "modelled_seconds": sum(step.modelled.values()),
            "compute_seconds": step.compute_seconds * options.accumulate,
            "computing_seconds": {} if step.speed.efficiency is not None else _all(step.computing, options.accumulate),
            "efficiency": asdict(step.speed.assumed) if step.speed.efficiency is None else step.speed.efficiency,
            "bubble": step.bubble,
            "schedule": step.job.schedule,
            "chunks_of_a_stage": step.job.interleave,
            "waiting_for_data_seconds": step.exposed_seconds,
            "optimizer_seconds": step.optimizer_seconds,
            "breakdown_seconds": step.breakdown,
            "mfu": step.mfu,
        },
        "communication": {
            name: {
                "bytes": traffic.bytes,
                "seconds": traffic.seconds,
                "formula": traffic.formula,
                "source": traffic.source,
            }
            for name, traffic in step.communication.items()
        },
        "suggestions": [
            s.plain("change", "effect", "fits", "per_device_bytes", "step_seconds") for s in plan.suggestions
        ],
        "options": asdict(options),
        "conventions": CONVENTIONS,
        "assumptions": ASSUMPTIONS,
    }


def _all(seconds: dict[str, float], times: int) -> dict[str, float]:
    return {name: times * each for name, each in seconds.items()}


def _ladder(lines: Sequence[Line]) -> list[dict[str, Any]]:
    steps, running = [], 0
    for line in lines:
        running += int(line.value)
        steps.append(
            {
                "line": line.name,
                "bytes": line.value,
                "running_bytes": running,
                "formula": line.symbols,
                "numbers": dict(line.numbers),
                "source": line.source,
                "note": line.note,
            }
        )
    return steps


def ranked_document(ranked: Ranked) -> dict[str, Any]:
    """Returns the layouts that fit as plain data, fastest first."""
    return {
        "tried": ranked.tried,
        "fitting": ranked.fitting,
        "layouts": [
            {
                "layout": {name: getattr(trial.layout, name) for name in ("dp", "tp", "pp", "ep", "cp", "zero")},
                "checkpointing": trial.options.checkpointing,
                "accumulate": trial.options.accumulate,
                "per_device_bytes": trial.fullest.total,
                "step_seconds": trial.step.seconds,
                "tokens_per_second": trial.step.tokens / trial.step.seconds,
                "options": said(trial),
            }
            for trial in ranked.trials
        ],
    }


def said(trial: Trial) -> str:
    """Returns the options of this layout, to be copied."""
    o = trial.options
    batch = f" --micro-batch {o.batch}" if o.batch > 1 else ""
    return f"--gpus {o.gpus} {trial.layout.said}{batch} --accumulate {o.accumulate} --checkpointing {o.checkpointing}"


def tables(plan: TrainPlan) -> list[Table]:
    """Returns the plan as tables: the answer, memory, time, the run, and suggestions."""
    found = [_answer(plan), _memory(plan), _against_capacity(plan), _step(plan), _run(plan)]
    if plan.not_counted:
        rows = [(what,) for what in plan.not_counted]
        found.append(Table("Not counted without a MODEL", ("what",), rows))
    if plan.suggestions:
        rows = [(s.change, "yes" if s.fits else "no", s.effect) for s in plan.suggestions]
        found.append(Table("What to change, best first", ("change", "fits", "effect"), rows))
    return found


def _gb(nbytes: float) -> tuple[str, str]:
    return f"{nbytes / 1e9:,.3f}", f"{nbytes / 2**30:,.3f}"


def _answer(plan: TrainPlan) -> Table:
    """What is asked first: whether it fits, how long a step and the run take, and what they cost."""
    trial, step, floor = plan.trial, plan.trial.step, at_least(plan)
    gpus = plan.trial.layout.gpus
    usable = trial.memory - trial.reserve
    room = f"{plan.per_device_bytes / 2**30:,.1f} of {usable / 2**30:,.1f} GiB"
    counted = " of what is counted" if plan.not_counted else ""
    mfu = next(iter(step.mfu.values()))
    paid = "" if plan.money is None else f", {plan.money:,.0f} at {trial.options.price:g} per GPU-hour"
    rows: list[tuple[Cell, ...]] = [
        ("memory of a GPU" + counted, room, "fits" if plan.fits else "does not fit"),
        ("one step" + floor, _time(step.seconds), f"{step.tokens:,} {plan.unit}, {mfu:.0%} model FLOPs utilisation"),
        (
            "the run" + floor,
            f"{number(plan.days, 3)} days",
            f"{number(plan.gpu_hours, 4)} GPU hours for {_count(plan.tokens)} {plan.unit}{paid}",
        ),
        (
            "at a published utilisation",
            f"{number(plan.published_hours / 24 / gpus, 3)} days",
            f"{number(plan.published_hours, 4)} GPU hours: {plan.published.mfu:.0%}, as all of {plan.published.name}'s",
        ),
    ]
    return Table(f"Training {plan.model} on {gpus} x {plan.machine.name}", ("", "answer", ""), rows)


def _count(tokens: float) -> str:
    """Returns 15T or 160.6B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if tokens >= size:
            return f"{number(tokens / size, 4)}{letter}"
    return f"{tokens:,.0f}"


def _spent(plan: TrainPlan) -> str:
    """Returns the basis of a run's days."""
    said = "at this layout's step time"
    return said if plan.effective == 1 else f"{said}, {plan.effective:.0%} of the time"


def _time(seconds: float) -> str:
    """Returns 2.54 s or 13.1 ms."""
    return f"{number(seconds, 3)} s" if seconds >= 1 else f"{number(seconds * 1e3, 3)} ms"


def _memory(plan: TrainPlan) -> Table:
    layout, stage = plan.trial.layout, plan.trial.fullest
    rows: list[tuple[Cell, ...]] = []
    running = 0
    for line in plan.ladder[:-1]:
        running += int(line.value)
        rows.append((line.name, int(line.value), *_gb(line.value), f"{running / 1e9:,.1f}", line.symbols or line.note))
    rows.append(("per device", plan.per_device_bytes, *_gb(plan.per_device_bytes), "", ""))
    where = f", pipeline stage {stage.section.stage.number + 1} of {layout.pp}" if layout.pp > 1 else ""
    columns = ("memory", "bytes", "GB", "GiB", "GB so far", "formula")
    return Table(
        f"{plan.model} on {layout.gpus} x {plan.machine.name}: the fullest device{where}",
        columns,
        rows,
        drop=("GB so far", "GiB", "formula"),
    )


def _against_capacity(plan: TrainPlan) -> Table:
    trial = plan.trial
    left = trial.memory - trial.reserve - plan.per_device_bytes
    rows = [
        ("device memory", *_gb(trial.memory)),
        (f"reserve ({trial.options.reserve:.0%})", *_gb(trial.reserve)),
        ("training", *_gb(plan.per_device_bytes)),
        ("left over" if plan.fits else "over", *_gb(abs(left))),
    ]
    fits = "What is counted fits" if plan.not_counted else "It fits"
    return Table(fits if plan.fits else "It does not fit", ("", "GB", "GiB"), rows)


def _step(plan: TrainPlan) -> Table:
    step = plan.trial.step
    given = step.speed.utilisation
    takes = {name: number(seconds, 4) for name, seconds in step.breakdown.items()}
    rate = f"{number(step.speed.rate / 1e12, 6)} TFLOP/s {step.speed.precision}"
    rows: list[tuple[Cell, ...]] = []
    if given is None and step.speed.efficiency is not None:
        rows.append(("computing", "", "", takes["computing"], f"{rate} at {step.speed.efficiency:.0%}"))
    elif given is None:
        shares = {
            "products": f"{rate} at {step.speed.assumed.products:.0%}",
            "scores": f"the same at {step.speed.assumed.scores:.0%}",
            "passes": f"over saved tensors, at {step.speed.assumed.memory:.0%} of the bandwidth",
        }
        if step.job.fp8:
            fp8 = f"{number(step.speed.narrow / 1e12, 6)} TFLOP/s fp8 at {step.speed.assumed.fp8:.0%}"
            shares["products"] += f", of blocks {fp8}"
        for name, seconds in _all(step.computing, step.job.accumulate).items():
            rows.append((name, "", "", number(seconds, 4), shares[name]))
    for name, traffic in step.communication.items():
        if traffic.bytes:
            sent = f"{traffic.bytes / 1e9:,.3f}", number(traffic.seconds, 4)
            rows.append((name, *sent, takes.get(name, ""), traffic.formula))
    if step.bubble:
        share = f"{step.bubble:.1%} of the micro-batches' time, {step.job.schedule}"
        share += f", {step.job.interleave} chunks per stage" if step.job.interleave > 1 else ""
        rows.append(("pipeline bubble", "", "", takes.get("bubble", ""), share))
    if given is None:
        rows.append(("optimizer", "", "", takes["optimizer"], "its state read and written once"))
    pace = f"{step.tokens:,} {plan.unit}, {step.tokens / step.seconds:,.0f} {plan.unit}/s"
    rows.append(("one step" + at_least(plan), "", "", number(step.seconds, 4), pace))
    for name, share in step.mfu.items():
        rows.append((f"model FLOPs utilisation, {MFU[name]}", "", "", "", f"{share:.1%} of {rate}"))
    title = "One step of one device" if given is None else f"One step, at {given:.0%} of the dense rate over all of it"
    return Table(
        title,
        ("", "GB sent", "seconds on the link", "seconds of the step", ""),
        rows,
        drop=("GB sent", "seconds on the link"),
    )


PAIRS = "as CLIP's 32 epochs"
MFU = {"6ND": "6ND", "exact": "full scores", "exact_causal": "masked pairs skipped"}


def at_least(plan: TrainPlan) -> str:
    """Returns the suffix of a lower bound: one efficiency of all computing, or a number of parameters alone."""
    speed = plan.trial.step.speed
    lower = speed.efficiency is not None or bool(plan.not_counted)
    return ", at least" if lower and speed.utilisation is None else ""


def _run(plan: TrainPlan) -> Table:
    per_token = plan.flops_per_token
    paired, given = plan.unit == "pairs", "as given" if plan.trial.options.tokens else None
    counted, basis = f"{plan.tokens:,.0f}", f"{SIX} x {plan.active:,} x {plan.tokens:,.0f}"
    rows: list[tuple[Cell, ...]] = [(plan.unit, counted, given or (PAIRS if paired else "Chinchilla-optimal"))]
    if paired:
        basis = f"{number(per_token['6ND'], 4)} a pair"
    else:
        rows.append(("Chinchilla-optimal tokens", f"{plan.chinchilla_tokens:,}", ASSUMPTIONS["chinchilla"]))
    rows.append(("FLOPs, 6ND", number(float(plan.flops_total), 3), basis))
    for name, words in (("exact", "full scores"), ("exact_causal", "masked pairs skipped")):
        if name in per_token:
            rows.append(
                (f"FLOPs, exact, {words}", number(float(plan.tokens * per_token[name]), 3), "from every product")
            )
    rows.append(("days" + at_least(plan), f"{plan.days:,.2f}", _spent(plan)))
    rows.append(("GPU hours" + at_least(plan), f"{plan.gpu_hours:,.0f}", "the same, of all GPUs"))
    run = plan.published
    rows.append(
        (
            f"GPU hours at {run.mfu:.1%}",
            f"{plan.published_hours:,.0f}",
            f"what the whole run of {run.name} reached: {run.source}",
        )
    )
    if plan.money is not None:
        price = plan.trial.options.price
        rows.append(("money" + at_least(plan), f"{plan.money:,.0f}", f"at {price:g} per GPU-hour"))
    return Table("The run", ("", "figure", "basis"), rows)


def ranked_table(ranked: Ranked) -> Table:
    """Returns the layouts that fit, fastest first."""
    rows = [
        (
            said(trial),
            f"{trial.fullest.total / 1e9:,.1f}",
            number(trial.step.seconds, 4),
            f"{trial.step.tokens / trial.step.seconds / trial.layout.gpus:,.0f}",
        )
        for trial in ranked.trials
    ]
    title = f"{ranked.fitting} of {ranked.tried} layouts fit; the fastest first"
    unit = ranked.trials[0].step.unit if ranked.trials else "tokens"
    return Table(title, ("options", "GB per device", "seconds per step", f"{unit}/s per GPU"), rows)

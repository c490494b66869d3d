"""Training plans: memory of the fullest device, FLOPs, time, cost, and what to change.

Every figure of the model comes from its parts' declarations; assumptions are in `ASSUMPTIONS` and in the options.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from asbuilt.catalog.machine import Machine
from asbuilt.catalog.slices import require_undivided
from asbuilt.errors import InputError, one_of
from asbuilt.plan.lines import Line
from asbuilt.plan.network import HOST, NETWORK, joining
from asbuilt.plan.placement import Placement
from asbuilt.plan.suggestion import Suggestion
from asbuilt.plan.train.computing import Speed
from asbuilt.plan.train.efficiency import reached
from asbuilt.plan.train.ladder import against, ladder, logits
from asbuilt.plan.train.optimizers import State
from asbuilt.plan.train.options import ASSUMPTIONS, CHINCHILLA, CLIP_PAIRS, Options, require_read, stepping
from asbuilt.plan.train.published import SECONDS_AN_HOUR, Run, nearest
from asbuilt.plan.train.stages import StageMemory, fullest
from asbuilt.plan.train.step import TrainingStep
from asbuilt.plan.train.subject import UNSAID, Subject, Unit
from asbuilt.spec import Model

SECONDS_A_DAY = 86400


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One layout: what its fullest device holds, and the time of a step."""

    options: Options
    layout: Placement
    stages: list[StageMemory]
    step: TrainingStep
    memory: int
    memory_source: str

    @cached_property
    def fullest(self) -> StageMemory:
        """The stage whose devices hold the most."""
        return fullest(self.stages)

    @property
    def reserve(self) -> int:
        """Memory that is not used."""
        return math.ceil(self.options.reserve * self.memory)

    @property
    def fits(self) -> bool:
        """Whether the fullest device holds it."""
        return self.fullest.total + self.reserve <= self.memory


def attempt(subject: Subject, machine: Machine, options: Options) -> Trial:
    """Returns the trial of `options`; raises InputError for impossible ones."""
    if options.offload != "none" and (machine.kind == "cpu" or machine.shared_memory):
        problem = f"{machine.name} has no memory beside the host's"
        raise InputError(problem, field="offload", value=options.offload, allowed="none", fix="leave it out")
    found = subject.stages(options)
    step = TrainingStep(
        stages=found,
        layout=found[0].layout,
        job=found[0].job,
        speed=speed_of(machine, options),
        needed=subject.flops(options),
        each=subject.each(options),
    )
    return Trial(
        options=options,
        layout=step.layout,
        stages=found,
        step=step,
        memory=machine.memory_bytes(),
        memory_source=machine.source,
    )


def speed_of(machine: Machine, options: Options) -> Speed:
    """Returns the machine's rate at the run's precision and its links, with the source of each."""
    rate, precision = machine.rate(options.dtype)
    narrow, how = machine.rate("fp8")
    if options.fp8 and how != "fp8":
        raise InputError(
            f"no rate is known for fp8 on {machine.name}",
            field="fp8",
            value=True,
            allowed="a machine that has one",
            fix=f"state one: --gpu {machine.name},fp8=100T",
        )
    network = joining(
        machine,
        options.gpus,
        options.node,
        options.network,
        options.host,
        {
            "between": ASSUMPTIONS["network"] if options.network == NETWORK else "as given",
            "host": ASSUMPTIONS["host"] if options.host == HOST else "as given",
        },
    )
    assumed = reached(machine)
    if options.attention_efficiency is not None:
        assumed = replace(assumed, scores=options.attention_efficiency)
    if options.kernel_efficiency is None:  # otherwise a lower bound, at full rates
        network = network.reaching(assumed.link)
    return Speed(
        rate=rate,
        precision=precision,
        narrow=narrow,
        memory=machine.bandwidth,
        efficiency=options.kernel_efficiency,
        assumed=assumed,
        utilisation=options.utilisation,
        network=network,
    )


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """A training plan: `lines` derive it; memory figures are those of the fullest device, summed up by the ladder.

    `unit` is what all that is counted in tokens is: of a model that compares images and texts, pairs of them.
    """

    model: str
    machine: Machine
    trial: Trial
    parameters: int
    active: int
    unit: Unit
    flops_per_token: dict[str, float]
    ladder: tuple[Line, ...]
    suggestions: tuple[Suggestion, ...] = ()
    not_counted: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it fits in memory minus the reserve."""
        return self.trial.fits

    @property
    def state(self) -> State:
        """Bytes of weights, gradients, master weights and optimizer state on the fullest device."""
        return self.trial.fullest.state

    @property
    def activation_bytes(self) -> int:
        """Bytes that the blocks save for the backward pass."""
        return self.trial.fullest.activations

    @property
    def logits_bytes(self) -> int:
        """Bytes of one float32 tensor of the logits processed at once, on the stage that computes the loss."""
        return max(stage.logits for stage in self.trial.stages)

    @property
    def per_device_bytes(self) -> int:
        """Total bytes of the fullest device."""
        return self.trial.fullest.total

    @property
    def tokens(self) -> float:
        """The training tokens: as given, or the Chinchilla-optimal number; of pairs that of CLIP's training."""
        return self.trial.options.tokens or (CLIP_PAIRS if self.unit == "pairs" else self.chinchilla_tokens)

    @property
    def chinchilla_tokens(self) -> int:
        """20 tokens per active parameter."""
        return CHINCHILLA * self.active

    @property
    def flops_total(self) -> float:
        """6ND; of a pair, of each tower with its own tokens."""
        return self.tokens * self.flops_per_token["6ND"]

    @property
    def days(self) -> float:
        """Days for all tokens, at the time of a step, of which `effective` is spent."""
        step = self.trial.step
        return self.tokens / step.tokens * step.seconds / SECONDS_A_DAY / self.effective

    @property
    def effective(self) -> float:
        """The fraction of a run's time that is steps; 1 of a lower bound, and at a given utilisation."""
        speed = self.trial.step.speed
        expected = speed.efficiency is None and speed.utilisation is None and not self.not_counted
        return self.trial.options.effective_time if expected else 1.0

    @property
    def gpu_hours(self) -> float:
        """GPU hours for all tokens, as `days`."""
        return self.days * 24 * self.trial.layout.gpus

    @property
    def published(self) -> Run:
        """The published whole run that is nearest in size, on such machines if there is one."""
        return nearest(self.machine, self.active)

    @property
    def published_hours(self) -> float:
        """GPU hours for all tokens at the utilisation of that whole run, by 6ND."""
        rate, _ = self.machine.rate("bf16")
        return self.flops_total / (rate * self.published.mfu) / SECONDS_AN_HOUR

    @property
    def money(self) -> float | None:
        """The cost of the run at the price of a GPU-hour."""
        price = self.trial.options.price
        return None if price is None else self.days * 24 * self.trial.layout.gpus * price

    @property
    def lines(self) -> tuple[Line, ...]:
        """Every line of the derivation, in logical order."""
        trial = self.trial
        return (*logits(trial), *self.ladder, *against(trial), *trial.step.lines(), *self._run())

    def _run(self) -> Iterator[Line]:
        step, gpus, unit = self.trial.step, self.trial.layout.gpus, self.unit
        one = f"FLOPs a {unit.removesuffix('s')}"
        for name, share in step.mfu.items():
            yield Line(
                name=f"model FLOPs utilisation, {name}",
                unit="of the dense rate",
                value=share,
                formula=f"{{{one}}} × {{{unit} a step}} / ({{GPUs}} × {{rate}} × {{one step}})",
                numbers={
                    one: step.needed[name],
                    f"{unit} a step": step.tokens,
                    "GPUs": gpus,
                    "rate": step.speed.rate,
                    "one step": step.seconds,
                },
            )
        yield from self._needed()
        yield Line(
            name="days",
            unit="days",
            value=self.days,
            formula=f"{{{unit}}} / {{{unit} a step}} × {{one step}} / {{seconds a day}} / {{effective time}}",
            source=ASSUMPTIONS["effective time"] if self.effective < 1 else "",
            numbers={
                unit: self.tokens,
                f"{unit} a step": step.tokens,
                "one step": step.seconds,
                "seconds a day": SECONDS_A_DAY,
                "effective time": self.effective,
            },
        )
        if self.money is not None:
            yield Line(
                name="money",
                unit="",
                value=self.money,
                formula="{days} × 24 × {GPUs} × {price of an hour}",
                numbers={"days": self.days, "GPUs": gpus, "price of an hour": self.trial.options.price or 0.0},
            )

    def _needed(self) -> Iterator[Line]:
        if self.unit == "pairs":
            yield Line(
                name="FLOPs, 6ND",
                unit="FLOPs",
                value=self.flops_total,
                formula="{FLOPs a pair} × {pairs}",
                numbers={"FLOPs a pair": self.flops_per_token["6ND"], "pairs": self.tokens},
                note=ASSUMPTIONS["pairs"],
            )
            return
        yield Line(
            name="Chinchilla-optimal tokens",
            unit="tokens",
            value=self.chinchilla_tokens,
            formula="{tokens a parameter} × {parameters}",
            source=ASSUMPTIONS["chinchilla"],
            numbers={"tokens a parameter": CHINCHILLA, "parameters": self.active},
        )
        yield Line(
            name="FLOPs, 6ND",
            unit="FLOPs",
            value=self.flops_total,
            formula="6 × {parameters} × {tokens}",
            numbers={"parameters": self.active, "tokens": self.tokens},
            note=ASSUMPTIONS["6ND"],
        )

    def _repr_html_(self) -> str:
        from asbuilt.plan.render import html
        from asbuilt.plan.train.report import tables

        return html(tables(self))


def train(
    model: Model | str | None,
    gpu: Machine | str,
    *,
    parameters: float | None = None,
    options: Options | None = None,
    **changes: Any,  # noqa: ANN401  fields of Options, which checks them
) -> TrainPlan:
    """Returns the plan of training `model`, or a bare number of `parameters`, on `gpu`.

    `changes` are fields of `Options`, or `tokens_per_step` in place of `accumulate`; `seq` is by default 4096, or the
    model's context if shorter. Of a model that compares images and texts, tokens are pairs of them. Raises
    InputError naming an unknown field or an impossible value.
    """
    from asbuilt.catalog import find, machines

    spec = find(model).spec() if isinstance(model, str) else model
    subject = Subject(spec, parameters)
    machine = machines.resolve(gpu) if isinstance(gpu, str) else gpu
    known = {field.name for field in fields(Options)}
    once = changes.pop("tokens_per_step", None)
    for name in changes:
        if name not in known:
            raise InputError(
                "unknown option", field="options", value=name, allowed=one_of(sorted((*known, "tokens_per_step")))
            )
    if options is None and "seq" not in changes and spec is not None:
        changes["seq"] = min(Options.seq, spec.max_positions)
    made = replace(options or Options(), **changes)
    require_read(made)
    if once is not None:
        made = stepping(made, once, subject.each(made), given="accumulate" in changes)
    return plan(subject, machine, made)


def plan(subject: Subject, machine: Machine, options: Options) -> TrainPlan:
    """Returns the plan, with suggestions if it does not fit."""
    from asbuilt.plan.train.search import suggest

    require_undivided(machine, options.gpus, "gpus")
    trial = attempt(subject, machine, options)
    return TrainPlan(
        model=subject.model.name if subject.model is not None else f"{subject.total:,} parameters",
        machine=machine,
        trial=trial,
        parameters=subject.total,
        active=subject.active,
        unit=subject.unit,
        flops_per_token=subject.flops(options),
        ladder=tuple(ladder(trial)),
        suggestions=() if trial.fits else tuple(suggest(subject, machine, trial)),
        not_counted=() if subject.model is not None else UNSAID,
    )

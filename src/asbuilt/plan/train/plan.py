"""Training plans: memory of the fullest device, FLOPs, time, cost, and what to change.

Every figure of the model comes from its parts' declarations; assumptions are in `ASSUMPTIONS` and in the options.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from asbuilt import cost
from asbuilt.catalog.machine import Machine
from asbuilt.errors import InputError, one_of
from asbuilt.plan.devices import known
from asbuilt.plan.lines import Line
from asbuilt.plan.network import NETWORK, joining
from asbuilt.plan.placement import Placement, divisors
from asbuilt.plan.suggestion import Suggestion
from asbuilt.plan.train.ladder import against, ladder, logits
from asbuilt.plan.train.optimizers import BY_SHAPE, State
from asbuilt.plan.train.options import ASSUMPTIONS, CHINCHILLA, HOST, SIX, Options, require_number
from asbuilt.plan.train.shares import Adapters, Piece, Shares, Slice, Work, shares, split
from asbuilt.plan.train.stages import Section, StageMemory, fullest, sections
from asbuilt.plan.train.step import Speed, TrainingStep
from asbuilt.spec import LanguageModel, Model, Part, Pass, VisionLanguageModel, adapted
from asbuilt.spec.adapters import is_pattern
from asbuilt.spec.part import Weight

SECONDS_A_DAY = 86400
LARGEST_TP = 256
# What does not follow from a number of parameters alone.
UNSAID = (
    "activations, the loss, and working memory of a block's backward pass: they depend on widths, depth and vocabulary",
    "blocks gathered by ZeRO-3, gradients before ZeRO-2 and 3 scatter them",
    "attention scores",
    "traffic of tensor, context and pipeline parallelism",
)


class Subject:
    """What is trained: a model, or only a number of parameters. Caches the folds that layouts share."""

    def __init__(self, model: Model | None = None, parameters: float | None = None) -> None:
        if model is None and parameters is not None:
            require_number("parameters", parameters, 0.0, 1e15)
            if parameters < 1:
                raise InputError(field="parameters", value=parameters, allowed="a number of at least 1")
        elif not isinstance(model, Model):
            raise InputError(
                "only a model of one stack of blocks can be planned", field="model", value=type(model).__name__
            )
        elif model.gives == "similarities" or ("audio" in model.reads and "images" not in model.reads):
            pairs = "sounds" if "audio" in model.reads else "images"
            raise InputError(
                f"training on pairs of {pairs} and texts is not planned",
                field="MODEL",
                value=model.name,
                fix="`asbuilt describe` shows the costs of a pass",
            )
        self.model = model
        self.total = _folded(model, cost.total_parameters) if model is not None else int(parameters or 0)
        self.active = self.total
        if model is not None:
            self.active = _of_run(model, Pass(tokens=1), lambda part, _: cost.active_parameters(part))
        self._kept: dict[tuple[object, ...], Shares] = {}
        self._pieces: dict[tuple[object, ...], Piece] = {}
        self._adapted: dict[tuple[object, ...], Model] = {}
        self._sections: dict[tuple[int, int], list[Section]] = {}

    @cached_property
    def experts(self) -> int:
        """The greatest common divisor of the numbers of experts; 1 without mixtures of experts."""
        nodes = known(self.model).tree(Placement()).below() if self.model is not None else ()
        counts = [n for node in nodes for n in node.own.spreads().values()]
        return math.gcd(*counts) if counts else 1

    def stages(self, options: Options) -> list[StageMemory]:
        """Returns the distinct stages; raises InputError for a degree that the model or the GPUs do not allow."""
        layout, shares = options.layout, self.shares(options)
        job = options.job(chunks(options, len(shares.blocks)))
        key = (id(shares), layout.pp)
        if key not in self._sections:
            self._sections[key] = sections(shares, layout.pp)
        return [StageMemory(section=section, layout=layout, job=job) for section in self._sections[key]]

    def shares(self, options: Options) -> Shares:
        """Returns one device's share of each piece; raises InputError for a degree that the model does not allow."""
        o = options
        pp = o.pp if self.model is None else None
        self._check_stages(o)
        alike = (o.sequence_parallel, o.divide_vocabulary)
        key = (o.batch, o.seq, o.tp, o.cp, o.ep, pp, o.recipe, o.adapters, *alike)
        if key not in self._kept:
            self._check(o)
            run = Pass(tokens=o.seq, batch=o.batch, width=o.width)
            at = Slice(run=run, tp=o.tp, cp=o.cp, ep=o.ep, sequence=alike[0], vocabulary=alike[1])
            if self.model is None:
                self._kept[key] = self._bare(o, at)
            else:
                self._kept[key] = shares(self._with(o.adapters), o.recipe, o.adapters, at, self._pieces)
        return self._kept[key]

    def _with(self, adapters: Adapters | None) -> Model:
        """Returns the model with its adapters; raises InputError for targets that are none."""
        assert self.model is not None
        if adapters is None:
            return self.model
        key = (adapters.rank, adapters.targets)
        if key not in self._adapted:
            small, order = known(self.model).census.small, known(self.model).order  # equal blocks once
            if any(map(is_pattern, adapters.targets or ())):  # which may name blocks
                small, order = self.model, tuple(range(len(self.model.blocks)))
            assert isinstance(small, Model)
            # what makes something of images and sounds is not trained
            text = small.text if isinstance(small, VisionLanguageModel) else small
            found = adapted(text, adapters.rank, float(adapters.rank), adapters.targets)
            found = replace(found, blocks=tuple(found.blocks[kind] for kind in order))
            if isinstance(self.model, VisionLanguageModel) and isinstance(found, LanguageModel):
                found = VisionLanguageModel.of(found, self.model.vision, self.model.hearing)
            self._adapted[key] = found
        return self._adapted[key]

    def _check_stages(self, o: Options) -> None:
        encoder = self.model is not None and "source" in self.model.reads
        for name in ("pp", "cp") if encoder else ():
            if getattr(o, name) > 1:
                raise InputError(
                    "not supported for a model with an encoder", field=name, value=getattr(o, name), allowed="1"
                )
        if self.model is not None and self.model.holders and o.pp > 1:
            raise InputError(
                "not supported for a model whose blocks share weights: each stage needs them and their gradients",
                field="pp",
                value=o.pp,
                allowed="1",
            )
        if self.model is not None and o.pp > self.model.n_layers:
            raise InputError(
                "more stages than blocks", field="pp", value=o.pp, allowed=f"1 to n_layers = {self.model.n_layers}"
            )

    def _check(self, o: Options) -> None:
        if self.model is not None and "tokens" not in self.model.reads and o.seq != self.model.max_positions:
            raise InputError(
                "the number of tokens of an image is fixed",
                field="seq",
                value=o.seq,
                allowed=str(self.model.max_positions),
            )
        if o.seq % o.cp:
            allowed = one_of(map(str, divisors(o.seq)))
            raise InputError(f"does not divide seq = {o.seq} tokens", field="cp", value=o.cp, allowed=allowed)
        if self.experts % o.ep:
            allowed = one_of(map(str, divisors(self.experts)))
            said = f"does not divide {self.experts} experts" if self.experts > 1 else "this model has no experts"
            raise InputError(said, field="ep", value=o.ep, allowed=allowed)
        if self.model is None:
            self._check_bare(o)
        elif not self.divides(o.tp):
            allowed = [tp for tp in range(1, LARGEST_TP + 1) if self.divides(tp)]
            raise InputError("does not divide every part", field="tp", value=o.tp, allowed=one_of(map(str, allowed)))

    def divides(self, tp: int) -> bool:
        """Returns whether every part can be divided over `tp` devices."""
        assert self.model is not None
        return known(self.model).divides(tp)

    def _check_bare(self, o: Options) -> None:
        if o.optimizer in BY_SHAPE:
            raise InputError(
                "its state depends on the weights' shapes, which a number of parameters does not have",
                field="optimizer",
                value=o.optimizer,
                allowed="adamw, adamw-8bit or sgd-momentum",
                fix="name a MODEL",
            )
        if o.adapters is not None:
            raise InputError(
                "adapters need matrices, which a number of parameters does not have",
                field="lora",
                value=o.adapters.rank,
                fix="name a MODEL",
            )

    def _bare(self, o: Options, at: Slice) -> Shares:
        """Returns the shares of a number of parameters, evenly divided: state, 2N FLOPs per token, no activations."""
        own = Weight(shape=(split(self.total, o.tp * o.pp),), role="matrix")
        work = Work(trained=split(2 * own.size * at.run.rows, o.cp))
        piece = Piece(dense=o.recipe.trained(own, "other"), work=work)
        return Shares(
            before=Piece(),
            kinds=(piece,),
            blocks=(0,) * o.pp,
            after=Piece(),
            copied=State(),
            stream=0,
            logits=0,
            rows=0,
        )

    def flops(self, options: Options) -> dict[str, float]:
        """Returns training FLOPs per token by convention, of all devices together, without recomputation."""
        found: dict[str, float] = {"6ND": SIX * self.active}
        if self.model is not None:
            alone = replace(options, batch=1, tp=1, ep=1, cp=1)
            (whole,) = sections(self.shares(alone), 1)
            for name, causal in (("exact", False), ("exact_causal", True)):
                made = sum(count * piece.work.training(causal=causal) for piece, count in whole.counted)
                found[name] = made / options.seq
        return found


def chunks(options: Options, blocks: int) -> int:
    """Returns the number of model chunks per pipeline stage: as given, or as many as blocks and schedule allow.

    Raises InputError for more chunks than blocks per stage, and if the interleaved schedule has incomplete rounds.
    """
    most = split(blocks, options.pp)
    whole = options.pp > 1 and options.accumulate % options.pp == 0
    if options.interleave is None:
        return most if whole else 1
    if options.interleave > most:
        raise InputError(
            "more chunks than a stage has blocks", field="interleave", value=options.interleave, allowed=f"1 to {most}"
        )
    if options.interleave > 1 and not whole:
        raise InputError(
            "an interleaved schedule needs micro-batches in multiples of the stages",
            field="interleave",
            value=options.interleave,
            allowed="1",
            fix=f"set --accumulate to a multiple of pp = {options.pp}",
        )
    return options.interleave


def _folded(model: Model, figure: Callable[[Part], int]) -> int:
    """Returns the sum of a figure over the model's children, equal ones computed once."""
    counted = Counter(child for _, child in model.children())
    return sum(count * figure(child) for child, count in counted.items())


def _of_run(model: Model, run: Pass, figure: Callable[[Part, Pass], int]) -> int:
    """Returns the sum of a figure over the model's children that run, equal ones with equal runs computed once."""
    seen = ((child, model.child_run(name, run)) for name, child in model.children())
    counted = Counter((child, own) for child, own in seen if own is not None)
    return sum(count * figure(child, own) for (child, own), count in counted.items())


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
    found = subject.stages(options)
    step = TrainingStep(
        stages=found,
        layout=found[0].layout,
        job=found[0].job,
        speed=speed_of(machine, options),
        needed=subject.flops(options),
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
    return Speed(
        rate=rate,
        precision=precision,
        memory=machine.bandwidth,
        efficiency=options.kernel_efficiency,
        utilisation=options.utilisation,
        network=network,
    )


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """A training plan: `lines` derive it; memory figures are those of the fullest device, summed up by the ladder."""

    model: str
    machine: Machine
    trial: Trial
    parameters: int
    active: int
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
        """The training tokens: as given, or the Chinchilla-optimal number."""
        return self.trial.options.tokens or self.chinchilla_tokens

    @property
    def chinchilla_tokens(self) -> int:
        """20 tokens per active parameter."""
        return CHINCHILLA * self.active

    @property
    def flops_total(self) -> float:
        """6ND."""
        return self.tokens * self.flops_per_token["6ND"]

    @property
    def days(self) -> float:
        """Days for all tokens, at the time of a step."""
        step = self.trial.step
        return self.tokens / step.tokens * step.seconds / SECONDS_A_DAY

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
        step, gpus = self.trial.step, self.trial.layout.gpus
        for name, share in step.mfu.items():
            yield Line(
                name=f"model FLOPs utilisation, {name}",
                unit="of the dense rate",
                value=share,
                formula="{FLOPs a token} × {tokens a step} / ({GPUs} × {rate} × {one step})",
                numbers={
                    "FLOPs a token": step.needed[name],
                    "tokens a step": step.tokens,
                    "GPUs": gpus,
                    "rate": step.speed.rate,
                    "one step": step.seconds,
                },
            )
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
        yield Line(
            name="days",
            unit="days",
            value=self.days,
            formula="{tokens} / {tokens a step} × {one step} / {seconds a day}",
            numbers={
                "tokens": self.tokens,
                "tokens a step": step.tokens,
                "one step": step.seconds,
                "seconds a day": SECONDS_A_DAY,
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

    `changes` are fields of `Options`; `seq` is by default 4096, or the model's context if shorter. Raises InputError
    naming an unknown field or an impossible value.
    """
    from asbuilt.catalog import find, machines

    spec = find(model).spec() if isinstance(model, str) else model
    machine = machines.resolve(gpu) if isinstance(gpu, str) else gpu
    known = {field.name for field in fields(Options)}
    for name in changes:
        if name not in known:
            raise InputError("unknown option", field="options", value=name, allowed=one_of(sorted(known)))
    if options is None and "seq" not in changes and spec is not None:
        changes["seq"] = min(Options.seq, spec.max_positions)
    return plan(Subject(spec, parameters), machine, replace(options or Options(), **changes))


def plan(subject: Subject, machine: Machine, options: Options) -> TrainPlan:
    """Returns the plan, with suggestions if it does not fit."""
    from asbuilt.plan.train.search import suggest

    trial = attempt(subject, machine, options)
    return TrainPlan(
        model=subject.model.name if subject.model is not None else f"{subject.total:,} parameters",
        machine=machine,
        trial=trial,
        parameters=subject.total,
        active=subject.active,
        flops_per_token=subject.flops(options),
        ladder=tuple(ladder(trial)),
        suggestions=() if trial.fits else tuple(suggest(subject, machine, trial)),
        not_counted=() if subject.model is not None else UNSAID,
    )

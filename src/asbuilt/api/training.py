"""`asbuilt.measure(model, training=True)`: what training takes as planned, beside a step of training as measured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from asbuilt import memory
from asbuilt.catalog.machine import Machine, from_calibration
from asbuilt.dtypes import short_name
from asbuilt.errors import InputError
from asbuilt.measure import Calibration, Report, Row, calibrate, timing
from asbuilt.measure.rates import lower_quartile
from asbuilt.measure.report import BUSY, MEMORY, TIME
from asbuilt.measure.run import given, peak_bytes, weight_bytes
from asbuilt.nn import build
from asbuilt.nn.model import Model
from asbuilt.plan.train import TrainPlan
from asbuilt.plan.train import train as planned
from asbuilt.shown import size
from asbuilt.spec import DualEncoder
from asbuilt.spec import Model as Spec
from asbuilt.train.batch import Batch, ImageTexts
from asbuilt.train.loss import chunk_rows, headless
from asbuilt.train.optimizer import Optimizers, optimizers
from asbuilt.train.recompute import recompute_blocks
from asbuilt.train.settings import CHECKPOINTING, Checkpointing, Optimizer
from asbuilt.train.step import train_step

Say = Callable[[str], None]
BATCH, SEQ = 4, 128
# With two micro-batches a step's peak is in the second, when all gradients are there already, as the plan assumes.
ACCUMULATE = 2
STEPS = 5
# Where a block needs more than the loss, and its parts declare only a bound of it, that is up to a quarter too high.
BLOCK = 0.25
GIVEN = Optimizer(lr=0.0, weight_decay=0.0)  # the weights stay as they are


def measure_training(
    spec: Spec,
    *,
    name: str = "",
    dtype: object = None,
    batch: int = BATCH,
    seq: int | None = None,
    refresh: bool = False,
    say: Say = lambda text: None,
    warn: Say = lambda text: None,
) -> Report:
    """Returns the figures of training a model with AdamW in float32, planned for this machine and measured on it.

    A step has two micro-batches of `batch` sequences of `seq` tokens, by default 128 or the model's context, each with
    an image where the model compares both. State,
    saved bytes, peak, FLOPs and speed are measured without, with selective and with full activation checkpointing, of
    random weights. Raises InputError for another dtype, a model that the loss does not suit, or too little memory.
    """
    if dtype is not None and short_name(dtype) not in ("fp32", "auto"):
        raise InputError("training is measured in float32", field="dtype", value=str(dtype), allowed="fp32")
    seq = _checked(spec, name, batch, seq)
    calibration = calibrate(refresh=refresh, say=say, warn=warn)
    machine = from_calibration(asdict(calibration))
    plans: dict[Checkpointing, TrainPlan] = {kind: _planned(spec, machine, batch, seq, kind) for kind in CHECKPOINTING}
    _require_room(name or spec.name, plans["none"])
    others = timing.Others()
    rows = tuple(_rows(spec, plans, say))
    return Report(
        model=name or spec.name,
        dtype="fp32",
        machine=_document(calibration, batch, seq),
        rows=rows,
        notes=tuple(_notes(others.share())),
    )


def _checked(spec: Spec, name: str, batch: int, seq: int | None) -> int:
    """Returns the tokens of a sequence; raises InputError for what cannot be measured."""
    most = spec.max_positions
    predicts = spec.gives == "logits" and {"tokens"} <= set(spec.reads) <= {"tokens", "source"}
    if not predicts and not isinstance(spec, DualEncoder):
        raise InputError(
            "training is measured of models that read tokens and predict some, or compare texts with images",
            field="MODEL",
            value=name or spec.name,
            fix="`asbuilt plan train` says what it would take",
        )
    if batch < 1:
        raise InputError(field="batch", value=batch, allowed="at least 1")
    seq = min(SEQ, most) if seq is None else seq
    if not 1 <= seq <= most:
        raise InputError(field="seq", value=seq, allowed=f"1 to {most}, the model's context")
    return seq


def _planned(spec: Spec, machine: Machine, batch: int, seq: int, kind: Checkpointing) -> TrainPlan:
    paired = isinstance(spec, DualEncoder)
    rows = batch * seq if paired else chunk_rows(spec.n_vocab)
    return planned(
        spec,
        machine,
        seq=seq,
        batch=batch,
        accumulate=ACCUMULATE,
        dtype="fp32",
        checkpointing=kind,
        chunked_loss=-(-batch * seq // rows),
        loss="pytorch" if paired else "asbuilt",  # pairs have a loss of their own
    )


def _require_room(name: str, plan: TrainPlan) -> None:
    have = memory.total()
    if have is not None and plan.per_device_bytes > have:
        needed = size(plan.per_device_bytes)
        raise InputError(
            f"training needs {needed} of memory, and this machine has {size(have)}",
            field="MODEL",
            value=name,
            fix="a smaller --batch or --seq, or `asbuilt plan train`",
        )


def _document(calibration: Calibration, batch: int, seq: int) -> dict[str, Any]:
    told = {"optimizer": GIVEN.name, "batch": batch, "seq": seq, "accumulate": ACCUMULATE}
    return {**asdict(calibration), "training": told}


def _notes(others: float | None) -> Iterator[str]:
    yield f"one step is {ACCUMULATE} micro-batches; FLOPs are with full attention scores"
    if others is not None and others >= BUSY:
        yield f"other processes used {others:.0%} of the CPUs while speeds were measured"


def _rows(spec: Spec, plans: dict[Checkpointing, TrainPlan], say: Say) -> Iterator[Row]:
    made = Measured(spec, plans["none"].trial.options.batch, plans["none"].trial.options.seq)
    yield Row(
        figure="weights, gradients and AdamW's moments",
        unit="bytes",
        predicted=plans["none"].state.total,
        measured=made.state_bytes(),
        tolerance=0.0,
    )
    for kind, plan in plans.items():
        say(f"training, checkpointing {kind}")
        recompute_blocks(made.model, kind)
        stage, step = plan.trial.fullest, plan.trial.step
        saved = stage.activations + stage.outside
        block = stage.largest.bounded and stage.recompute_peak >= max(stage.loss_peak, stage.gradient_peak)
        yield _row(f"saved by a forward pass, {kind}", "bytes", saved, made.saved_bytes(), MEMORY)
        peak = made.peak_bytes()
        yield _row(f"peak memory of a step, {kind}", "bytes", plan.per_device_bytes, peak, BLOCK if block else MEMORY)
        yield _row(f"FLOPs of a step, {kind}", "FLOPs", _flops(plan), made.flops(), MEMORY)
        yield _row(f"training, {kind}", f"{plan.unit}/s", step.tokens / step.seconds, made.speed(), TIME)


def _row(figure: str, unit: str, predicted: float, measured: float, tolerance: float) -> Row:
    return Row(figure=figure, unit=unit, predicted=predicted, measured=measured, tolerance=tolerance)


def _flops(plan: TrainPlan) -> float:
    """Returns the FLOPs of a step as planned, with full scores: with full checkpointing blocks run forward twice."""
    options, stage = plan.trial.options, plan.trial.fullest
    again = stage.section.kinds if options.checkpointing == "full" else ()
    repeated = sum(count * (piece.work.forward(causal=False) - piece.spared) for piece, count in again)
    return plan.flops_per_token["exact"] * plan.trial.step.tokens + ACCUMULATE * repeated


class Measured:
    """A model of random weights, its optimizer after one step, and the batches of a step."""

    def __init__(self, spec: Spec, batch: int, seq: int) -> None:
        self.model: Model = build(spec, seed=0)
        ids = torch.randint(spec.n_vocab, (batch, seq), generator=torch.Generator().manual_seed(0))
        self.batches = [batch_of(self.model, ids)] * ACCUMULATE
        self.optimizer: Optimizers = optimizers(self.model, GIVEN)
        self.step()

    def step(self) -> None:
        """Runs one step, with random targets."""
        train_step(self.model, self.batches, self.optimizer)

    def state_bytes(self) -> int:
        """Returns the bytes of weights, gradients and moments; not of the optimizer's counters of steps."""
        gradients = sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)
        return weight_bytes(self.model) + gradients + sum(x.nbytes for x in self._state())

    def _state(self) -> Iterator[Tensor]:
        held = (each.items() for one, _ in self.optimizer.made for each in one.state.values())
        return (value for each in held for name, value in each if isinstance(value, Tensor) and name != "step")

    def saved_bytes(self) -> int:
        """Returns the bytes that are allocated after a forward pass and were not before, and those of the tokens."""
        kept: list[object] = []

        def forward() -> None:
            one = self.batches[0]
            if isinstance(one, ImageTexts):  # similarities themselves are not needed again
                kept.append(self.model(one.ids, **one.inputs).grad_fn)
                return
            with headless(self.model):
                kept.append(self.model(one.ids, **one.inputs))

        forward()  # selective checkpointing counts a block's products in its first pass
        kept.clear()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            forward()
        events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
        alive = sum(event.nbytes() for event in events if event.name() == "[memory]")  # pyright: ignore
        inputs = (self.batches[0].ids, *self.batches[0].inputs.values())
        return alive + sum(tensor.nbytes for tensor in inputs)

    def peak_bytes(self) -> int:
        """Returns the most bytes allocated during a step: weights, the optimizer's state, and what comes and goes."""
        self.optimizer.zero_grad()
        gc.collect()  # what nobody holds any more would be freed during the step
        inputs = {x.data_ptr(): x for one in self.batches for x in (one.ids, *one.inputs.values())}
        held = weight_bytes(self.model) + sum(x.nbytes for x in (*self._state(), *inputs.values()))
        return held + peak_bytes(self.step)

    def flops(self) -> int:
        """Returns the FLOPs that PyTorch counts in a step; of its fused attention 2 products forward, 4 backward."""
        with Counting() as counting:
            self.step()
        return counting.flops

    def speed(self) -> float:
        """Returns tokens or pairs per second: the lower quartile of a few steps' times."""
        units = sum(len(one.ids) if isinstance(one, ImageTexts) else one.ids.numel() for one in self.batches)
        return units / lower_quartile([timing.seconds(self.step) for _ in range(STEPS)])


def batch_of(model: Model, ids: Tensor) -> Batch:
    """Returns a micro-batch of these tokens, with random targets, sources or images."""
    patches = model.spec.patches
    if patches is not None:
        shape = (len(ids), patches.channels, patches.image_size, patches.image_size)
        return ImageTexts(ids=ids, targets=ids, images=torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    ids, beside = given(model, ids)
    return Batch(ids=ids, targets=ids.roll(-1, 1), source=beside.get("source_BS"))


class Counting(TorchDispatchMode):
    """Adds up the FLOPs of all calls that PyTorch has a formula of, and of its fused attention on CPUs.

    PyTorch's `FlopCounterMode` also hooks the modules, which refuse a gradient inside a forward pass: the chunked loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Calls `func` and counts it."""
        made = func(*args, **(kwargs or {}))
        formula = FORMULAS.get(func.overloadpacket)
        self.flops += 0 if formula is None else formula(*args, **(kwargs or {}), out_val=made)
        return made


def _attention(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> int:
    """Returns the FLOPs of (B, H, T, D) queries with S keys and as many values, scores and mix, both in full."""
    batch, heads, queries, width = q
    return 2 * batch * heads * queries * k[2] * (width + v[3])


@shape_wrapper
def _forward(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_: Any, **__: Any) -> int:  # noqa: ANN401
    return _attention(q, k, v)


@shape_wrapper
def _backward(_: Any, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *__: Any, **___: Any) -> int:  # noqa: ANN401
    return 2 * _attention(q, k, v)


FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}

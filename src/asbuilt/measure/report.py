"""The table: every figure predicted from the description and the calibration, then measured on the built model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from asbuilt import cost
from asbuilt.measure import run
from asbuilt.measure.calibrate import calibrate
from asbuilt.measure.rates import DTYPES, Calibration
from asbuilt.measure.trace import trace
from asbuilt.nn.modules import Model
from asbuilt.spec.part import Pass

# What a prediction may miss by: nothing where a byte is a byte, and what is left to the library or to the machine.
SAVED, MEMORY, TIME = 0.01, 0.03, 0.20
PREFILL, PROMPT, STEPS = 512, 128, 64


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure; `error` is measured / predicted - 1, `exact` figures have tolerance 0."""

    figure: str
    unit: str
    predicted: float
    measured: float
    tolerance: float

    @property
    def error(self) -> float:
        """How far the measured figure lies from the predicted one, as a fraction."""
        if self.predicted == self.measured:
            return 0.0
        return self.measured / self.predicted - 1 if self.predicted else float("inf")

    @property
    def ok(self) -> bool:
        """Whether that is within the tolerance."""
        return abs(self.error) <= self.tolerance

    @property
    def timed(self) -> bool:
        """Whether the figure is a speed, which other work on the machine can spoil."""
        return self.unit == "tokens/s"


@dataclass(frozen=True, kw_only=True)
class Report:
    """The rows, and the machine they were measured on."""

    model: str
    dtype: str
    machine: Calibration
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether every figure that is no speed is within its tolerance."""
        return all(row.ok for row in self.rows if not row.timed)


def measure(
    model: Model, *, name: str = "", refresh: bool = False, say: Callable[[str], None] = lambda text: None
) -> Report:
    """Returns the table for a built model in float32 or bfloat16 on the CPU.

    Every figure is predicted before it is measured; the calibration never runs a model. Raises KeyError for a dtype
    that is not calibrated.
    """
    dtype = {value: key for key, value in DTYPES.items()}[model.any_weight.dtype]
    machine = calibrate(refresh=refresh, say=say)
    rows = (*counted(model, say=say), *_timed(model, dtype, machine, say))
    return Report(model=name or model.spec.name, dtype=dtype, machine=machine, rows=rows)


def counted(model: Model, *, say: Callable[[str], None] = lambda text: None) -> Iterator[Row]:
    """Yields the rows that are no speeds: what is counted, not timed, whatever else the machine does meanwhile."""
    spec, width = model.spec, model.any_weight.element_size()
    dtype = {value: key for key, value in DTYPES.items()}[model.any_weight.dtype]
    tokens = min(PREFILL, spec.max_positions)
    whole = Pass(tokens=tokens, width=width)
    last = Pass(tokens=tokens, width=width, logits="last")

    yield _row("parameters", "", cost.total_parameters(spec), run.parameters(model))
    yield _row(f"weights, {dtype}", "bytes", cost.weight_bytes(spec, dtype), run.weight_bytes(model))
    say("counting")
    yield _row(f"forward, {tokens} tokens", "FLOPs", cost.flops(spec, whole).forward, run.flops(spec, tokens))
    cache = cost.cache(spec, tokens, dtype)
    yield _row(f"cache, {tokens} tokens", "bytes", cache.at_seq, run.cache_bytes(model, 1, tokens))
    one = cache.per_token + (cache.per_source_token if spec.encoder is not None else 0)
    told = "cache per token" if spec.encoder is None else "cache per token read and one written"
    yield _row(told, "bytes", one, run.cache_bytes(model, 1, 1))

    say("one training step")
    kept, measured = cost.saved(spec, whole), run.saved_bytes(model, tokens)
    yield _row(f"saved by one training step, {tokens} tokens", "bytes", kept.all, measured[0], SAVED)
    yield _row("saved by its loss", "bytes", kept.loss, measured[1], SAVED)

    say("prefill")
    peak = cost.weight_bytes(spec, dtype) + cache.at_seq + spec.works(last)
    yield _row(f"peak memory of prefill, {tokens} tokens", "bytes", peak, run.prefill_peak(model, tokens), MEMORY)


def _timed(model: Model, dtype: str, machine: Calibration, say: Callable[[str], None]) -> Iterator[Row]:
    spec, context = model.spec, model.spec.max_positions
    tokens, prompt, steps = min(PREFILL, context), min(PROMPT, context // 2 or 1), min(STEPS, max(1, context // 4))
    wanted = torch.bfloat16 if dtype == "bf16" else torch.float32
    seconds = trace(spec, tokens=tokens, past=0, dtype=wanted).seconds(machine, dtype)
    yield _row(
        f"prefill, {tokens} tokens", "tokens/s", tokens / seconds, tokens / run.prefill_seconds(model, tokens), TIME
    )
    say("decode")
    seconds = trace(spec, tokens=1, past=prompt + steps // 2, dtype=wanted).seconds(machine, dtype)
    step = run.decode_seconds(model, prompt, steps)
    yield _row(f"decode after {prompt} tokens", "tokens/s", 1 / seconds, 1 / step, TIME)


def _row(figure: str, unit: str, predicted: float, measured: float, tolerance: float = 0.0) -> Row:
    return Row(figure=figure, unit=unit, predicted=predicted, measured=measured, tolerance=tolerance)

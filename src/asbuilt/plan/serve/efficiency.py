"""The efficiency of timed runs relative to the roofline: of `asbuilt measure --json`, and of layers timed just now."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from asbuilt.catalog.machine import from_calibration
from asbuilt.errors import InputError
from asbuilt.plan.placement import Placement
from asbuilt.plan.precision import precision
from asbuilt.plan.serve.capacity import Capacity
from asbuilt.plan.serve.conventions import Conventions
from asbuilt.plan.serve.expected import Efficiencies
from asbuilt.plan.serve.roofline import Roofline
from asbuilt.spec import Model

DECODE, PREFILL = re.compile(r"decode after (\d{1,9}) tokens"), re.compile(r"prefill, (\d{1,9}) tokens")


# Each takes what the other leaves: of a prefill some parts wait for memory, of a step some for products.
TURNS = 8


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The seconds of a prefill of `prompt` tokens, and of a decode step of one sequence after `past` tokens."""

    prompt: int
    prefill: float
    past: int
    decode: float

    def reached(self, roofline: Roofline) -> Efficiencies:
        """Returns the fractions of bandwidth and rate with which a roofline takes these seconds.

        Above 1 where kernels are faster than the products that gave the machine its rate.
        """
        bandwidth = compute = 1.0
        for _ in range(TURNS):
            now = Efficiencies(compute=compute, scores=compute, bandwidth=bandwidth, attention=bandwidth)
            at = replace(roofline, reached=now)
            bandwidth *= at.decode(1, self.past + 1).seconds / self.decode
            compute *= at.prefill(self.prompt).seconds / self.prefill
        return Efficiencies(compute=compute, scores=compute, bandwidth=bandwidth, attention=bandwidth)


def from_measured(document: Mapping[str, Any], spec: Model, name: str) -> tuple[float, float]:
    """Returns the fractions of bandwidth and FLOP rate that a `measure` run of this model reached on its machine.

    Decode determines the bandwidth, prefill the rate; values above 1 become 1. Raises InputError for a run of another
    model, for one with native kernels, whose machine has timed layers in place of a bandwidth and a rate, for one of
    packed weights, and for any other document.
    """
    measured = document.get("model") if isinstance(document, Mapping) else None
    if measured != name:
        raise InputError("measured on another model", field="efficiency", value=measured, allowed=name)
    _require_plain(document)
    machine = from_calibration(document.get("machine") or {})
    dtype = precision(str(document.get("dtype")))
    decode, prefill = _row(document, DECODE), _row(document, PREFILL)
    capacity = Capacity(
        spec=spec,
        machine=machine,
        layout=Placement(),
        precision=dtype,
        kv_dtype=dtype.activation,
        chunk=prefill[0],
        conventions=Conventions(),
    )
    roofline = Roofline(capacity=capacity)
    step = roofline.decode(1, decode[0] + 1).seconds
    prompt = roofline.prefill(prefill[0]).seconds
    return min(1.0, step * decode[1]), min(1.0, prompt * prefill[1] / prefill[0])


def _require_plain(document: Mapping[str, Any]) -> None:
    """Raises InputError for a run with native kernels, and for one whose weights are not all of its own dtype."""
    machine, rows = document.get("machine"), document.get("rows")
    figures = [str(row.get("figure")) for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    fix = "measure with --expanded and ASBUILT_NATIVE=0, or plan with --gpu this, which times layers"
    if isinstance(machine, Mapping) and "stacks" in machine:
        problem = "a run with native kernels times whole layers, and has no bandwidth and rate to be a fraction of"
        raise InputError(problem, field="efficiency", value=document.get("native"), fix=fix)
    for figure in figures:
        if figure.startswith("weights, ") and figure != f"weights, {document.get('dtype')}":
            raise InputError("a run of packed weights", field="efficiency", value=figure, fix=fix)


def _row(document: Mapping[str, Any], pattern: re.Pattern[str]) -> tuple[int, float]:
    """Returns the tokens and measured tokens/s of the row that matches the pattern."""
    rows = document.get("rows")
    for row in rows if isinstance(rows, list) else []:
        found = pattern.fullmatch(str(row.get("figure"))) if isinstance(row, Mapping) else None
        speed = row.get("measured") if found else None
        if found and isinstance(speed, int | float) and 0 < speed < 1e12 and int(found[1]) > 0:
            return int(found[1]), float(speed)
    raise InputError(
        "no such row",
        field="efficiency: rows",
        value=pattern.pattern,
        fix="give the output of `asbuilt measure --json`",
    )

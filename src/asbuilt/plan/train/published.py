"""Whole training runs as published: GPU hours, and what they make of the dense rate by 6ND.

A run's hours hold its restarts, warm-ups, evaluations and longer contexts; none of that is in the time of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from asbuilt.catalog.machine import Machine

SIX, SECONDS_AN_HOUR = 6, 3600


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of `active` parameters and `tokens` on GPUs of a dense `rate` (bf16), which took so many GPU hours."""

    name: str
    kind: str
    rate: float
    active: float
    tokens: float
    hours: float
    source: str

    @property
    def mfu(self) -> float:
        """The fraction of the dense rate that the whole run reached, by 6ND."""
        return SIX * self.active * self.tokens / (self.hours * SECONDS_AN_HOUR * self.rate)


_LLAMA2, _LLAMA3 = "Llama 2's report (arXiv 2307.09288, table 2)", "Llama 3.1's model card"
RUNS = (
    Run(name="Llama-2-7B", kind="a", rate=312e12, active=6.738e9, tokens=2e12, hours=184_320, source=_LLAMA2),
    Run(name="Llama-2-13B", kind="a", rate=312e12, active=13.016e9, tokens=2e12, hours=368_640, source=_LLAMA2),
    Run(name="Llama-2-70B", kind="a", rate=312e12, active=68.977e9, tokens=2e12, hours=1_720_320, source=_LLAMA2),
    Run(name="Llama-3.1-8B", kind="h", rate=989.4e12, active=8.03e9, tokens=15e12, hours=1.46e6, source=_LLAMA3),
    Run(name="Llama-3.1-70B", kind="h", rate=989.4e12, active=70.554e9, tokens=15e12, hours=7.0e6, source=_LLAMA3),
    Run(name="Llama-3.1-405B", kind="h", rate=989.4e12, active=405.85e9, tokens=15.6e12, hours=30.84e6, source=_LLAMA3),
    Run(
        name="DeepSeek-V3",
        kind="h",
        rate=989.4e12,
        active=37e9,
        tokens=14.8e12,
        hours=2.664e6,
        source="its report (arXiv 2412.19437, table 1): products in fp8",
    ),
)


def nearest(machine: Machine, active: float) -> Run:
    """Returns the published run on such machines, else on any, whose active parameters are nearest in ratio."""
    alike = [run for run in RUNS if machine.name.startswith((run.kind, f"g{run.kind}"))]
    return min(alike or RUNS, key=lambda run: abs(math.log(run.active / max(active, 1))))

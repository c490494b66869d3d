"""The learning rate of each step, as a factor on the peak: warmup, then one of four shapes.

A pure function of the step, so that resuming needs no state of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from asbuilt.errors import InputError, one_of

Shape = Literal["cosine", "linear", "wsd", "constant"]
SHAPES: tuple[Shape, ...] = get_args(Shape)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warmup to 1, then the shape's way to `final` at the last step.

    `cosine`: half a cosine (Loshchilov and Hutter 2017, arXiv 1608.03983). `linear`: a line. `wsd`: 1 until the last
    `decay` of all steps, then a line (warmup-stable-decay: Hu et al. 2024, arXiv 2404.06395, section 4). `constant`: 1.
    """

    shape: Shape = "cosine"
    """cosine, linear, wsd or constant."""
    warmup: int = 100
    """Steps of the linear warmup."""
    final: float = 0.1
    """The factor at the last step."""
    decay: float = 0.2
    """Fraction of all steps in which wsd falls."""

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise InputError(field="schedule.shape", value=self.shape, allowed=one_of(SHAPES))
        if self.warmup < 0:
            raise InputError(field="schedule.warmup", value=self.warmup, allowed="a whole number of at least 0")
        for name in ("final", "decay"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise InputError(field=f"schedule.{name}", value=value, allowed="a number from 0 to 1")

    def factor(self, step: int, steps: int) -> float:
        """Returns the factor of a step, counted from 0, in a run of so many steps."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        left = max(1, steps - 1 - self.warmup)
        done = min(1.0, (step - self.warmup) / left)  # 0 after the warmup, 1 at the last step
        if self.shape == "constant":
            return 1.0
        if self.shape == "cosine":
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2
        if self.shape == "linear":
            return 1 - (1 - self.final) * done
        falling = max(1, round(self.decay * steps))
        return 1 - (1 - self.final) * min(1.0, max(0.0, (step + 1 + falling - steps) / falling))

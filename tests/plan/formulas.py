"""Works out a line's formula with its numbers put in."""

from __future__ import annotations

import math

from asbuilt.plan.lines import PLACE, Line
from asbuilt.plan.stage import every_stage
from asbuilt.plan.train.shares import Shares
from asbuilt.plan.train.stages import Section


def worked_out(line: Line) -> float:
    """The formula is arithmetic over places; nothing else is known to it."""
    text = PLACE.sub(lambda place: f"({line.numbers[place[1]]!r})", line.formula)
    known = {"floor": math.floor, "ceil": math.ceil, "min": min, "max": max, "__builtins__": {}}
    return eval(text.replace("×", "*").replace("−", "-"), known)


def every_section(shares: Shares, pp: int) -> list[Section]:
    """The pieces of every stage, one after the other, those too that are alike."""
    return [Section(stage=stage, shares=shares) for stage in every_stage(shares.blocks, pp)]

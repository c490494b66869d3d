"""Works out a line's formula with its numbers put in."""

from __future__ import annotations

import math

from asbuilt.plan.lines import PLACE, Line


def worked_out(line: Line) -> float:
    """The formula is arithmetic over places; nothing else is known to it."""
    text = PLACE.sub(lambda place: f"({line.numbers[place[1]]!r})", line.formula)
    known = {"floor": math.floor, "ceil": math.ceil, "min": min, "max": max, "__builtins__": {}}
    return eval(text.replace("×", "*").replace("−", "-"), known)

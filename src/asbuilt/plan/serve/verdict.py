"""Whether a rate of requests is kept up, as far as the simulated requests can tell.

Requests that arrive faster than they are served wait longer and longer: of a rate r and a capacity c, delays grow by
r / c - 1 of the time. The growth is that over the second half of the requests, a line through the means of batches of
them (Welch 1983; batch means: Law, Simulation Modeling and Analysis, ch. 9). It tells nothing while the machine fills:
until requests have begun to leave as they come, more are inside all the time at any rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# A rate is kept up if delays grow by less than this share of the time.
LEFT_OVER = 0.05
BATCHES = 10
# Standard errors by which a growth must differ from a bound to be above or below it.
SURE = 2.5
# The second half of fewer requests than these is no line.
LEAST = 2 * BATCHES
MOST = 10**6


@dataclass(frozen=True, kw_only=True)
class Delays:
    """Of `rate` requests/s in the order of their arrival: when they came, and seconds until their turn and their end.

    `whole` are the seconds to the end of an answer of the mean length, at each request's own pace; `served` to its own
    end. A fraction `held` of what can be held at once is needed to serve them all at the pace that was seen, at least:
    of the cache, or of the sequences.
    """

    rate: float
    arrived: Sequence[float]
    waited: Sequence[float]
    whole: Sequence[float]
    served: Sequence[float]
    held: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a rate is kept up, None if too few requests were simulated to say, and then about how many would do."""

    kept: bool | None
    enough: int | None = None


KEPT, PILED = Verdict(kept=True), Verdict(kept=False)


def verdict(delays: Delays) -> Verdict:
    """Returns whether the requests are served as fast as they come."""
    many = len(delays.arrived)
    filling = 2 * delays.rate * _slow(delays.served)  # requests whose second half comes when the first of them leave
    if many < LEAST:
        return _few(LEAST if delays.held > 1 else max(LEAST, 1.2 * filling))
    waits, error = growth(delays, delays.waited)
    if delays.held > 1 or _grows(waits, error, many):
        return PILED
    if many < filling:
        return _few(1.2 * filling)
    whole, other = growth(delays, delays.whole)
    if _grows(whole, other, many):
        return PILED
    more, least = max(waits, whole), SURE * max(error, other)
    if more + least <= LEFT_OVER:
        return KEPT
    return _few(many * max(2.0, least / max(LEFT_OVER / 2, abs(LEFT_OVER - more))))


def every(verdicts: Sequence[Verdict]) -> Verdict:
    """Returns the verdict on machines that all must keep up."""
    if any(one.kept is False for one in verdicts):
        return PILED
    few = [one.enough for one in verdicts if one.enough is not None]
    return Verdict(kept=None, enough=max(few)) if few else KEPT


def _few(enough: float) -> Verdict:
    """Returns that more requests are needed, about `enough`: the next number of two digits and noughts."""
    if enough >= MOST:
        return Verdict(kept=None, enough=MOST)
    unit = 10 ** max(0, len(str(int(enough))) - 2)
    return Verdict(kept=None, enough=math.ceil(enough / unit) * unit)


def _grows(growth: float, error: float, many: int) -> bool:
    """Returns whether the growth is more than that of a rate that is kept up, and than chance alone makes.

    As many random arrivals as are looked at are more or fewer than expected by their square root.
    """
    chance = (1 + growth) / math.sqrt(many / 2)
    return growth - SURE * error > LEFT_OVER and growth > SURE * chance


def growth(delays: Delays, seconds: Sequence[float]) -> tuple[float, float]:
    """Returns by how much such delays of the second half grow in a second, and the standard error of it.

    Requests that are inside together are delayed alike: batches of fewer are not independent of each other.
    """
    many = len(delays.arrived)
    bounds = [many // 2 + (many - many // 2) * i // BATCHES for i in range(BATCHES + 1)]
    x, y = ([_mean(values[a:b]) for a, b in pairwise(bounds)] for values in (delays.arrived, seconds))
    at, delay = _mean(x), _mean(y)
    spread = sum((a - at) ** 2 for a in x)
    if not spread:
        return 0.0, math.inf
    slope = sum((a - at) * (b - delay) for a, b in zip(x, y, strict=True)) / spread
    left = sum((b - delay - slope * (a - at)) ** 2 for a, b in zip(x, y, strict=True))
    alike = min(BATCHES, max(1.0, 2 * delays.rate * _slow(seconds) * BATCHES / (many / 2)))
    return slope, math.sqrt(alike * left / (BATCHES - 2) / spread)


def _slow(seconds: Sequence[float]) -> float:
    """Returns what all but a share of LEFT_OVER are within."""
    return sorted(seconds)[math.ceil((1 - LEFT_OVER) * len(seconds)) - 1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

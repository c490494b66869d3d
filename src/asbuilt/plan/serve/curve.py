"""Functions of a whole number, as straight lines between points that are chosen until they are near enough."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise

Vector = tuple[float, ...]
# At the quarters of a piece, each component of its line is at most this fraction off.
NEAR = 1e-3
# The narrowest piece is at least this fraction of the whole range, so that a kink costs few points.
NARROWEST = 2**-14


class Curve:
    """A vector function of 0 to `last`: exact where it is linear, within about NEAR elsewhere."""

    def __init__(self, function: Callable[[int], Vector], last: int) -> None:
        self._function, self._least = function, max(1, int(last * NARROWEST))
        last = max(1, last)
        first, end = function(0), function(last)
        points = [(0, first), *self._between(0, first, last, end), (last, end)]
        kept = points[:1]
        for here, after in pairwise(points[1:]):
            if not _straight(kept[-1], here, after, NEAR / 10):
                kept.append(here)
        kept.append(points[-1])
        self.points = [x for x, _ in kept]
        self.values = [value for _, value in kept]
        self.slopes = [
            tuple((b - a) / (y - x) for a, b in zip(one, two, strict=True)) for (x, one), (y, two) in pairwise(kept)
        ]

    def _between(self, low: int, at_low: Vector, high: int, at_high: Vector) -> list[tuple[int, Vector]]:
        """Returns the points that are needed between two, in order."""
        if high - low <= self._least:
            return []
        middle = (low + high) // 2
        inner = [(x, self._function(x)) for x in {(low + middle) // 2, middle, (middle + high) // 2} - {low}]
        if all(_straight((low, at_low), point, (high, at_high)) for point in inner):
            return []
        value = dict(inner)[middle]
        before, after = self._between(low, at_low, middle, value), self._between(middle, value, high, at_high)
        return [*before, (middle, value), *after]

    def piece(self, x: float) -> int:
        """Returns the number of the line that `x` lies on; beyond the last point, of the last line."""
        return min(bisect_right(self.points, x), len(self.slopes)) - 1

    def at(self, x: float) -> Vector:
        """Returns the value at `x`."""
        i = self.piece(x)
        further = x - self.points[i]
        return tuple([a + further * b for a, b in zip(self.values[i], self.slopes[i], strict=True)])


def _straight(
    before: tuple[int, Vector], here: tuple[int, Vector], after: tuple[int, Vector], near: float = NEAR
) -> bool:
    """Returns whether a point lies on the line between two others."""
    share = (here[0] - before[0]) / (after[0] - before[0])
    return all(
        abs(a + share * (b - a) - value) <= near * abs(value)
        for a, value, b in zip(before[1], here[1], after[1], strict=True)
    )

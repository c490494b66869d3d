"""What is known of a machine's speed: tables and lines from which the time of a library call is read off."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from asbuilt.dtypes import CALIBRATED, TORCH_NAMES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, TORCH_NAMES[name]) for name in CALIBRATED}


@dataclass(frozen=True)
class Line:
    """seconds = start + amount / rate; the amount is in bytes or FLOPs."""

    start: float
    rate: float

    def seconds(self, amount: float) -> float:
        """Returns the predicted time."""
        return self.start + amount / self.rate


@dataclass(frozen=True)
class Table:
    """Seconds of a call at the grid of its sizes, the last axis fastest."""

    axes: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]

    def at(self, *sizes: float) -> float:
        """Returns the predicted time: log-linear in each size, level below the grid, going on as its last cell above.

        ln t = sum over the cell's corners of ln t(corner), weighted by how near the sizes' logarithms are.
        """
        places = [_place(axis, size) for axis, size in zip(self.axes, sizes, strict=True)]
        logarithm = 0.0
        for corner in itertools.product((0, 1), repeat=len(places)):
            weight, index = 1.0, 0
            for axis, (cell, share), side in zip(self.axes, places, corner, strict=True):
                weight *= share if side else 1 - share
                index = index * len(axis) + cell + side
            logarithm += weight * math.log(self.seconds[index])
        return math.exp(logarithm)


def _place(axis: tuple[int, ...], size: float) -> tuple[int, float]:
    """Returns the cell of an axis, and how far into it the size lies; beyond 1 above the last."""
    cell = max(0, min(len(axis) - 2, sum(edge <= size for edge in axis) - 1))
    return cell, max(0.0, math.log(max(size, 1) / axis[cell]) / math.log(axis[cell + 1] / axis[cell]))


@dataclass(frozen=True)
class Rates:
    """One dtype: tables of one row times a matrix, of products, of attention and of one token's; lines by bytes.

    The lines are of work on single numbers by the name of its function, "arithmetic" for all that have none of their
    own, and "view" for calls that only look. `between` is how many times longer the starts of those lines are within a
    model, with what Python does between calls, by the bytes of matrices that the step reads: what they need is found in
    a near cache after a few, and in memory after many. `product_rate` is that of the largest product, in FLOP/s;
    `row_rate` that of one row times the largest matrix, in bytes of the matrix per second.
    """

    vector: Table
    matrix: Table
    attention: Table
    attention_read: Table
    lines: dict[str, Line]
    between: Table
    product_rate: float
    row_rate: float

    def slowed(self, nbytes: float) -> float:
        """Returns how many times longer small calls take in a step that reads so many bytes of matrices.

        Level beyond both ends: where all comes from memory, more of it makes nothing slower.
        """
        return self.between.at(min(nbytes, self.between.axes[0][-1]))


@dataclass(frozen=True)
class Calibration:
    """The machine, its read bandwidth in bytes/s, and rates by dtype.

    `probes` are the seconds of reading memory, and of a small model's decode step and prefill, when the machine was
    calibrated: taken again later, they tell whether it still runs at that speed. `others` is the share of the
    processors that other processes took meanwhile, None where the system does not tell.
    """

    machine: dict[str, str | int | float]
    read_bandwidth: float
    rates: dict[str, Rates]
    probes: dict[str, float]
    others: float | None

    def drift(self, now: Mapping[str, float]) -> float:
        """Returns how many times slower, or faster, the machine is by the probe that changed most; 1 is unchanged."""
        return max(max(now[name] / then, then / now[name]) for name, then in self.probes.items())


def quarter(times: list[float]) -> float:
    """Returns what a quarter of the times stay below: the machine as it mostly is when its neighbours let it."""
    return statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]

"""A machine's speed: tables and lines from which the time of a library call is looked up."""

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
class LinearTime:
    """seconds = start + amount / rate; the amount is in bytes or FLOPs."""

    start: float
    rate: float

    def seconds(self, amount: float) -> float:
        """Returns the predicted time."""
        return self.start + amount / self.rate


@dataclass(frozen=True)
class TimeGrid:
    """The seconds of a call on a grid of its sizes, the last axis varying fastest."""

    axes: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]

    def at(self, *sizes: float) -> float:
        """Returns the predicted time: log-linear in each size, constant below the grid, extrapolated above.

        ln t is interpolated multilinearly between the cell's corners, in the logarithms of the sizes.
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
    """Returns the cell of an axis, and the size's relative position in it; above 1 beyond the last."""
    cell = max(0, min(len(axis) - 2, sum(edge <= size for edge in axis) - 1))
    return cell, max(0.0, math.log(max(size, 1) / axis[cell]) / math.log(axis[cell + 1] / axis[cell]))


@dataclass(frozen=True)
class Rates:
    """The speeds of one dtype: tables of one row times a matrix, of products and of attention; lines by bytes.

    The lines are for elementwise operations, by function name; "arithmetic" is for all without a line of their own, and
    "view" for calls that touch no data. `between` is how many times longer the constant parts of those lines take
    within a model, Python's overhead included, by the bytes of matrices that the step reads: after a few bytes, what
    they need is in a near cache, after many, in memory. `product_rate` is that of the largest product, in FLOP/s;
    `row_rate` that of one row times the largest matrix, in bytes of the matrix per second.
    """

    vector: TimeGrid
    matrix: TimeGrid
    attention: TimeGrid
    attention_read: TimeGrid
    lines: dict[str, LinearTime]
    between: TimeGrid
    product_rate: float
    row_rate: float

    def slowed(self, nbytes: float) -> float:
        """Returns how many times longer small calls take in a step that reads `nbytes` of matrices.

        Constant beyond both ends: once everything comes from memory, more bytes slow nothing down.
        """
        return self.between.at(min(nbytes, self.between.axes[0][-1]))


@dataclass(frozen=True)
class Calibration:
    """The machine, its read bandwidth in bytes/s, and rates by dtype.

    `probes` are the seconds of reading memory, and of a small model's decode step and prefill, at calibration: probed
    again later, they tell whether the machine still runs at that speed. `others` is the fraction of the CPUs that other
    processes used meanwhile, None if the system does not report it.
    """

    machine: dict[str, str | int | float]
    read_bandwidth: float
    rates: dict[str, Rates]
    probes: dict[str, float]
    others: float | None

    def drift(self, now: Mapping[str, float]) -> float:
        """Returns how many times slower or faster the machine is, by the probe that changed most; 1 means unchanged."""
        return max(max(now[name] / then, then / now[name]) for name, then in self.probes.items())


def lower_quartile(times: list[float]) -> float:
    """Returns the lower quartile of the times: the machine's speed with little interference."""
    return statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]

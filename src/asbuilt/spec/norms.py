"""Normalisation: LayerNorm (Ba et al. 2016, arXiv 1607.06450) and RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asbuilt.spec.part import (
    Init,
    Part,
    Weight,
    require_choice,
    require_flags,
    require_number,
    require_sizes,
)

Gain = Literal["weight", "offset", "none"]


@dataclass(frozen=True, kw_only=True)
class RMSNorm(Part):
    """x / sqrt(mean(x^2) + eps) * gain, over the last dimension of width `d`.

    The gain is the `weight`, 1 + the weight (`offset`), or absent (`none`).
    """

    kind = "norm"
    d: int
    """Width of the normalised dimension."""
    eps: float = 1e-6
    """Added to the mean square."""
    gain: Gain = "weight"
    """The gain: the `weight`, 1 + the weight (`offset`), or nothing (`none`)."""

    def __post_init__(self) -> None:
        require_sizes(self, "d")
        require_number(self, "eps")
        require_choice(self, "gain", ("weight", "offset", "none"))

    def holds(self) -> dict[str, Weight]:
        """The gain (d), if there is one."""
        init: Init | None = "zeros" if self.gain == "offset" else None
        return {} if self.gain == "none" else {"weight": Weight(shape=(self.d,), role="gain", init=init)}


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Part):
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last dimension of width `d`; both are optional."""

    kind = "norm"
    d: int
    """Width of the normalised dimension."""
    eps: float = 1e-5
    """Added to the variance."""
    gain: bool = True
    """Whether there is a weight."""
    bias: bool = True
    """Whether there is a bias."""

    def __post_init__(self) -> None:
        require_sizes(self, "d")
        require_number(self, "eps")
        require_flags(self, "gain", "bias")

    def holds(self) -> dict[str, Weight]:
        """The gain (d) and the bias (d), if enabled."""
        gain = {"weight": Weight(shape=(self.d,), role="gain")} if self.gain else {}
        return gain | ({"bias": Weight(shape=(self.d,), role="bias")} if self.bias else {})


@dataclass(frozen=True, kw_only=True)
class HeadNorm(Part):
    """(x - mean) / sqrt(var + eps) * weight + bias over each head's `d` numbers, both with a row for every head."""

    kind = "norm"
    d: int
    """Width of a head."""
    n_heads: int
    """Heads."""
    eps: float = 1e-5
    """Added to the variance."""
    bias: bool = False
    """Whether there is a bias."""

    def __post_init__(self) -> None:
        require_sizes(self, "d", "n_heads")
        require_number(self, "eps")
        require_flags(self, "bias")

    def holds(self) -> dict[str, Weight]:
        """The gains (n_heads, d), and biases (n_heads, d) if enabled."""
        gain = {"weight": Weight(shape=(self.n_heads, self.d), role="gain")}
        return gain | ({"bias": Weight(shape=(self.n_heads, self.d), role="bias")} if self.bias else {})


@dataclass(frozen=True, kw_only=True)
class SoftplusScale(Part):
    """x * log(1 + e^weight), over the last dimension of width `d`: a positive factor in a norm's place.

    Zhang et al. 2023 (USM, arXiv 2303.01037), as published: each channel of a query has its own.
    """

    kind = "norm"
    d: int
    """Width of the scaled dimension."""

    def __post_init__(self) -> None:
        require_sizes(self, "d")

    def holds(self) -> dict[str, Weight]:
        """The weight (d), 0 at first."""
        return {"weight": Weight(shape=(self.d,), role="gain", init="zeros")}


Norm = RMSNorm | LayerNorm

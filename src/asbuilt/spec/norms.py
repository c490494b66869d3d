"""Normalisation: LayerNorm (Ba et al. 2016, arXiv 1607.06450) and RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.spec.part import Part, Pass, Saved, Weight, require_flags, require_number, require_sizes


@dataclass(frozen=True, kw_only=True)
class RMSNorm(Part):
    """x / sqrt(mean(x^2) + eps) * weight, over the last `d` numbers."""

    kind = "norm"
    d: int
    eps: float = 1e-6

    def __post_init__(self) -> None:
        require_sizes(self, "d")
        require_number(self, "eps")

    def holds(self) -> dict[str, Weight]:
        """The gain (d)."""
        return {"weight": Weight(shape=(self.d,), role="gain")}

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input and one reciprocal per row."""
        return (
            Saved(name="input", size=run.rows * self.d),
            Saved(name="rstd", size=run.rows, width="wide"),
        )

    def works(self, run: Pass) -> int:
        """The result, and a wide copy of the input where the run's dtype is narrow."""
        numbers = run.rows * self.d
        return numbers * (run.width + (4 if run.width < 4 else 0))


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Part):
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last `d` numbers."""

    kind = "norm"
    d: int
    eps: float = 1e-5
    bias: bool = True

    def __post_init__(self) -> None:
        require_sizes(self, "d")
        require_number(self, "eps")
        require_flags(self, "bias")

    def holds(self) -> dict[str, Weight]:
        """The gain (d) and, unless left out, the bias (d)."""
        gain = {"weight": Weight(shape=(self.d,), role="gain")}
        return gain | {"bias": Weight(shape=(self.d,), role="bias")} if self.bias else gain

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, one mean and one reciprocal per row, in the run's dtype as the library keeps them."""
        return (
            Saved(name="input", size=run.rows * self.d),
            Saved(name="mean", size=run.rows),
            Saved(name="rstd", size=run.rows),
        )

    def works(self, run: Pass) -> int:
        """The result."""
        return run.rows * self.d * run.width


Norm = RMSNorm | LayerNorm

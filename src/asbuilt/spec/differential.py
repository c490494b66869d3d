"""The difference of two attentions: Ye et al. 2024 (arXiv 2410.05258), section 2.1."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asbuilt.spec.norms import RMSNorm
from asbuilt.spec.part import Part, Pass, Weight, require, require_number, require_sizes


@dataclass(frozen=True, kw_only=True)
class Differential(Part):
    """(1 - start) norm(y_i - lambda y_(i + n_heads/2)) of the sums y of each pair of heads i and i + n_heads/2.

    lambda = exp(q1 . k1) - exp(q2 . k2) + start, one number for all heads. Both heads of a pair weigh the values of
    both their key heads, side by side, so that a pair's sums are as wide as its values together.
    """

    kind = "attention"
    n_heads: int
    """Heads, of which the first half are subtracted from."""
    d_head: int
    """Width of a query head, and of q1, k1, q2 and k2."""
    norm: RMSNorm
    """Norm of a pair's difference, over both values."""
    start: float
    """What lambda is besides the learned terms, larger in later layers; from 0 to 1, neither included."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_heads", "d_head")
        require(self, "n_heads", self.n_heads % 2 == 0, "even: heads are in pairs")
        require_number(self, "start")
        require(self, "start", self.start < 1, "less than 1")
        require(self, "norm", isinstance(self.norm, RMSNorm), "an RMSNorm")

    def holds(self) -> dict[str, Weight]:
        """q1, k1, q2 and k2 (d_head)."""
        return dict.fromkeys(("q1", "k1", "q2", "k2"), Weight(shape=(self.d_head,), role="bias", init="normal"))

    def child_run(self, name: str, run: Pass) -> Pass:
        """The norm has one row for each pair of heads and token."""
        return replace(run, tokens=run.tokens * self.n_heads // 2)

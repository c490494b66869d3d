"""Mixtures of experts: a router sends each token to `top_k` of `n_experts` gated feed-forwards, held stacked.

Shazeer et al. 2017 (arXiv 1701.06538); as in Mixtral, arXiv 2401.04088, section 2.1. Shared experts, which every token
passes: Dai et al. 2024 (arXiv 2401.06066), section 3.2; with a gate: Qwen1.5-MoE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, Self

from asbuilt.spec.feedforward import ACTIVATIONS, MLP, Activation, GatedMLP, linear
from asbuilt.spec.part import (
    Part,
    Pass,
    Product,
    Saved,
    Weight,
    divided,
    require,
    require_choice,
    require_flags,
    require_sizes,
)

Scoring = Literal["softmax", "sigmoid"]
SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class Router(Part):
    """The `top_k` largest of scoring(x W^T + b) over the experts, divided by their sum where they are `renormalise`d.

    Scores are computed in float32, or wider where the run is. Softmax over the chosen experts alone is the same as
    softmax over all of them, renormalised, so it is written so.
    """

    kind = "router"
    d_model: int
    n_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    renormalise: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_experts", "top_k")
        require(self, "top_k", self.top_k <= self.n_experts, f"at most n_experts = {self.n_experts}")
        require_choice(self, "scoring", SCORINGS)
        require_flags(self, "renormalise", "bias")

    def holds(self) -> dict[str, Weight]:
        """W (n_experts, d_model) and, if asked, a bias."""
        matrix = {"weight": Weight(shape=(self.n_experts, self.d_model), role="matrix")}
        return matrix | {"bias": Weight(shape=(self.n_experts,), role="bias")} if self.bias else matrix

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product."""
        return (Product(name="logits", a=run.rows, b=self.d_model, c=self.n_experts, weight="weight"),)

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The input, all scores, which were chosen, what they are divided by, and the weights that come out."""
        picked = run.rows * self.top_k
        common = (
            Saved(name="input", size=run.rows * self.d_model),
            Saved(name="scores", size=run.rows * self.n_experts, width="wide"),
            Saved(name="chosen", size=picked, width="int64"),
            Saved(name="weights", size=picked),
        )
        if not self.renormalise:
            return common
        return (
            *common,
            Saved(name="chosen scores", size=picked, width="wide"),
            Saved(name="sums", size=run.rows, width="wide"),
        )

    def works(self, run: Pass) -> int:
        """Logits and scores of all experts, and the chosen ones with their numbers."""
        wide = max(4, run.width)
        return run.rows * (self.n_experts * (run.width + wide) + self.top_k * (wide + 8))


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts(Part):
    """sum over a token's chosen experts e of weight_e * down_e(activation(gate_e(x)) * up_e(x)), plus shared(x).

    The shared expert is multiplied by sigmoid(x w^T) where it is gated. Every row goes to `top_k` experts whatever the
    others do: nothing is dropped, and what is billed does not depend on which experts are hit.
    """

    kind = "ffn"
    d_model: int
    d_ff: int
    n_experts: int
    activation: Activation
    router: Router
    shared: MLP | GatedMLP | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_ff", "n_experts")
        require_choice(self, "activation", ACTIVATIONS)
        require_flags(self, "shared_gate")
        require(self, "router", self.router.d_model == self.d_model, f"a router of d_model = {self.d_model}")
        require(self, "router", self.router.n_experts == self.n_experts, f"a router to n_experts = {self.n_experts}")
        fits = self.shared is None or self.shared.d_model == self.d_model
        require(self, "shared", fits, f"a feed-forward of d_model = {self.d_model}")
        require(self, "shared_gate", self.shared is not None or not self.shared_gate, "false without a shared expert")

    @property
    def top_k(self) -> int:
        """How many experts each token passes."""
        return self.router.top_k

    def holds(self) -> dict[str, Weight]:
        """gate and up (n_experts, d_ff, d_model), down (n_experts, d_model, d_ff), and the shared gate (1, d_model)."""
        inward = Weight(shape=(self.n_experts, self.d_ff, self.d_model), role="matrix")
        outward = Weight(shape=(self.n_experts, self.d_model, self.d_ff), role="stream_matrix")
        gated = linear(1, self.d_model, False, "shared_gate") if self.shared_gate else {}
        return {"gate": inward, "up": inward, "down": outward} | gated

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Devices beyond those that share out the experts divide each expert's d_ff; the router is whole."""
        require(self, "n_experts", self.n_experts % expert == 0, f"a multiple of {expert}, the expert parallel degree")
        shared = None if self.shared is None else self.shared.shard(tensor)
        return replace(self, d_ff=divided(self, "d_ff", max(1, tensor // expert)), shared=shared)

    def spreads(self) -> dict[str, int]:
        """The stacked weights."""
        return dict.fromkeys(("gate", "up", "down"), self.n_experts)

    def touched(self, run: Pass) -> Fraction:
        """Returns how many of the experts one run is expected to hit, E * (1 - (1 - k/E)^rows), if all are as likely.

        Exact for a single row, and to a float's rounding for more.
        """
        missed = Fraction(self.n_experts - self.top_k, self.n_experts)
        return self.n_experts * (1 - (missed if run.rows == 1 else Fraction(float(missed) ** run.rows)))

    def share(self, name: str, run: Pass) -> Fraction:
        """Of the stacked weights only the experts that are hit are read."""
        return self.touched(run) / self.n_experts if name in ("gate", "up", "down") else Fraction(1)

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Three products of rows * top_k rows, over all experts together, and the shared gate."""
        rows = run.rows * self.top_k
        gated = Product(name="shared_gate", a=run.rows, b=self.d_model, c=1, weight="shared_gate.weight")
        return (
            Product(name="gate", a=rows, b=self.d_model, c=self.d_ff, weight="gate"),
            Product(name="up", a=rows, b=self.d_model, c=self.d_ff, weight="up"),
            Product(name="down", a=rows, b=self.d_ff, c=self.d_model, weight="down"),
            *((gated,) if self.shared_gate else ()),
        )

    def same_input(self) -> tuple[tuple[str, str], ...]:
        """The router and the shared expert read what this part reads."""
        return (("router", ""), ("shared", ""))

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The rows sorted by expert, the way there and back, what a gated feed-forward keeps, and their results.

        A shared gate keeps what it multiplies and multiplies by.
        """
        rows = run.rows * self.top_k
        wide = rows * self.d_ff
        before = () if self.activation == "relu" else (Saved(name="gate", size=wide),)
        shared = (Saved(name="openness", size=run.rows), Saved(name="shared result", size=run.rows * self.d_model))
        return (
            Saved(name="places", size=rows, width="int64"),
            Saved(name="tokens", size=rows, width="int64"),
            Saved(name="rows", size=rows * self.d_model),
            *before,
            Saved(name="activated", size=wide),
            Saved(name="up", size=wide),
            Saved(name="hidden", size=wide),
            Saved(name="results", size=rows * self.d_model),
            *(shared if self.shared_gate else ()),
        )

    def remakes(self) -> tuple[str, ...]:
        """The sorted rows, and what a gated feed-forward makes again."""
        return ("rows", "hidden") if self.activation == "relu" else ("rows", "activated", "hidden")

    def works(self, run: Pass) -> int:
        """The router; or the sorted rows with what they are multiplied to; or the shared expert beside the result."""
        rows, stream = run.rows * self.top_k, run.rows * self.d_model * run.width
        chosen = rows * (24 + run.width)
        inside = (rows * self.d_model + 2 * rows * self.d_ff) * run.width
        outward = (2 * rows * self.d_model + rows * self.d_ff) * run.width
        shared = 0 if self.shared is None else stream + max(self.shared.works(run), 2 * stream)
        return max(self.router.works(run), chosen + max(inside, outward), shared)


FeedForward = MLP | GatedMLP | MixtureOfExperts

"""Mixtures of experts: a router sends each token to `top_k` of `n_experts` feed-forwards, whose weights are stacked.

Shazeer et al. 2017 (arXiv 1701.06538); as in Mixtral, arXiv 2401.04088, section 2.1. Shared experts, used by every
token: Dai et al. 2024 (arXiv 2401.06066), section 3.2; with a gate: Qwen1.5-MoE. Group-limited routing: DeepSeek-V2
(arXiv 2405.04434), section 2.2.2; correction bias: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, Self

from asbuilt.spec.feedforward import ACTIVATIONS, MLP, Activation, ClampedGate, GatedMLP
from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import (
    Part,
    Pass,
    Product,
    Weight,
    divided,
    require,
    require_choice,
    require_flags,
    require_number,
    require_sizes,
)

Scoring = Literal["softmax", "sigmoid", "sqrt_softplus"]
SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid", "sqrt_softplus")
GroupScore = Literal["best", "two_best"]
GROUP_SCORES: tuple[GroupScore, ...] = ("best", "two_best")
Weighing = Literal["results", "inputs"]
WEIGHINGS: tuple[Weighing, ...] = ("results", "inputs")
PlainGating = Literal["gated", "none"]
PLAIN_GATINGS: tuple[PlainGating, ...] = ("gated", "none")


@dataclass(frozen=True, kw_only=True)
class ExpertGroups(Part):
    """Group-limited routing: of `n_groups` equal groups of consecutive experts a token uses the best `top_groups`.

    A group's score is that of its best expert, or the sum of its two best.
    """

    n_groups: int
    """Number of groups."""
    top_groups: int
    """Groups that a token may use."""
    score: GroupScore = "best"
    """Score of a group: that of its best expert, or the sum of its two best."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_groups", "top_groups")
        require(self, "top_groups", self.top_groups < self.n_groups, f"fewer than n_groups = {self.n_groups}")
        require_choice(self, "score", GROUP_SCORES)


@dataclass(frozen=True, kw_only=True)
class Router(Part):
    """The `top_k` largest of scoring(x W^T + b) over the experts, divided by their sum if `renormalise`.

    `correction` adds a buffer to the scores that determine the choice, but not to the weights; `groups` limits the
    choice. With a `table` the choice is that of a buffer with a row of experts for each token id (Roller et al. 2021,
    arXiv 2106.04426), and the scores only weigh. `eps` is added to the sum, and `scale` multiplies the weights. Scores
    are computed in float32 or wider; sqrt_softplus is sqrt(ln(1 + e^x)).
    A `norm` is of the router's input alone; `expert_scale` is one learned factor per expert, on the weights. Softmax
    over only the chosen experts equals softmax over all of them, renormalised, and is expressed as such.

    With a `nearness` experts are chosen one after the other, and the weight of each is its share in the softmax over
    those left whose logits s are near the largest left, m: (m - s) / max(|s|, m) <= nearness. What is far, and what was
    chosen before, has no share (SparseMixer as it infers: Liu et al. 2024, arXiv 2409.12136).
    """

    kind = "router"
    d_model: int
    """Width of the residual stream."""
    n_experts: int
    """Number of experts."""
    top_k: int
    """Experts per token."""
    scoring: Scoring = "softmax"
    """Function from logits to scores."""
    renormalise: bool = False
    """Whether the chosen scores are divided by their sum."""
    bias: bool = False
    """Whether a learned vector is added to the logits."""
    correction: bool = False
    """Whether a buffer is added to the scores for the choice only."""
    groups: ExpertGroups | None = None
    """Group limit of the choice."""
    table: int | None = None
    """Rows of the table that says each token's experts, one per token id; None if they are chosen by score."""
    eps: float = 0.0
    """Added to the sum that scores are divided by."""
    scale: float = 1.0
    """Factor on the weights."""
    norm: Norm | None = None
    """Norm of the router's input, which the experts do not read."""
    logit_scale: float = 1.0
    """Factor on the logits."""
    expert_scale: bool = False
    """Whether each expert's weights are multiplied by a learned factor of its own."""
    nearness: float | None = None
    """How near to the largest left, relatively, a logit shares in a choice's softmax; None for one softmax of all."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_experts", "top_k")
        require(self, "norm", self.norm is None or self.norm.d == self.d_model, f"a norm over d_model = {self.d_model}")
        require_flags(self, "expert_scale")
        require_number(self, "logit_scale")
        require_choice(self, "scoring", SCORINGS)
        require_flags(self, "renormalise", "bias", "correction")
        require_number(self, "scale")
        require(self, "eps", self.eps == 0.0 or self.renormalise, "0 unless weights are divided by their sum")
        if self.eps != 0.0:
            require_number(self, "eps")
        require(self, "top_k", self.top_k <= self.n_experts, f"at most n_experts = {self.n_experts}")
        if self.groups is not None:
            self._require_groups(self.groups)
        if self.table is not None:
            require_sizes(self, "table")
            chosen = self.correction or self.groups is not None
            require(self, "table", not chosen, "none beside a correction or groups, which change the choice")
        if self.nearness is not None:
            self._require_plain_choice()

    def _require_plain_choice(self) -> None:
        require_number(self, "nearness")
        plain = self.scoring == "softmax" and not self.renormalise and not self.correction
        plain = plain and self.groups is None and self.table is None
        require(self, "nearness", plain, "none unless softmax scores alone choose, and are not divided by their sum")

    def _require_groups(self, groups: ExpertGroups) -> None:
        size, rest = divmod(self.n_experts, groups.n_groups)
        least = 2 if groups.score == "two_best" else 1
        require(self, "groups", not rest and size >= least, f"equal groups of at least {least} of the experts")
        most = groups.top_groups * size
        require(self, "top_k", self.top_k <= most, f"at most the {most} experts of {groups.top_groups} groups")

    def holds(self) -> dict[str, Weight]:
        """W (n_experts, d_model) and, if enabled, a bias and a factor per expert."""
        matrix = {"weight": Weight(shape=(self.n_experts, self.d_model), role="matrix")}
        bias = {"bias": Weight(shape=(self.n_experts,), role="bias")} if self.bias else {}
        factors = {"expert_scale": Weight(shape=(self.n_experts,), role="gain")} if self.expert_scale else {}
        return matrix | bias | factors

    def buffers(self) -> dict[str, Weight]:
        """The correction, if enabled: one number per expert, updated by load balancing rather than by gradients."""
        if self.table is not None:
            return {"table": Weight(shape=(self.table, self.top_k), role="table", whole=True)}
        return {"correction": Weight(shape=(self.n_experts,), role="bias")} if self.correction else {}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product."""
        return (Product(name="logits", a=run.rows, b=self.d_model, c=self.n_experts, weight="weight"),)


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts(Mapped):
    """sum over a token's chosen experts e of weight_e * down_e(activation(gate_e(x)) * up_e(x)), plus shared(x).

    With `gating` "none" an expert is down_e(activation(up_e(x))); a ClampedGate replaces activation and product. `bias`
    adds a bias to each of an expert's maps. If it `weighs` the "inputs", expert e reads weight_e * x, and the results
    are summed unweighted. A gated shared expert is multiplied by sigmoid(x w^T). Routed and shared experts may have
    norms of their own, of input and result. Every row uses exactly `top_k` experts, so costs do not depend on the
    routing.

    With a `d_latent`, experts read x W_in^T of that width instead of x, and what they sum to is multiplied by W_out^T
    (LatentMoE, as in Nemotron 3 Super); router and shared expert read x.

    With a `capacity`, an expert processes that many tokens of a sequence per pass, first choices before second ones;
    its output for further tokens is multiplied by 0 (Fedus et al. 2021, arXiv 2101.03961, section 2.2). A sequence's
    tokens then depend on each other, and on how it is divided into passes.
    """

    kind = "ffn"
    d_model: int
    """Width of the residual stream."""
    d_ff: int
    """Hidden width of each expert."""
    n_experts: int
    """Number of experts, not counting the shared one."""
    activation: Activation
    """Activation of each expert."""
    router: Router
    """The router."""
    gating: PlainGating | ClampedGate = "gated"
    """Whether experts are gated, plain, or gated with a clamp."""
    bias: bool = False
    """Whether the experts' maps have biases."""
    weighs: Weighing = "results"
    """Whether the router's weights multiply the experts' results or their inputs."""
    shared: MLP | GatedMLP | None = None
    """The expert that every token uses."""
    norm: Norm | None = None
    """Norm of the routed experts' input; router and shared expert do not read it."""
    post_norm: Norm | None = None
    """Norm of the routed experts' sum."""
    shared_norm: Norm | None = None
    """Norm of the shared expert's input."""
    shared_post_norm: Norm | None = None
    """Norm of the shared expert's result."""
    shared_gate: Map | bool = False
    """Whether the shared expert's output is gated by a sigmoid of the stream, or what replaces the plain gate."""
    d_latent: int | None = None
    """Width that experts read and write, between two maps; None for that of the stream."""
    latent_bias: bool = False
    """Whether the maps from and to that width have biases."""
    capacity: int | None = None
    """Tokens of a sequence that an expert processes per pass; None for all."""
    into_latent: Map | None = None
    """Replaces the plain map to the width that experts read, if given."""
    from_latent: Map | None = None
    """Replaces the plain map back, if given."""
    gate: Map | None = None
    """Replaces the plain stack of gates, if given."""
    up: Map | None = None
    """Replaces the plain stack of up maps, if given."""
    down: Map | None = None
    """Replaces the plain stack of down maps, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_ff", "n_experts", *(("capacity",) if self.capacity is not None else ()))
        require_choice(self, "activation", ACTIVATIONS)
        require_flags(self, "bias", *(() if isinstance(self.shared_gate, Map) else ("shared_gate",)))
        if self.d_latent is not None:
            require_sizes(self, "d_latent")
        require_flags(self, "latent_bias")
        require(self, "latent_bias", self.d_latent is not None or not self.latent_bias, "false without a d_latent")
        require_choice(self, "weighs", WEIGHINGS)
        require(self, "weighs", self.d_latent is None or self.weighs == "results", "results beside a d_latent")
        if isinstance(self.gating, ClampedGate):
            require(self, "activation", self.activation == "silu", "silu, which a clamped gate generalises by alpha")
        else:
            require_choice(self, "gating", PLAIN_GATINGS)
        require(self, "router", self.router.d_model == self.d_model, f"a router of d_model = {self.d_model}")
        require(self, "router", self.router.n_experts == self.n_experts, f"a router to n_experts = {self.n_experts}")
        weighed = self.capacity is None or self.weighs == "results"
        require(self, "capacity", weighed, "none if inputs are weighted")
        fits = self.shared is None or self.shared.d_model == self.d_model
        require(self, "shared", fits, f"a feed-forward of d_model = {self.d_model}")
        require(self, "shared_gate", self.shared is not None or not self.shared_gate, "false without a shared expert")
        self._require_norms()
        self.require_maps()

    def _require_norms(self) -> None:
        for name in ("norm", "post_norm", "shared_norm", "shared_post_norm"):
            norm = getattr(self, name)
            require(self, name, norm is None or norm.d == self.d_model, f"a norm over d_model = {self.d_model}")
        for name in ("shared_norm", "shared_post_norm"):
            absent = getattr(self, name) is None
            require(self, name, absent or self.shared is not None, "none without a shared expert")

    def plain_maps(self) -> dict[str, Linear]:
        """The shared expert's gate, d_model to 1, if enabled; the maps to and from the width of experts."""
        gate = {"shared_gate": Linear(d_in=self.d_model, d_out=1, belongs="ffn")} if self.shared_gate else {}
        if self.d_latent is None:
            return gate
        into = Linear(d_in=self.d_model, d_out=self.d_latent, bias=self.latent_bias, belongs="ffn")
        back = replace(into, d_in=self.d_latent, d_out=self.d_model, to_stream=True)
        return gate | {"into_latent": into, "from_latent": back}

    def plain_stacks(self) -> dict[str, Linear]:
        """One map of each kind for every expert: gate and up into d_ff, down out of it."""
        into = Linear(
            d_in=self.d_expert, d_out=self.d_ff, bias=self.bias, split="out", belongs="ffn", copies=self.n_experts
        )
        out = replace(into, d_in=self.d_ff, d_out=self.d_expert, split="in", to_stream=self.d_latent is None)
        return dict.fromkeys(self.inward, into) | {"down": out}

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.router.top_k

    @property
    def d_expert(self) -> int:
        """Width that experts read and write."""
        return self.d_model if self.d_latent is None else self.d_latent

    @property
    def inward(self) -> tuple[str, ...]:
        """Names of the stacks that read the stream."""
        return ("up",) if self.gating == "none" else ("gate", "up")

    def holds(self) -> dict[str, Weight]:
        """gate and up (n_experts, d_ff, d_expert), down (n_experts, d_expert, d_ff), d_expert being what they read.

        With biases gate_bias and up_bias (n_experts, d_ff), and down_bias (n_experts, d_expert).
        """
        return self.stack_weights()

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Devices beyond the expert-parallel ones divide each expert's d_ff; the router is replicated."""
        require(self, "n_experts", self.n_experts % expert == 0, f"a multiple of {expert}, the expert parallel degree")
        shared = None if self.shared is None else self.shared.shard(tensor)
        return self.resized(d_ff=divided(self, "d_ff", max(1, tensor // expert)), shared=shared)

    def spreads(self) -> dict[str, int]:
        """The stacked weights and biases."""
        return dict.fromkeys(self.holds(), self.n_experts)

    def touched(self, run: Pass, replicas: int = 1) -> Fraction:
        """Returns the expected number of experts used in one pass, E * (1 - (1 - k/E)^rows), if all are equally likely.

        Exact for a single row, and up to float rounding for more. Of r `replicas` of each, as many of the first ones,
        E * (1 - (1 - k/(E r))^rows).
        """
        missed = 1 - Fraction(self.top_k, self.n_experts * replicas)
        return self.n_experts * (1 - (missed if run.rows == 1 else Fraction(float(missed) ** run.rows)))

    def share(self, name: str, run: Pass, replicas: int = 1) -> Fraction:
        """Only the experts in use are read."""
        return self.touched(run, replicas) / self.n_experts

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Three products of rows * top_k rows (two without a gate), over all experts together, and the shared gate."""
        rows = run.rows * self.top_k
        stacked = (product for name in self.stacks for product in self.stack_products(name, rows))
        return (*stacked, *self.map_products(run, *self.maps))


FeedForward = MLP | GatedMLP | MixtureOfExperts

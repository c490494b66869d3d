"""Mamba-2: a state space whose decay is one number per head, so that it is also masked attention without a softmax.

Dao & Gu 2024 (arXiv 2405.21060), sections 5 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from asbuilt.spec.convolution import ShortConvolution
from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.part import (
    Pass,
    Product,
    Remembered,
    Weight,
    divided,
    is_finite,
    require,
    require_choice,
    require_flags,
    require_number,
    require_sizes,
)

# Tokens per chunk, computed in parallel before the state is updated: larger chunks mean more work, but fewer sequential
# steps. Results do not depend on it.
CHUNK = 64

OutputGate = Literal["before_norm", "after_norm", "no_norm"]
OUTPUT_GATES: tuple[OutputGate, ...] = ("before_norm", "after_norm", "no_norm")


@dataclass(frozen=True, kw_only=True)
class Mamba2(Mixer):
    """S_t = e^(dt_t A) S_(t-1) + dt_t b_t x_t^T, y_t = c_t^T S_t + d x_t, for each head; A = -e^a_log, d learned.

    One map gives the gate z, then x, b and c, which pass a short convolution, and a step for each head, dt =
    softplus(step + dt_bias), limited to [dt_min, dt_max]. Heads of a group share b and c. The output map reads
    norm(y * silu(z)), normalised over the heads of a group (RMSNorm); S is (d_state, d_head) per head, in float32.
    """

    kind = "ssm"
    d_model: int
    """Width of the residual stream."""
    n_heads: int
    """Heads, each with its own state, decay and step."""
    d_head: int
    """Width of a head."""
    d_state: int
    """Width of b and c, the rows of a state."""
    conv: ShortConvolution
    """Convolution of x, b and c, n_heads * d_head + 2 * n_groups * d_state channels."""
    n_groups: int = 1
    """Groups of heads with the same b and c, and the same norm."""
    bias: bool = False
    """Whether the input map has a bias."""
    output_bias: bool = False
    """Whether the output map has a bias."""
    gate: OutputGate = "before_norm"
    """Whether y is multiplied by silu(z) before it is normalised, after, or without a norm."""
    eps: float = 1e-5
    """Epsilon of the norm."""
    dt_min: float = 0.0
    """Lower limit of a step."""
    dt_max: float | None = None
    """Upper limit of a step, None for none."""
    scales: tuple[float, ...] | None = None
    """Factors on z, x, b, c and the steps as the input map gives them, None for 1."""
    into: Map | None = None
    """Replaces the plain input map."""
    out: Map | None = None
    """Replaces the plain output map."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_heads", "d_head", "d_state", "n_groups")
        require_flags(self, "bias", "output_bias")
        require_choice(self, "gate", OUTPUT_GATES)
        require_number(self, "eps")
        require(self, "dt_min", is_finite(self.dt_min) and self.dt_min >= 0, "a finite number of at least 0")
        if self.dt_max is not None:
            require_number(self, "dt_max", above=self.dt_min)
        five = self.scales is None or (len(self.scales) == 5 and all(map(is_finite, self.scales)))
        require(self, "scales", five, "five finite numbers, or none")
        shared = self.n_heads % self.n_groups == 0
        require(self, "n_groups", shared, f"a divisor of n_heads = {self.n_heads}")
        fits = self.conv.channels == self.channels
        require(self, "conv", fits, f"a convolution of n_heads * d_head + 2 * n_groups * d_state = {self.channels}")
        self.require_maps()

    @property
    def d_inner(self) -> int:
        """Width of all heads together."""
        return self.n_heads * self.d_head

    @property
    def channels(self) -> int:
        """Width of x, b and c together."""
        return self.d_inner + 2 * self.n_groups * self.d_state

    @property
    def d_group(self) -> int:
        """Width of the heads of a group."""
        return self.d_inner // self.n_groups

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of z, of x, b and c together, and of the steps, in the input map's order."""
        return self.d_inner, self.channels, self.n_heads

    def plain_maps(self) -> dict[str, Linear]:
        """into (d_model to z, x, b, c and steps) and out (n_heads * d_head to d_model)."""
        into = Linear(d_in=self.d_model, d_out=sum(self.widths), bias=self.bias, split="out", belongs="ssm")
        out = Linear(
            d_in=self.d_inner, d_out=self.d_model, bias=self.output_bias, split="in", to_stream=True, belongs="ssm"
        )
        return {"into": into, "out": out}

    def holds(self) -> dict[str, Weight]:
        """a_log, d and dt_bias (n_heads), and the norm's gain (n_heads * d_head), if there is a norm."""
        number = Weight(shape=(self.n_heads,), role="bias", split="out")
        gain = Weight(shape=(self.d_inner,), role="gain", split="out")
        own = {"a_log": number, "d": replace(number, role="gain"), "dt_bias": number}
        return own if self.gate == "no_norm" else own | {"gain": gain}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_heads / tensor heads and their groups; a group of several devices is on each of them."""
        heads = divided(self, "n_heads", tensor)
        groups = divided(self, "n_groups", tensor) if self.n_groups >= tensor else 1
        whole = self.n_groups >= tensor or tensor % self.n_groups == 0
        require(self, "n_groups", whole, f"a divisor or multiple of {tensor}, the number of devices that share it")
        channels = heads * self.d_head + 2 * groups * self.d_state
        return self.resized(n_heads=heads, n_groups=groups, conv=replace(self.conv, channels=channels))

    def chunks(self, run: Pass) -> list[tuple[int, int]]:
        """Returns (tokens, count) of the full chunks of a pass and of the partial one, if any."""
        return chunks(run)

    def n_read(self, run: Pass) -> int:
        """Returns the tokens that read a state: all but those of a sequence's first chunk."""
        return n_read(run)

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Maps; scores of each group and weighted sums of each head within chunks; reading and updating states.

        The last chunk updates them only for a cache.
        """
        within = chunk_products(run, self.n_heads, self.n_groups, self.d_state, self.d_head)
        return (*self.map_products(run, "into"), *within, *self.map_products(run, "out"))

    def remembers(self) -> tuple[Remembered, ...]:
        """The states: n_heads * d_head * d_state numbers of a sequence, in float32."""
        shape = (self.n_groups, self.d_state, self.d_group)
        return (Remembered(name="state", shape=shape, per="sequence", dtype="float32"),)


def chunks(run: Pass) -> list[tuple[int, int]]:
    """Returns (tokens, count) of the full chunks of a pass and of the partial one, if any."""
    full, rest = divmod(run.tokens, CHUNK)
    return [(size, n) for size, n in ((CHUNK, full), (rest, 1)) if size and n]


def n_read(run: Pass) -> int:
    """Returns the tokens that read a state: all but those of a sequence's first chunk."""
    return run.tokens if run.past else max(0, run.tokens - CHUNK)


def chunk_products(
    run: Pass, n_heads: int, n_groups: int, d_state: int, d_head: int, *, recomputed: bool = False
) -> tuple[Product, ...]:
    """Returns the products of a recurrence whose heads decay as a whole: heads of a group share scores.

    Within chunks scores of each group and weighted sums of each head; then reading and updating (d_state, d_head)
    states. The last chunk updates them only for a cache. `recomputed` says that the kernel saves its inputs alone.
    """
    heads, groups = run.batch * n_heads, run.batch * n_groups
    again: dict[str, Any] = {"recomputed": recomputed}
    found: list[Product] = []
    for size, n in chunks(run):
        pairs = n * size * (size + 1)
        scores, mix = groups * pairs * d_state, heads * pairs * d_head
        found += [
            Product(name="scores", a=size, b=d_state, c=size, n=groups * n, needed=scores, **again),
            Product(name="mix", a=size, b=size, c=d_head, n=heads * n, needed=mix, **again),
        ]
    last, wide = chunks(run)[-1][0], n_heads // n_groups * d_head
    before, read = run.tokens - last, n_read(run)
    if read:
        found.append(Product(name="read", a=read, b=d_state, c=wide, n=groups, **again))
    if before:
        found.append(Product(name="update", a=d_state, b=before, c=wide, n=groups, **again))
    return (*found, Product(name="last update", a=d_state, b=last, c=wide, n=groups, caching=True, **again))

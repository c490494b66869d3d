"""RWKV-4's mixers: a weighted average of past values, and a feed-forward that sees the token before.

Peng et al. 2023 (arXiv 2305.13048), section 3.1; the feed-forward without a receptance: Peng et al. 2025
(arXiv 2503.14456), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.attention import output_map
from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.part import (
    KINDS,
    Kind,
    Part,
    Pass,
    Product,
    Remembered,
    Weight,
    divided,
    require,
    require_choice,
    require_flags,
    require_sizes,
)

PIECE = 256  # tokens whose averages are computed at once: enough to amortise calls, few enough to bound what they need


@dataclass(frozen=True, kw_only=True)
class TokenShift(Part):
    """mu_i * x_t + (1 - mu_i) * x_{t-1} for each of several targets i; x before a text is 0.

    With `of_past` mu is the factor on x_{t-1} instead. A sequence's state is its last x.
    """

    d_model: int
    """Width of x."""
    targets: tuple[str, ...]
    """Names of the targets, each with its own mu."""
    belongs: Kind = "attention"
    """The kind of part that its parameters are counted under."""
    of_past: bool = False
    """Whether mu is the factor on the token before, rather than on the token itself."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model")
        require_flags(self, "of_past")
        require_choice(self, "belongs", KINDS)
        named = isinstance(self.targets, tuple) and all(isinstance(n, str) and n.isidentifier() for n in self.targets)
        require(self, "targets", named and len({*self.targets}) == len(self.targets) > 0, "names that differ")

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """What its parameters are counted under."""
        return self.belongs

    def holds(self) -> dict[str, Weight]:
        """mu (d_model) of each target."""
        return {name: Weight(shape=(self.d_model,), role="bias") for name in self.targets}

    def remembers(self) -> tuple[Remembered, ...]:
        """The last x: d_model numbers for a sequence."""
        return (Remembered(name="before", shape=(self.d_model,), per="sequence"),)


@dataclass(frozen=True, kw_only=True)
class TimeMixing(Mixer):
    """o(sigmoid(r) * wkv(k, v)), k, v and r maps of the shifted stream.

    wkv is the average of past values weighted by exp(k), which decays by -exp(decay) per token and channel, and of the
    token's own value weighted by exp(k + first). Numerator, denominator and their exponent are the state, in float32.
    """

    d_model: int
    """Width of the residual stream."""
    d_state: int
    """Channels, each with its own average."""
    shift: TokenShift
    """What k, v and r are maps of: its targets have these names."""
    k: Map | None = None
    """Replaces the plain map to keys."""
    v: Map | None = None
    """Replaces the plain map to values."""
    r: Map | None = None
    """Replaces the plain map to the receptance r."""
    o: Map | None = None
    """Replaces the plain map back to the stream."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_state")
        require_shift(self, self.shift, ("k", "v", "r"))
        self.require_maps()

    def plain_maps(self) -> dict[str, Linear]:
        """k, v and r (d_model to d_state), o (d_state to d_model)."""
        into = Linear(d_in=self.d_model, d_out=self.d_state, split="out", belongs="attention")
        return {"k": into, "v": into, "r": into, "o": output_map(self.d_state, self.d_model, bias=False)}

    def holds(self) -> dict[str, Weight]:
        """decay and first (d_state)."""
        return dict.fromkeys(("decay", "first"), Weight(shape=(self.d_state,), role="bias", split="out"))

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds d_state / tensor channels."""
        return self.resized(d_state=divided(self, "d_state", tensor))

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Each map once; the averages are elementwise."""
        return self.map_products(run, *self.maps)

    def remembers(self) -> tuple[Remembered, ...]:
        """Numerator, denominator and exponent: d_state float32 numbers each for a sequence."""
        names = ("numerator", "denominator", "exponent")
        return tuple(Remembered(name=n, shape=(self.d_state,), per="sequence", dtype="float32") for n in names)


@dataclass(frozen=True, kw_only=True)
class ChannelMixing(Mixer):
    """sigmoid(r) * down(relu(up)^2), up and r maps of the shifted stream: a feed-forward that sees the token before.

    Without a receptance it is down(relu(up)^2). All that is remembered is the shift's.
    """

    kind = "ffn"
    d_model: int
    """Width of the residual stream."""
    d_ff: int
    """Hidden width."""
    shift: TokenShift
    """What up and r are maps of: its targets have these names."""
    receptance: bool = True
    """Whether the result is multiplied by sigmoid(r)."""
    up: Map | None = None
    """Replaces the plain up map."""
    r: Map | None = None
    """Replaces the plain map to the receptance r, if there is one."""
    down: Map | None = None
    """Replaces the plain down map."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_ff")
        require_flags(self, "receptance")
        require_shift(self, self.shift, ("up", "r") if self.receptance else ("up",))
        self.require_maps()

    def plain_maps(self) -> dict[str, Linear]:
        """up (d_model to d_ff), r (d_model to d_model) if there is a receptance, down (d_ff to d_model)."""
        up = Linear(d_in=self.d_model, d_out=self.d_ff, split="out", belongs="ffn")
        down = Linear(d_in=self.d_ff, d_out=self.d_model, split="in", to_stream=True, belongs="ffn")
        r = {"r": replace(up, d_out=self.d_model, split=None)} if self.receptance else {}
        return {"up": up, **r, "down": down}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds d_ff / tensor of the hidden width; r is replicated."""
        return self.resized(d_ff=divided(self, "d_ff", tensor))

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Each map once."""
        return self.map_products(run, *self.maps)


def require_shift(part: Mixer, shift: TokenShift, targets: tuple[str, ...]) -> None:
    """Raises InputError unless the shift has the part's width and these targets."""
    fits = isinstance(shift, TokenShift) and (shift.d_model, shift.targets) == (part.d_model, targets)
    require(part, "shift", fits, f"a TokenShift of d_model = {part.d_model} to {', '.join(targets)}")

"""Positions: learned tables, sinusoids, ALiBi, relative buckets, and RoPE with its published scalings.

The RoPE angle of token t for pair i is t * theta^(-2i/d_rotary) (Su et al. 2021, arXiv 2104.09864). A scaling changes
these frequencies, and may multiply cos and sin by an attention factor. Plain Python floats: no torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Literal, Self

from asbuilt.spec.part import (
    LARGEST_SIZE,
    Part,
    Weight,
    divided,
    require,
    require_choice,
    require_flags,
    require_number,
    require_sizes,
    walk,
)


@dataclass(frozen=True, kw_only=True)
class LearnedPositions(Part):
    """A table of one learned vector per position, added to the token embedding.

    Position p is in row p + `offset`: some tables start with unused rows.
    """

    kind = "embedding"
    n_positions: int
    """Number of positions."""
    d_model: int
    """Width of the residual stream."""
    offset: int = 0
    """Unused rows before position 0."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_positions", "d_model")
        whole = isinstance(self.offset, int) and not isinstance(self.offset, bool)
        require(self, "offset", whole and 0 <= self.offset <= LARGEST_SIZE, "a whole number of at least 0")

    def holds(self) -> dict[str, Weight]:
        """The table (n_positions + offset, d_model)."""
        return {"weight": Weight(shape=(self.n_positions + self.offset, self.d_model), role="table")}


Interpolation = Literal["corners", "linear", "cubic", "triangle"]
INTERPOLATIONS: tuple[Interpolation, ...] = ("corners", "linear", "cubic", "triangle")


@dataclass(frozen=True, kw_only=True)
class GridPositions(Part):
    """A square table of learned vectors, interpolated to an image's grid and added to its patches.

    With "corners", patch (r, c) of (h, w) is at (r (n_side - 1) / (h - 1), c (n_side - 1) / (w - 1)) of the table; the
    four vectors around it are averaged by their nearness (bilinear, corners aligned), as in Qwen3-VL's published code.
    Otherwise it is at ((r + 1/2) n_side / h - 1/2, (c + 1/2) n_side / w - 1/2): with "linear" amid the four vectors
    around it, as in Step-3.7's published code; with "cubic" amid sixteen vectors that are weighed by the kernel of
    Keys 1981 with a = -3/4 (bicubic), as in MoonViT's (Kimi Team 2025, arXiv 2504.07491);
    with "triangle" amid those nearer than s = max(1, n_side / h) along rows and likewise along columns, weighed by
    1 - distance / s (bilinear, antialiased), as in SigLIP 2's (Tschannen et al. 2025, arXiv 2502.14786).
    """

    kind = "embedding"
    n_side: int
    """Vectors per side."""
    d_model: int
    """Width of the residual stream."""
    interpolation: Interpolation = "corners"
    """Which vectors are averaged, and by which weights: `corners`, `linear`, `cubic` or `triangle`."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_side", "d_model")
        require_choice(self, "interpolation", INTERPOLATIONS)

    def n_taps(self, length: int) -> int:
        """Returns the vectors averaged along an axis of so many patches."""
        if self.interpolation == "triangle":
            return ceil(2 * max(1.0, self.n_side / length))
        return 4 if self.interpolation == "cubic" else 2

    def holds(self) -> dict[str, Weight]:
        """The table (n_side^2, d_model), row by row."""
        return {"weight": Weight(shape=(self.n_side**2, self.d_model), role="table")}


SinusoidLayout = Literal["halves", "interleaved"]
SINUSOID_LAYOUTS: tuple[SinusoidLayout, ...] = ("halves", "interleaved")


@dataclass(frozen=True, kw_only=True)
class Sinusoids(Part):
    """Sines and cosines of t * theta^(-2i/d_model) at position t, added to the token embedding (arXiv 1706.03762, 3.5).

    `layout` is the place of pair i: i and i + d_model/2 ("halves", as in the released code), or 2i and 2i + 1
    ("interleaved", as in the paper). The table is computed, but counts towards the parameters as built.
    """

    kind = "embedding"
    n_positions: int
    """Number of positions."""
    d_model: int
    """Width of the residual stream."""
    theta: float = 10000.0
    """Base of the frequencies."""
    layout: SinusoidLayout = "halves"
    """Place of sine and cosine of a pair: in `halves`, or `interleaved`."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_positions", "d_model")
        require_number(self, "theta")
        require_choice(self, "layout", SINUSOID_LAYOUTS)

    def holds(self) -> dict[str, Weight]:
        """The table (n_positions, d_model), which is not trained."""
        return {"weight": Weight(shape=(self.n_positions, self.d_model), role="table", learned=False)}

    @property
    def frequencies(self) -> tuple[float, ...]:
        """Radians per token of each pair; with an odd width the last one has only the sine."""
        return tuple(float(self.theta) ** (-2 * i / self.d_model) for i in range((self.d_model + 1) // 2))


@dataclass(frozen=True, kw_only=True)
class LinearScaling(Part):
    """Position interpolation: every frequency divided by `factor` (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float
    """Divisor of every frequency."""

    def __post_init__(self) -> None:
        require_number(self, "factor")


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Part):
    """NTK-aware scaling whose base grows with the length L once L exceeds the trained context.

    theta' = theta * (factor * L / original - (factor - 1))^(d / (d - 2)), as transformers defines `dynamic`. L is the
    length of a row's own text, not of the longest in the batch. Beyond the original context every new token changes all
    angles, so the cache is recomputed for each (transformers keeps the old keys, so that its output depends on
    caching).
    """

    factor: float
    """Growth of the base with the length."""
    original_context: int
    """Tokens up to which frequencies are unchanged."""

    def __post_init__(self) -> None:
        require_number(self, "factor")
        require_sizes(self, "original_context")


@dataclass(frozen=True, kw_only=True)
class YaRN(Part):
    """NTK-by-parts with an attention factor (Peng et al. 2023, arXiv 2309.00071).

    Pairs that rotate more than `beta_fast` times within the original context keep their frequency, those that rotate
    less than `beta_slow` times are divided by `factor`, with a linear ramp in between. `attention_factor` multiplies
    cos and sin; None means 0.1 ln(factor) + 1.

    Two forms of the ramp are published. This is the released code's, as in transformers and vLLM: linear in the index i
    of the pair, between the pairs that rotate `beta_fast` and `beta_slow` times, rounded outwards to whole pairs with
    `truncate` (floor and ceil), as in all models but gpt-oss. The paper's section 3.2 is instead linear in the number
    of rotations, and so curved over i; it writes alpha for `beta_slow` and beta for `beta_fast`.
    """

    factor: float
    """Divisor of the frequencies of slow pairs."""
    original_context: int
    """Context length of the original training."""
    beta_fast: float = 32.0
    """Rotations within that context above which a pair keeps its frequency."""
    beta_slow: float = 1.0
    """Rotations within that context below which a pair's frequency is divided by the full factor."""
    attention_factor: float | None = None
    """Factor on cos and sin; None means 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Whether the ramp begins and ends at whole pairs."""

    def __post_init__(self) -> None:
        require_number(self, "factor")
        require_sizes(self, "original_context")
        require_number(self, "beta_fast")
        require_number(self, "beta_slow")
        require(self, "beta_fast", self.beta_fast >= self.beta_slow, "at least beta_slow")
        if self.attention_factor is not None:
            require_number(self, "attention_factor")
        require_flags(self, "truncate")


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(Part):
    """Wavelength-dependent interpolation of Llama 3.1 (its published reference code and `rope_type: llama3`).

    Frequencies with wavelengths above original/low_freq_factor are divided by `factor`, those below
    original/high_freq_factor are kept, and those in between interpolated; with equal factors there are none in between.
    """

    factor: float
    """Divisor of the frequencies of long wavelengths."""
    low_freq_factor: float
    """Wavelengths above original_context / low_freq_factor are long."""
    high_freq_factor: float
    """Wavelengths below original_context / high_freq_factor are short, and kept."""
    original_context: int
    """Context length of the original training."""

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            require_number(self, name)
        require_sizes(self, "original_context")
        require(self, "high_freq_factor", self.high_freq_factor >= self.low_freq_factor, "at least low_freq_factor")


@dataclass(frozen=True, kw_only=True)
class FrequencyFactors(Part):
    """A divisor per pair's frequency, as stored in GGUF files under `rope_freqs`."""

    factors: tuple[float, ...]
    """Divisor of each pair's frequency."""

    def __post_init__(self) -> None:
        ok = all(isinstance(x, float) and math.isfinite(x) and x > 0 for x in self.factors)
        require(self, "factors", bool(self.factors) and ok, "finite numbers above 0, one per rotated pair")


@dataclass(frozen=True, kw_only=True)
class Proportional(Part):
    """Only the first `n_pairs` pairs are rotated, by frequencies divided by `factor`; those of the others are 0.

    Frequencies are those of whole heads, unlike with a smaller `d_rotary` (Gemma 4; `rope_type: proportional`).
    """

    n_pairs: int
    """Pairs that are rotated, the fastest ones."""
    factor: float = 1.0
    """Divisor of their frequencies."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_pairs")
        require_number(self, "factor")


@dataclass(frozen=True, kw_only=True)
class LongRope(Part):
    """A divisor per pair's frequency, with one list up to the original context and one beyond it.

    `attention_factor` multiplies cos and sin, and `long_attention_factor` those of longer texts. Ding et al. 2024
    (LongRoPE, arXiv 2402.13753), as in Phi-3 and Phi-3.5-MoE. A row's list is chosen by the length of its own text,
    not of the longest in the batch as in transformers, so that an answer does not depend on other rows. A text that
    outgrows the original context is recomputed once with the other list.
    """

    short_factors: tuple[float, ...]
    """Divisors of the pairs' frequencies up to the original context."""
    long_factors: tuple[float, ...]
    """Divisors of the pairs' frequencies beyond it."""
    original_context: int
    """Context length of the original training."""
    attention_factor: float
    """Factor on cos and sin."""
    long_attention_factor: float | None = None
    """Factor on cos and sin beyond the original context; None for the same as up to it."""

    def __post_init__(self) -> None:
        for name in ("short_factors", "long_factors"):
            values = getattr(self, name)
            ok = isinstance(values, tuple) and all(isinstance(x, float) and math.isfinite(x) and x > 0 for x in values)
            require(self, name, ok and len(values) > 0, "finite numbers above 0, one per rotated pair")
        require_sizes(self, "original_context")
        require_number(self, "attention_factor")
        if self.long_attention_factor is not None:
            require_number(self, "long_attention_factor")
            other = self.long_attention_factor != self.attention_factor
            require(self, "long_attention_factor", other, "none, or another than attention_factor")


# Scalings with which a text's frequencies depend on its length.
BY_LENGTH = (DynamicNTK, LongRope)
Scaling = LongRope | LinearScaling | DynamicNTK | YaRN | Llama3Scaling | FrequencyFactors | Proportional


@dataclass(frozen=True, kw_only=True)
class Sections(Part):
    """Pairs divided among the three coordinates of a token: time, row and column (M-RoPE).

    A text's tokens have three equal coordinates, so that this is ordinary RoPE; an image's tokens have those of its
    grid. Wang et al. 2024, Qwen2-VL (arXiv 2409.12191), section 2.1. `interleaved` gives pair i to coordinate i mod 3
    as long as rows and columns have pairs left, and the rest to time (Qwen3-VL's published code).
    """

    pairs: tuple[int, int, int]
    """Pairs of time, rows and columns."""
    interleaved: bool = False
    """Whether coordinates take turns; otherwise pairs of one coordinate are adjacent."""

    def __post_init__(self) -> None:
        sizes = isinstance(self.pairs, tuple) and len(self.pairs) == 3
        whole = sizes and all(type(n) is int and 0 <= n <= LARGEST_SIZE for n in self.pairs)
        require(self, "pairs", whole and sum(self.pairs) > 0, "three whole numbers, of time, rows and columns")
        require_flags(self, "interleaved")
        last = max(3 * self.pairs[axis] - 3 + axis for axis in (1, 2))
        fits = not self.interleaved or last < sum(self.pairs)
        require(self, "pairs", fits, "such that rows and columns end within all pairs, if interleaved")

    @property
    def axes(self) -> tuple[int, ...]:
        """The coordinate of each pair: 0 time, 1 row, 2 column."""
        if not self.interleaved:
            return tuple(axis for axis, n in enumerate(self.pairs) for _ in range(n))
        return tuple(i % 3 if i < 3 * self.pairs[i % 3] else 0 for i in range(sum(self.pairs)))


@dataclass(frozen=True, kw_only=True)
class Plane(Part):
    """Half of the pairs are rotated by a patch's row, the other half by its column, both from 0.

    Both halves have the same frequencies, theta^(-4i/d_rotary); if `staggered`, columns have those between,
    theta^(-(4i + 2)/d_rotary) (Pixtral: Agrawal et al. 2024, arXiv 2410.07073). Rows have the first half, or with
    `columns_first` columns; if `alternating`, pairs take turns, a column's first (MoonViT: Kimi Team 2025, arXiv
    2504.07491). In a text both coordinates are the position.

    If `timed`, a third of the pairs, the first, is rotated by time, which is 0 in an image; all thirds have the
    frequencies theta^(-6i/d_rotary), as in MiniMax-M3's published code.
    """

    alternating: bool = False
    """Whether pairs of columns and of rows take turns."""
    staggered: bool = False
    """Whether frequencies of columns lie between those of rows."""
    columns_first: bool = False
    """Whether the first half of the pairs is rotated by columns."""
    timed: bool = False
    """Whether a third of the pairs is rotated by time."""

    def __post_init__(self) -> None:
        require_flags(self, "alternating", "staggered", "columns_first", "timed")
        for name in ("alternating", "staggered", "columns_first"):
            require(self, name, not (self.timed and getattr(self, name)), "false beside pairs of time")
        halves = not (self.alternating and self.columns_first)
        require(self, "columns_first", halves, "false beside pairs that take turns, a column's first")

    @property
    def unit(self) -> int:
        """What the rotated numbers are a multiple of: a pair for each coordinate."""
        return 6 if self.timed else 4

    def axes(self, n_pairs: int) -> tuple[int, ...]:
        """Returns the coordinate of each pair: 0 for time, 1 for rows, 2 for columns."""
        if self.timed:
            return tuple(axis for axis in range(3) for _ in range(n_pairs // 3))
        half = n_pairs // 2
        if self.alternating:
            return (2, 1) * half
        return (2,) * half + (1,) * half if self.columns_first else (1,) * half + (2,) * half

    def frequencies(self, d_rotary: int, theta: float) -> tuple[float, ...]:
        """Returns radians per row or column for each pair."""
        rows = [theta ** (-self.unit * i / d_rotary) for i in range(d_rotary // self.unit)]
        if self.timed:
            return tuple(rows * 3)
        columns = [theta ** (-(4 * i + 2) / d_rotary) for i in range(d_rotary // 4)] if self.staggered else rows
        if not self.alternating:
            return (*columns, *rows) if self.columns_first else (*rows, *columns)
        return tuple(frequency for pair in zip(columns, rows, strict=True) for frequency in pair)


@dataclass(frozen=True, kw_only=True)
class Centres(Part):
    """Half of the pairs are rotated by the row of a patch's centre, the other half by its column, both from -1 to 1.

    Patch (r, c) of a square image is at ((2r + 1) / n_side - 1, (2c + 1) / n_side - 1), whatever its size; both halves
    have the frequencies 2 pi theta^(-4i/d_rotary). Tokens before and after the patches are not rotated. Simeoni et al.
    2025, DINOv3 (arXiv 2508.10104).
    """

    n_side: int
    """Patches per side of the image."""
    n_before: int
    """Tokens before the patches."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_side")
        whole = type(self.n_before) is int and 0 <= self.n_before <= LARGEST_SIZE
        require(self, "n_before", whole, "a whole number of at least 0")

    def frequencies(self, d_rotary: int, theta: float) -> tuple[float, ...]:
        """Returns radians per unit of each pair's coordinate."""
        return tuple(2 * math.pi * theta ** (-4 * i / d_rotary) for i in range(d_rotary // 4)) * 2


@dataclass(frozen=True, kw_only=True)
class Rotary(Part):
    """RoPE on the first `d_rotary` numbers of each head.

    `pairing` is which two numbers form a pair: `halves` (i, i + d/2), or `adjacent` (2i, 2i + 1). On a square `grid`
    with that many patches per side, the first half of the pairs is rotated by a patch's column and the other half by
    its row, both from 1, and tokens after the patches are not rotated (Agrawal et al. 2024, arXiv 2410.07073). `axes`
    rotate pairs by different coordinates of a token, in images of any shape, or by a patch's centre in square ones.
    """

    d_rotary: int
    """How many numbers at the start of each head are rotated."""
    theta: float = 10000.0
    """Base of the frequencies."""
    pairing: Literal["halves", "adjacent"] = "halves"
    """Which two numbers are a pair: i and i + d_rotary/2 (`halves`), or 2i and 2i + 1 (`adjacent`)."""
    scaling: Scaling | None = None
    """Scaling of the frequencies for contexts longer than in training."""
    grid: int | None = None
    """Patches per side, if positions are those of a square image."""
    axes: Sections | Plane | Centres | None = None
    """Which coordinate rotates which pair; None for the position in the text."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_rotary")
        require(self, "d_rotary", self.d_rotary % 2 == 0, "an even number, since RoPE rotates pairs")
        require_number(self, "theta")
        require_choice(self, "pairing", ("halves", "adjacent"))
        if self.grid is not None:
            require_sizes(self, "grid")
            require(
                self, "d_rotary", self.d_rotary % 4 == 0, "a multiple of 4 on a grid, with pairs for columns and rows"
            )
            require(self, "scaling", self.scaling is None, "none on a grid")
        self._require_axes()
        if isinstance(self.scaling, FrequencyFactors):
            n = len(self.scaling.factors)
            require(self, "scaling", n == self.d_rotary // 2, f"d_rotary/2 = {self.d_rotary // 2} factors, got {n}")
        if isinstance(self.scaling, Proportional):
            n = self.d_rotary // 2
            require(self, "scaling", self.scaling.n_pairs <= n, f"at most d_rotary/2 = {n} pairs")
        if isinstance(self.scaling, LongRope):
            for n in (len(self.scaling.short_factors), len(self.scaling.long_factors)):
                require(self, "scaling", n == self.d_rotary // 2, f"d_rotary/2 = {self.d_rotary // 2} factors, got {n}")
        if isinstance(self.scaling, YaRN):
            require(self, "theta", self.theta > 1, "more than 1 under YaRN, which divides by its logarithm")
        if isinstance(self.scaling, DynamicNTK):
            require(self, "d_rotary", self.d_rotary > 2, "more than 2 under dynamic NTK, whose exponent is d/(d-2)")

    def _require_axes(self) -> None:
        require(self, "axes", self.axes is None or self.grid is None, "none on a square grid")
        if isinstance(self.axes, Sections):
            n = self.d_rotary // 2
            require(self, "axes", sum(self.axes.pairs) == n, f"sections of d_rotary/2 = {n} pairs")
            require(self, "scaling", not self.depends_on_length, "none that depends on a text's length, with sections")
        if isinstance(self.axes, Plane):
            unit = self.axes.unit
            require(
                self, "d_rotary", self.d_rotary % unit == 0, f"a multiple of {unit}, with pairs for each coordinate"
            )
            require(self, "scaling", self.scaling is None, "none in a plane")
        if isinstance(self.axes, Centres):
            allowed = "a multiple of 4, with pairs for rows and columns"
            require(self, "d_rotary", self.d_rotary % 4 == 0, allowed)
            require(self, "scaling", self.scaling is None, "none by centres")

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on a sequence's length, so that every row has its own."""
        return isinstance(self.scaling, BY_LENGTH)

    def length_class(self, length: int) -> int:
        """Returns the length that determines a text's frequencies; texts with equal ones share frequencies."""
        if isinstance(self.scaling, DynamicNTK):
            return max(length, self.scaling.original_context)
        if isinstance(self.scaling, LongRope):
            return self.scaling.original_context + (length > self.scaling.original_context)
        return 0

    def factor_at(self, length: int) -> float:
        """Returns the factor on cos and sin for a sequence of `length` tokens."""
        if isinstance(self.scaling, LongRope) and length > self.scaling.original_context:
            long = self.scaling.long_attention_factor
            return self.attention_factor if long is None else float(long)
        return self.attention_factor

    @property
    def stretches(self) -> bool:
        """Whether a head's length changes, by a factor on cos and sin other than 1."""
        long = isinstance(self.scaling, LongRope) and self.scaling.long_attention_factor is not None
        return long or self.attention_factor != 1.0

    @property
    def attention_factor(self) -> float:
        """Factor on cos and sin, of a text within the original context."""
        if isinstance(self.scaling, LongRope):
            return float(self.scaling.attention_factor)
        if not isinstance(self.scaling, YaRN):
            return 1.0
        if self.scaling.attention_factor is not None:
            return float(self.scaling.attention_factor)
        return 0.1 * math.log(self.scaling.factor) + 1.0 if self.scaling.factor > 1 else 1.0

    def inverse_frequencies(self, length: int = 0) -> tuple[float, ...]:
        """Returns radians per token, or unit of a coordinate, for each of the d_rotary/2 pairs, in `length` tokens."""
        return _frequencies(self, self.length_class(length))


def rotaries_by_length(part: Part) -> tuple[Rotary, ...]:
    """Returns the distinct RoPE parts of cached mixers whose frequencies depend on a sequence's length.

    If `length_class` changes for one of them, the whole cache of the sequence must be recomputed, since each
    layer's input depends on the old angles.
    """
    mixers = (inner for _, inner in walk(part) if any(r.of == "sequence" for r in inner.remembers()))
    rotaries = (inner for mixer in mixers for _, inner in walk(mixer) if isinstance(inner, Rotary))
    return tuple(dict.fromkeys(rotary for rotary in rotaries if rotary.depends_on_length))


def read_again(rotaries: tuple[Rotary, ...], past: int, length: int) -> int:
    """Returns how many cached tokens a pass from `past` to `length` tokens recomputes: all `past`, or none."""
    return past if any(rotary.length_class(past) != rotary.length_class(length) for rotary in rotaries) else 0


@lru_cache(maxsize=1024)
def _frequencies(rotary: Rotary, length: int) -> tuple[float, ...]:
    d, scaling, theta = rotary.d_rotary, rotary.scaling, float(rotary.theta)
    if isinstance(rotary.axes, Plane | Centres):
        return rotary.axes.frequencies(d, theta)
    if rotary.grid is not None:
        return tuple(theta ** (-4 * i / d) for i in range(d // 4)) * 2
    if isinstance(scaling, DynamicNTK):
        stretch = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
        theta *= stretch ** (d / (d - 2))
    plain = tuple(theta ** (-2 * i / d) for i in range(d // 2))
    if isinstance(scaling, LinearScaling):
        return tuple(f / scaling.factor for f in plain)
    if isinstance(scaling, Proportional):
        return tuple(f / scaling.factor if i < scaling.n_pairs else 0.0 for i, f in enumerate(plain))
    if isinstance(scaling, YaRN):
        return _yarn(plain, scaling, d, theta)
    if isinstance(scaling, Llama3Scaling):
        return tuple(_llama3(f, scaling) for f in plain)
    if isinstance(scaling, LongRope):
        factors = scaling.long_factors if length > scaling.original_context else scaling.short_factors
        return tuple(f / x for f, x in zip(plain, factors, strict=True))
    if isinstance(scaling, FrequencyFactors):
        return tuple(f / x for f, x in zip(plain, scaling.factors, strict=True))
    return plain


def _yarn(plain: tuple[float, ...], scaling: YaRN, d: int, theta: float) -> tuple[float, ...]:
    def pair_with_rotations(times: float) -> float:
        return d * math.log(scaling.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_rotations(scaling.beta_fast), pair_with_rotations(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    width = (high - low) or 0.001  # the published code's guard against an empty ramp
    ramp = [min(1.0, max(0.0, (i - low) / width)) for i in range(d // 2)]
    return tuple(f / scaling.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True))


def _llama3(frequency: float, scaling: Llama3Scaling) -> float:
    turns = scaling.original_context * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = float(turns >= low) if low == high else min(1.0, max(0.0, (turns - low) / (high - low)))
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


@dataclass(frozen=True, kw_only=True)
class Alibi(Part):
    """Each head adds -slope * distance to its scores (Press et al. 2021, arXiv 2108.12409).

    For n a power of two the slopes are 2^(-bias_max/n * i), i = 1 ... n; otherwise those of the next lower power,
    followed by the first, third ... of the next higher power. (MPT's code starts with the second, fourth ... of the
    higher power, which are those of the lower power, so it is the same function.)
    """

    n_heads: int
    """Heads, each with its own slope."""
    bias_max: float = 8.0
    """Negative binary logarithm of the smallest slope, if the number of heads is a power of two."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_heads")
        require_number(self, "bias_max")

    @property
    def slopes(self) -> tuple[float, ...]:
        """One slope per head."""
        power = 2 ** math.floor(math.log2(self.n_heads))
        if power == self.n_heads:
            return _slopes(power, self.bias_max)
        higher = _slopes(2 * power, self.bias_max)
        return (*_slopes(power, self.bias_max), *higher[::2])[: self.n_heads]


def _slopes(n: int, bias_max: float) -> tuple[float, ...]:
    return tuple(2.0 ** (-bias_max * i / n) for i in range(1, n + 1))


@dataclass(frozen=True, kw_only=True)
class QueryTemperature(Part):
    """Queries at position p are multiplied by 1 + scale * ln(1 + floor((p + 1) / floor)).

    Keeps attention sharp over long contexts: in layers without positions (Llama 4's published code), or in all layers,
    `from_zero`: without the 1 that is added to p (Ministral 3's).
    """

    scale: float
    """Factor on the logarithm."""
    floor: int
    """Position from which queries are scaled."""
    from_zero: bool = False
    """Whether positions are counted from 0, not 1."""

    def __post_init__(self) -> None:
        require_number(self, "scale")
        require_sizes(self, "floor")
        require_flags(self, "from_zero")


@dataclass(frozen=True, kw_only=True)
class RelativeBuckets(Part):
    """Adds a learned number per head and bucket of distances to the scores (Raffel et al. 2020, arXiv 1910.10683, 2.1).


    Half of the buckets are for single distances, the rest are logarithmically spaced up to `max_distance`; with
    `both_ways` half of all buckets are for keys after the query. The numbers belong to the stack (`BiasTable`) and are
    shared by its layers.
    """

    n_buckets: int
    """Number of buckets, in both directions together."""
    max_distance: int
    """Distance from which all share the last bucket."""
    both_ways: bool
    """Whether keys after the query have separate buckets."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_buckets", "max_distance")
        require_flags(self, "both_ways")
        least = 4 if self.both_ways else 2
        require(self, "n_buckets", self.n_buckets % least == 0, f"a multiple of {least}")
        far = self.max_distance > self.exact
        require(self, "max_distance", far, f"more than the {self.exact} distances that have a bucket each")

    @property
    def one_way(self) -> int:
        """Buckets per direction."""
        return self.n_buckets // 2 if self.both_ways else self.n_buckets

    @property
    def exact(self) -> int:
        """Distances from 0 that have their own bucket."""
        return self.one_way // 2


@dataclass(frozen=True, kw_only=True)
class BiasTable(Part):
    """One learned number per bucket of distances and head, added to the scores of all layers of a stack."""

    kind = "attention"
    n_buckets: int
    """Number of buckets."""
    n_heads: int
    """Number of heads."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_buckets", "n_heads")

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds the columns of its n_heads / tensor heads."""
        return replace(self, n_heads=divided(self, "n_heads", tensor))

    def holds(self) -> dict[str, Weight]:
        """The table (n_buckets, n_heads)."""
        return {"weight": Weight(shape=(self.n_buckets, self.n_heads), role="bias", split="out")}

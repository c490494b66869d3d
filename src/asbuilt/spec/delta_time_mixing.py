"""RWKV-7's time mixing: a state that forgets, removes and writes per channel, of a stream that sees the token before.

Peng et al. 2025 (arXiv 2503.14456), section 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from asbuilt.spec.attention import output_map
from asbuilt.spec.delta_net import chunks
from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.norms import HeadNorm
from asbuilt.spec.part import (
    Part,
    Pass,
    Product,
    Remembered,
    Weight,
    divided,
    require,
    require_names,
    require_number,
    require_sizes,
)
from asbuilt.spec.time_mixing import TokenShift, require_shift

TARGETS = ("r", "decay", "k", "v", "rate", "gate")
STRONGEST = -0.6065306597126334  # the log of the strongest decay, -e^-0.5


@dataclass(frozen=True, kw_only=True)
class DeltaTimeMixing(Mixer):
    """S_t = diag(w_t) S_(t-1) - (a_t c_t) (c_t^T S_(t-1)) + k~_t v_t^T, o(gate * (norm(S_t^T r_t) + bonus_t)).

    All are maps of the shifted stream: r, k and v; the decays w = exp(-e^-0.5 sigmoid(decay(tanh(decay_down x)))); the
    rates a = sigmoid(rate(rate_down x)); gate(sigmoid(gate_down x)). c is k times the vector `removal`, divided by its
    length, sqrt(|c|^2 + length_eps); k~ = k (1 + (a - 1) `replacement`); the bonus of a head is v times the sum of r k~
    `bonus`. The norm has gains and biases for each head. A layer with `value_from` moves v towards that of the earlier
    layer whose `value_name` that is, by sigmoid(move(move_down x)). The state is float32 in any narrower cache.
    """

    d_model: int
    """Width of the residual stream."""
    n_heads: int
    """Heads, each with its own state."""
    d_key: int
    """Width of a head of r and k."""
    d_value: int
    """Width of a head of v."""
    shift: TokenShift
    """What the maps read: its targets are r, decay, k, v, rate and gate."""
    norm: HeadNorm
    """Norm of what a head reads, before the gate."""
    decay_rank: int
    """Width between the two maps to the decays."""
    rate_rank: int
    """Width between the two maps to the rates of removal."""
    gate_rank: int
    """Width between the two maps to the output's gate."""
    move_rank: int | None = None
    """Width between the two maps that tell how far v moves, if it does."""
    value_name: str | None = None
    """Name under which later layers read this layer's v; None if none does."""
    value_from: str | None = None
    """Name of the earlier layer towards whose v this layer's moves; None for none."""
    length_eps: float = 1e-12
    """Added to the squared lengths of c."""
    r: Map | None = None
    """Replaces the plain map to what reads the state."""
    k: Map | None = None
    """Replaces the plain map to keys."""
    v: Map | None = None
    """Replaces the plain map to values."""
    decay_down: Map | None = None
    """Replaces the plain first map to the decays."""
    decay: Map | None = None
    """Replaces the plain second map to the decays."""
    rate_down: Map | None = None
    """Replaces the plain first map to the rates of removal."""
    rate: Map | None = None
    """Replaces the plain second map to the rates of removal."""
    move_down: Map | None = None
    """Replaces the plain first map to how far v moves, if it does."""
    move: Map | None = None
    """Replaces the plain second map to how far v moves, if it does."""
    gate_down: Map | None = None
    """Replaces the plain first map to the output's gate."""
    gate: Map | None = None
    """Replaces the plain second map to the output's gate."""
    o: Map | None = None
    """Replaces the plain map back to the stream."""

    def __post_init__(self) -> None:
        ranks = ("decay_rank", "rate_rank", "gate_rank", *(("move_rank",) if self.move_rank is not None else ()))
        require_sizes(self, "d_model", "n_heads", "d_key", "d_value", *ranks)
        require_number(self, "length_eps")
        require_shift(self, self.shift, TARGETS)
        fits = isinstance(self.norm, HeadNorm) and (self.norm.n_heads, self.norm.d) == (self.n_heads, self.d_value)
        require(self, "norm", fits, f"gains for {self.n_heads} heads of d_value = {self.d_value}")
        require_names(self, "value_name", "value_from")
        both = self.value_from is None or self.value_name is None
        require(self, "value_name", both, "none: v of this layer moves towards another's")
        allowed = "a width if v moves towards another layer's, else none"
        require(self, "move_rank", (self.move_rank is None) == (self.value_from is None), allowed)
        self.require_maps()

    @property
    def d_keys(self) -> int:
        """Width of all heads of r and k together."""
        return self.n_heads * self.d_key

    @property
    def d_output(self) -> int:
        """Width of all heads of v together."""
        return self.n_heads * self.d_value

    def plain_maps(self) -> dict[str, Linear]:
        """r, k (d_model to n_heads*d_key), v (to n_heads*d_value), pairs of low rank, and o back to the stream."""
        key = Linear(d_in=self.d_model, d_out=self.d_keys, split="out", belongs=self.kind)
        value = replace(key, d_out=self.d_output)
        maps = {"r": key, "k": key, "v": value}
        maps |= _pair("decay", replace(key, bias=True), self.decay_rank)
        maps |= _pair("rate", replace(key, bias=True), self.rate_rank)
        maps |= {} if self.move_rank is None else _pair("move", replace(value, bias=True), self.move_rank)
        maps |= _pair("gate", value, self.gate_rank)
        return maps | {"o": output_map(self.d_output, self.d_model, bias=False)}

    def children(self) -> Iterator[tuple[str, Part]]:
        """In order of computation: the output's map after the norm."""
        return iter(sorted(super().children(), key=lambda child: child[0] == "o"))

    def holds(self) -> dict[str, Weight]:
        """removal and replacement (n_heads*d_key), bonus (n_heads, d_key)."""
        vector = Weight(shape=(self.d_keys,), role="bias", init="ones", split="out")
        bonus = Weight(shape=(self.n_heads, self.d_key), role="bias", split="out")
        return {"removal": vector, "replacement": vector, "bonus": bonus}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_heads / tensor heads and their states; the first of two maps is replicated."""
        heads = divided(self, "n_heads", tensor)
        return self.resized(n_heads=heads, norm=replace(self.norm, n_heads=heads))

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Maps; in chunks scores, the triangular inverse, what is found, and what is read of that and of the state.

        The state is updated per chunk, after the last one only for a cache. One token reads and updates it alone.
        """
        inside = self._of_one(run) if run.tokens == 1 else self._of_chunks(run)
        maps = [name for name in self.maps if name != "o"]
        return (*self.map_products(run, *maps), *inside, *self.map_products(run, "o"))

    def _of_one(self, run: Pass) -> tuple[Product, ...]:
        heads = run.batch * self.n_heads
        read = Product(name="read", a=2, b=self.d_key, c=self.d_value, n=heads)
        written = 2 if run.past else 1
        update = Product(name="update", a=self.d_key, b=written, c=self.d_value, n=heads, caching=True)
        return (read, update) if run.past else (update,)

    def _of_chunks(self, run: Pass) -> tuple[Product, ...]:
        size, n = chunks(run)
        heads = run.batch * self.n_heads
        n_read = heads * (n if run.past else n - 1)
        halves = [1 << i for i in range(size.bit_length() - 1)]
        within: dict[str, Any] = {"c": self.d_value, "recomputed": True}
        update: dict[str, Any] = {"a": self.d_key, "b": 2 * size, **within}
        scores = ((h, heads * n * size // (2 * h)) for h in halves)
        return (
            *(Product(name="scores", a=2 * h, b=self.d_key, c=2 * h, n=m, recomputed=True) for h, m in scores),
            *(Product(name="inverse", a=h, b=h, c=h, n=heads * n * size // h, recomputed=True) for h in halves[1:]),
            Product(name="written", a=size, b=size, n=heads * n, **within),
            *((Product(name="read", a=2 * size, b=self.d_key, n=n_read, **within),) if n_read else ()),
            Product(name="found", a=size, b=size, n=heads * n, **within),
            Product(name="mix", a=size, b=2 * size, n=heads * n, **within),
            *((Product(name="update", n=heads * (n - 1), **update),) if n > 1 else ()),
            Product(name="last update", n=heads, caching=True, **update),
        )

    def child_run(self, name: str, run: Pass) -> Pass:
        """The norm has one row per head and token."""
        return replace(run, tokens=run.tokens * self.n_heads) if name == "norm" else run

    def remembers(self) -> tuple[Remembered, ...]:
        """The states, n_heads * d_key * d_value numbers for a sequence; the shift remembers its own."""
        shape = (self.n_heads, self.d_key, self.d_value)
        return (Remembered(name="state", shape=shape, per="sequence", dtype="float32"),)

    def serves(self, reader: DeltaTimeMixing) -> bool:
        """Returns whether another layer's values can move towards this one's: their shapes agree."""
        return (self.n_heads, self.d_value) == (reader.n_heads, reader.d_value)


def _pair(name: str, plain: Linear, rank: int) -> dict[str, Linear]:
    """Returns two maps with a rank between them, the first without a bias, and replicated on several devices."""
    return {f"{name}_down": replace(plain, d_out=rank, split=None, bias=False), name: replace(plain, d_in=rank)}

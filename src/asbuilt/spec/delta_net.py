"""Gated delta networks: a state that keys write and queries read, with decay and correction.

Yang et al. 2024 (arXiv 2412.06464); decays per channel, Kimi Delta Attention: Kimi Team 2025 (arXiv 2510.26692).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

from asbuilt.spec.attention import output_map
from asbuilt.spec.convolution import ShortConvolution
from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.norms import Norm
from asbuilt.spec.part import (
    Part,
    Pass,
    Product,
    Remembered,
    Weight,
    divided,
    require,
    require_choice,
    require_number,
    require_sizes,
)

# Tokens per chunk, a power of two, computed in parallel before the state is updated.
CHUNK = 64
# Chunks that are prepared at once: more run in parallel, and need more memory.
SPAN = 8

Decay = Literal["head", "channel"]
DECAYS: tuple[Decay, ...] = ("head", "channel")
DeltaGate = Literal["silu", "sigmoid"]
DELTA_GATES: tuple[DeltaGate, ...] = ("silu", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(Mixer):
    """S_t = a_t S_(t-1) + k_t (b_t (v_t - (a_t S_(t-1))^T k_t))^T, y_t = o(norm(S_t^T q_t) * gate(z_t)).

    q, k and v pass the short convolution together; then q and k are divided by their lengths, sqrt(|k|^2 + length_eps),
    and q by sqrt(d_key). b = sigmoid(beta x), and the decay is a = exp(-exp(A_log) softplus(decay x + dt_bias)), per
    value head or per channel of the keys. Value heads read the key heads in groups. With ranks, decay and gate are
    products of two maps. The state is float32 in any narrower cache.
    """

    kind = "ssm"
    d_model: int
    """Width of the residual stream."""
    n_key_heads: int
    """Heads of q and k."""
    n_value_heads: int
    """Heads of v, a multiple of n_key_heads, each with a state of its own."""
    d_key: int
    """Width of a head of q and k."""
    d_value: int
    """Width of a head of v."""
    conv: ShortConvolution
    """Convolution of q, k and v, one after the other."""
    norm: Norm
    """Norm of what a head reads, before the gate."""
    decays: Decay = "head"
    """What has a decay of its own: every value head, or every channel of its keys."""
    decay_rank: int | None = None
    """Width between two maps that give the decays; None for one map."""
    gate_rank: int | None = None
    """Width between two maps that give the output's gate; None for one map."""
    gating: DeltaGate = "silu"
    """Activation of the output's gate."""
    length_eps: float = 1e-6
    """Added to the squared lengths of q and k."""
    q: Map | None = None
    """Replaces the plain map q."""
    k: Map | None = None
    """Replaces the plain map k."""
    v: Map | None = None
    """Replaces the plain map v."""
    beta: Map | None = None
    """Replaces the plain map to the strengths of writing."""
    decay_down: Map | None = None
    """Replaces the plain first map of the decays, if they have a rank."""
    decay: Map | None = None
    """Replaces the plain map to the decays, the second of two if they have a rank."""
    gate_down: Map | None = None
    """Replaces the plain first map of the gate, if it has a rank."""
    gate: Map | None = None
    """Replaces the plain map to the output's gate, the second of two if it has a rank."""
    o: Map | None = None
    """Replaces the plain map o."""

    def __post_init__(self) -> None:
        ranks = (name for name in ("decay_rank", "gate_rank") if getattr(self, name) is not None)
        require_sizes(self, "d_model", "n_key_heads", "n_value_heads", "d_key", "d_value", *ranks)
        grouped = self.n_value_heads % self.n_key_heads == 0
        require(self, "n_value_heads", grouped, f"a multiple of n_key_heads = {self.n_key_heads}")
        require_choice(self, "decays", DECAYS)
        require_choice(self, "gating", DELTA_GATES)
        require_number(self, "length_eps")
        alone = self.decays == "head" or self.n_value_heads == self.n_key_heads
        require(self, "decays", alone, "head unless each key head has one value head")
        require(self, "conv", self.conv.channels == self.d_mixed, f"a convolution of {self.d_mixed} channels")
        require(self, "norm", self.norm.d == self.d_value, f"a norm over d_value = {self.d_value}")
        self.require_maps()

    @property
    def values_per_key(self) -> int:
        """n_value_heads / n_key_heads."""
        return self.n_value_heads // self.n_key_heads

    @property
    def d_output(self) -> int:
        """Width of all value heads together."""
        return self.n_value_heads * self.d_value

    @property
    def d_mixed(self) -> int:
        """Width of q, k and v together."""
        return 2 * self.n_key_heads * self.d_key + self.d_output

    @property
    def n_decays(self) -> int:
        """Decays of a token: one per value head, or per channel of the keys."""
        return self.n_value_heads if self.decays == "head" else self.n_key_heads * self.d_key

    def plain_maps(self) -> dict[str, Linear]:
        """q, k (d_model to n_key_heads*d_key), v, gate (to n_value_heads*d_value), beta, decay, and o back."""
        inward = Linear(d_in=self.d_model, d_out=self.d_output, split="out", belongs=self.kind)
        key = replace(inward, d_out=self.n_key_heads * self.d_key)
        maps = {"q": key, "k": key, "v": inward}
        maps |= _low_rank("gate", inward, self.gate_rank)
        maps |= {"beta": replace(inward, d_out=self.n_value_heads)}
        maps |= _low_rank("decay", replace(inward, d_out=self.n_decays), self.decay_rank)
        return maps | {"o": replace(output_map(self.d_output, self.d_model, False), belongs=self.kind)}

    def children(self) -> Iterator[tuple[str, Part]]:
        """In order of computation: the output's map after the convolution and the norm."""
        return iter(sorted(super().children(), key=lambda child: child[0] == "o"))

    def holds(self) -> dict[str, Weight]:
        """A_log (n_value_heads), and dt_bias, one for each decay."""
        return {
            "A_log": Weight(shape=(self.n_value_heads,), role="bias", split="out"),
            "dt_bias": Weight(shape=(self.n_decays,), role="bias", init="ones", split="out"),
        }

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_key_heads / tensor key heads, their value heads and states; first maps are replicated."""
        keys, values = divided(self, "n_key_heads", tensor), self.n_value_heads // tensor
        conv = replace(self.conv, channels=self.d_mixed // tensor)
        return self.resized(n_key_heads=keys, n_value_heads=values, conv=conv)

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Maps; in chunks scores, the triangular inverse, errors, and what is read of them and of the state.

        The state is updated per chunk, after the last one only for a cache. One token reads and updates it alone.
        """
        inside = self._of_one(run) if run.tokens == 1 else self._of_chunks(run)
        maps = [name for name in self.maps if name != "o"]
        return (*self.map_products(run, *maps), *inside, *self.map_products(run, "o"))

    def _of_one(self, run: Pass) -> tuple[Product, ...]:
        heads, wide = run.batch * self.n_key_heads, self.values_per_key * self.d_value
        read = Product(name="read", a=2, b=self.d_key, c=wide, n=heads)
        update = Product(name="update", a=self.d_key, b=1, c=wide, n=heads, caching=True)
        return (read, update) if run.past else (update,)

    def _of_chunks(self, run: Pass) -> tuple[Product, ...]:
        size, n = chunks(run)
        heads, wide = run.batch * self.n_key_heads, self.values_per_key * self.d_value
        within, values = {"b": size, "recomputed": True}, n * run.batch * self.n_value_heads
        n_read = heads * (n if run.past else n - 1)
        halves = [1 << i for i in range(1, size.bit_length() - 1)]
        update = {"a": self.d_key, "c": wide, **within}
        return (
            *self._scores(size, n * heads),
            *(Product(name="inverse", a=h, b=h, c=h, n=values * size // h, recomputed=True) for h in halves),
            *((Product(name="read", a=2 * size, b=self.d_key, c=wide, n=n_read, recomputed=True),) if n_read else ()),
            Product(name="errors", a=size, c=self.d_value, n=values, **within),
            Product(name="mix", a=size, c=self.d_value, n=values, **within),
            *((Product(name="update", n=heads * (n - 1), **update),) if n > 1 else ()),
            Product(name="last update", n=heads, caching=True, **update),
        )

    def _scores(self, size: int, n: int) -> tuple[Product, ...]:
        """Returns the products of a chunk's keys and queries with its keys: at once, or half by half."""
        if self.decays == "head":
            return (Product(name="scores", a=2 * size, b=self.d_key, c=size, n=n, recomputed=True),)
        halves = [1 << i for i in range(size.bit_length() - 1)]
        return tuple(
            Product(name="scores", a=2 * h, b=self.d_key, c=h, n=n * size // (2 * h), recomputed=True) for h in halves
        )

    def child_run(self, name: str, run: Pass) -> Pass:
        """The norm has one row per value head and token."""
        return replace(run, tokens=run.tokens * self.n_value_heads) if name == "norm" else run

    def remembers(self) -> tuple[Remembered, ...]:
        """The states, n_value_heads * d_key * d_value numbers for a sequence; the convolution remembers its own."""
        shape = (self.n_key_heads, self.d_key, self.values_per_key * self.d_value)
        return (Remembered(name="state", shape=shape, per="sequence", dtype="float32"),)


def chunks(run: Pass) -> tuple[int, int]:
    """Returns (tokens of a chunk, number of chunks) of a pass; the last one is padded."""
    size = min(CHUNK, 1 << (run.tokens - 1).bit_length())
    return size, -(-run.tokens // size)


def _low_rank(name: str, plain: Linear, rank: int | None) -> dict[str, Linear]:
    """Returns a map, or with a rank two, of which the first is replicated on several devices."""
    if rank is None:
        return {name: plain}
    return {f"{name}_down": replace(plain, d_out=rank, split=None), name: replace(plain, d_in=rank)}

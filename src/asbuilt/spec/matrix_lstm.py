"""The mLSTM of xLSTM: an LSTM whose memory is a matrix for each head, with exponential input gates.

Beck et al. 2024 (arXiv 2405.04517), equations 19 to 27; without its convolution, and with capped gates, as in
xLSTM 7B: Beck et al. 2025 (arXiv 2503.13427), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.attention import output_map
from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mamba2 import chunk_products
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.norms import HeadNorm
from asbuilt.spec.part import (
    Part,
    Pass,
    Product,
    Remembered,
    divided,
    is_finite,
    require,
    require_flags,
    require_number,
    require_sizes,
)

# e^cap is a number of float32, so that no gate and no stabiliser overflows.
LARGEST_CAP = 80.0


@dataclass(frozen=True, kw_only=True)
class MatrixLSTM(Mixer):
    """C_t = f_t C_(t-1) + i_t k_t v_t^T, n_t = f_t n_(t-1) + i_t k_t, h_t = C_t^T q_t / max(|n_t^T q_t|, 1).

    For each head, with i = exp(input_gate x), f = sigmoid(forget_gate x), both gates capped before: c tanh(gate / c);
    q is divided by sqrt(d_key). The result is o(sigmoid(gate x) * norm(h)). C and n are kept divided by e^m, where
    m_t = max(log f_t + m_(t-1), log i_t) is the stabiliser, 0 at first; `eps` is added to the denominator so divided.
    The state is float32 in any narrower cache.
    """

    kind = "ssm"
    d_model: int
    """Width of the residual stream."""
    n_heads: int
    """Heads, each with its own memory and gates."""
    d_key: int
    """Width of a head of q and k, the rows of a memory."""
    d_value: int
    """Width of a head of v, the columns of a memory."""
    norm: HeadNorm
    """Norm of what each head reads, before the output's gate."""
    cap: float = 15.0
    """c: gates are capped to between -c and c; at most 80, so that e^c is a number of float32."""
    eps: float = 1e-6
    """Added to the denominator."""
    bias: bool = False
    """Whether q, k, v and the output's gate have biases."""
    output_bias: bool = False
    """Whether o has a bias."""
    q: Map | None = None
    """Replaces the plain map q."""
    k: Map | None = None
    """Replaces the plain map k."""
    v: Map | None = None
    """Replaces the plain map v."""
    gate: Map | None = None
    """Replaces the plain map to the output's gate."""
    input_gate: Map | None = None
    """Replaces the plain map to the input gates, one per head."""
    forget_gate: Map | None = None
    """Replaces the plain map to the forget gates, one per head."""
    o: Map | None = None
    """Replaces the plain map o."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_heads", "d_key", "d_value")
        require_number(self, "eps")
        capped = is_finite(self.cap) and 0 < self.cap <= LARGEST_CAP
        require(self, "cap", capped, f"a number above 0 and at most {LARGEST_CAP:g}")
        require_flags(self, "bias", "output_bias")
        fits = isinstance(self.norm, HeadNorm) and (self.norm.n_heads, self.norm.d) == (self.n_heads, self.d_value)
        require(self, "norm", fits, f"gains for {self.n_heads} heads of d_value = {self.d_value}")
        self.require_maps()

    @property
    def d_keys(self) -> int:
        """Width of all heads of q or k together."""
        return self.n_heads * self.d_key

    @property
    def d_output(self) -> int:
        """Width of all heads of v together."""
        return self.n_heads * self.d_value

    def plain_maps(self) -> dict[str, Linear]:
        """q, k (d_model to n_heads*d_key), v, gate (to n_heads*d_value), both gates (to n_heads), and o back."""
        value = Linear(d_in=self.d_model, d_out=self.d_output, bias=self.bias, split="out", belongs=self.kind)
        key = replace(value, d_out=self.d_keys)
        number = replace(value, d_out=self.n_heads, bias=True)
        inward = {"q": key, "k": key, "v": value, "gate": value, "input_gate": number, "forget_gate": number}
        return inward | {"o": replace(output_map(self.d_output, self.d_model, self.output_bias), belongs=self.kind)}

    def children(self) -> Iterator[tuple[str, Part]]:
        """In order of computation: the output's map after the norm."""
        return iter(sorted(super().children(), key=lambda child: child[0] == "o"))

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_heads / tensor heads and their memories; o's bias is replicated."""
        heads = divided(self, "n_heads", tensor)
        return self.resized(n_heads=heads, norm=replace(self.norm, n_heads=heads))

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Maps; scores and weighted sums within chunks; reading the memory, and updating it per chunk.

        The normaliser is one more column of the memory, read by a column of ones beside v.
        """
        within = chunk_products(run, self.n_heads, self.n_heads, self.d_key, self.d_value + 1, recomputed=True)
        maps = [name for name in self.maps if name != "o"]
        return (*self.map_products(run, *maps), *within, *self.map_products(run, "o"))

    def child_run(self, name: str, run: Pass) -> Pass:
        """The norm has one row per head and token."""
        return replace(run, tokens=run.tokens * self.n_heads) if name == "norm" else run

    def remembers(self) -> tuple[Remembered, ...]:
        """C with n as its last column, n_heads * d_key * (d_value + 1) numbers of a sequence, and m of each head."""
        return (
            Remembered(
                name="memory", shape=(self.n_heads, self.d_key, self.d_value + 1), per="sequence", dtype="float32"
            ),
            Remembered(name="stabiliser", shape=(self.n_heads,), per="sequence", dtype="float32"),
        )

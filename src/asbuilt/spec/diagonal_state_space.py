"""S4 with diagonal states: a fixed linear recurrence for each channel, which is also one long convolution.

Gu, Goel & Re 2021 (S4, arXiv 2111.00396); diagonal: Gu et al. 2022 (S4D, arXiv 2206.11893), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from asbuilt.spec.linear import Linear, Map
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.part import Pass, Product, Remembered, Weight, require_flags, require_sizes


@dataclass(frozen=True, kw_only=True)
class DiagonalStateSpace(Mixer):
    """o(g) * sigmoid(gate(g)), g = gelu(y + d x), y_t = 2 Re(sum of c s_t), s_t = e^(dt A) s_(t-1) + b x_t.

    Each channel of x has d_state complex numbers s, which stand for as many conjugate pairs, with A = -e^a_log +
    i a_im, a step dt = e^log_dt and b = (e^(dt A) - 1) / A, all learned and the same for all tokens: y is x convolved
    with the kernel k_l = 2 Re(sum of c b e^(l dt A)). A text without a past is convolved by Fourier transforms, in
    T log T; another pass adds up states token by token. Neither transforms nor sums are products: those that count
    make the kernel, and the state at a text's end. The state is float32, two numbers each.
    """

    kind = "ssm"
    d_model: int
    """Width of the residual stream, the number of channels."""
    d_state: int
    """Complex numbers of a channel's state."""
    bias: bool = True
    """Whether o and gate have biases."""
    o: Map | None = None
    """Replaces the plain map o."""
    gate: Map | None = None
    """Replaces the plain map to the output's gate."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "d_state")
        require_flags(self, "bias")
        self.require_maps()

    def plain_maps(self) -> dict[str, Linear]:
        """o and gate (d_model to d_model)."""
        plain = Linear(d_in=self.d_model, d_out=self.d_model, bias=self.bias, to_stream=True, belongs="ssm")
        return {"o": plain, "gate": plain}

    def holds(self) -> dict[str, Weight]:
        """a_log, a_im, c_re and c_im (d_model, d_state), log_dt and d (d_model)."""
        each = Weight(shape=(self.d_model, self.d_state), role="gain", init="normal")
        channel = Weight(shape=(self.d_model,), role="bias")
        return {"a_log": each, "a_im": each, "c_re": each, "c_im": each, "log_dt": channel, "d": channel}

    def pieces(self, tokens: int) -> tuple[int, int]:
        """Returns (tokens of a piece, number of pieces), about equal: powers of the decays are made in both."""
        size = isqrt(tokens - 1) + 1
        return size, -(-tokens // size)

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The convolution's kernel, of powers within a piece and of pieces; the state at the end; and the maps."""
        maps = self.map_products(run, "o", "gate")
        if run.past or run.tokens == 1:
            return maps
        size, n = self.pieces(run.tokens)
        wide = 2 * self.d_state
        kernel = Product(name="kernel", a=n, b=wide, c=size, n=self.d_model, recomputed=True)
        update = Product(name="last update", a=run.batch * n, b=size, c=wide, n=self.d_model, caching=True)
        return (kernel, update, *maps)

    def remembers(self) -> tuple[Remembered, ...]:
        """The states: 2 * d_model * d_state numbers of a sequence, in float32."""
        shape = (self.d_model, self.d_state, 2)
        return (Remembered(name="state", shape=shape, per="sequence", dtype="float32"),)

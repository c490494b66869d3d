"""Convolutions over tokens: the short one of recurrent mixers, for each channel by itself, and full ones.

Short ones as in H3 (Fu et al. 2022, arXiv 2212.14052) and Mamba (Gu & Dao 2023, arXiv 2312.00752), section 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asbuilt.spec.encoder import POOLER_ACTIVATIONS, PoolerActivation
from asbuilt.spec.linear import Linear
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.part import (
    KINDS,
    Kind,
    Part,
    Pass,
    Product,
    Remembered,
    Weight,
    require,
    require_choice,
    require_flags,
    require_sizes,
)


@dataclass(frozen=True, kw_only=True)
class ShortConvolution(Part):
    """y_t = activation(sum over i < kernel of w_i x_(t - kernel + 1 + i) + b), for each channel by itself.

    x before a text is 0, and so are its padded tokens. A sequence's state is its last kernel - 1 inputs, which are not
    `cached` if all tokens always come at once. The sums are elementwise, so like those of norms and RoPE they are no
    products: 2 * kernel FLOPs per token and channel.
    """

    channels: int
    """Number of channels, the width of x and y."""
    kernel: int
    """Tokens that an output depends on, its own included."""
    bias: bool = False
    """Whether there is a bias b."""
    activation: Literal["silu"] | None = "silu"
    """Activation of the sums; None for none."""
    belongs: Kind = "ssm"
    """The kind of part that its parameters are counted under."""
    cached: bool = True
    """Whether its last inputs are cached between passes."""

    def __post_init__(self) -> None:
        require_sizes(self, "channels", "kernel")
        require_flags(self, "bias", "cached")
        require(self, "activation", self.activation in ("silu", None), "silu or none")
        require_choice(self, "belongs", KINDS)

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """What its parameters are counted under."""
        return self.belongs

    def holds(self) -> dict[str, Weight]:
        """w (channels, 1, kernel), as in PyTorch's depthwise convolution, and b (channels) if enabled."""
        taps = {"weight": Weight(shape=(self.channels, 1, self.kernel), role="gain", init="normal", split="out")}
        return taps | ({"bias": Weight(shape=(self.channels,), role="bias", split="out")} if self.bias else {})

    def remembers(self) -> tuple[Remembered, ...]:
        """The last kernel - 1 inputs of a sequence, if cached."""
        shape = (self.channels, self.kernel - 1)
        return (Remembered(name="inputs", shape=shape, per="sequence"),) if self.kernel > 1 and self.cached else ()


@dataclass(frozen=True, kw_only=True)
class CausalConvolution(Mixer):
    """y_t = sum over i < kernel of W_i x_(t - dilation * (kernel - 1 - i)) + b, with W_i over all channels.

    x before a text is 0, and so are its padded tokens. A sequence's state is its last dilation * (kernel - 1) inputs.
    Kim 2014 (arXiv 1408.5882); dilated and causal: van den Oord et al. 2016 (WaveNet, arXiv 1609.03499).
    """

    kind = "ssm"
    d_model: int
    """Width of the residual stream."""
    kernel: int
    """Tokens that an output depends on, its own included."""
    dilation: int = 1
    """Distance of those tokens."""
    bias: bool = True
    """Whether there is a bias b."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "kernel", "dilation")
        require_flags(self, "bias")

    @property
    def reach(self) -> int:
        """Tokens before its own that an output depends on, those between included."""
        return self.dilation * (self.kernel - 1)

    def plain_maps(self) -> dict[str, Linear]:
        """None: its matrices are one tensor."""
        return {}

    def holds(self) -> dict[str, Weight]:
        """W (d_model, d_model, kernel), as in PyTorch's convolution, and b (d_model) if enabled."""
        taps = {"taps": Weight(shape=(self.d_model, self.d_model, self.kernel), role="matrix")}
        return taps | ({"bias": Weight(shape=(self.d_model,), role="bias")} if self.bias else {})

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product of each token's inputs, side by side, zeros before a text included."""
        wide = self.d_model * self.kernel
        return (Product(name="taps", a=run.rows, b=wide, c=self.d_model, weight="taps"),)

    def remembers(self) -> tuple[Remembered, ...]:
        """The last dilation * (kernel - 1) inputs of a sequence."""
        shape = (self.d_model, self.reach)
        return (Remembered(name="inputs", shape=shape, per="sequence"),) if self.reach else ()


@dataclass(frozen=True, kw_only=True)
class CentredConvolution(Mixer):
    """y_t = activation(sum over i < kernel of W_i x_(t + i - (kernel - 1) / 2) + b), with W_i over all channels.

    x before and after a text is 0, and so are its padded tokens. It reads what follows, so that nothing is cached and
    it does not decode. That of DeBERTa v2 (He et al. 2020, arXiv 2006.03654) reads what the first block reads.
    """

    kind = "ssm"
    d_model: int
    """Width of the residual stream."""
    kernel: int
    """Tokens that an output depends on, as many before as after its own: an odd number."""
    activation: PoolerActivation = "gelu"
    """Activation of the sums."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "kernel")
        require(self, "kernel", self.kernel % 2 == 1, "an odd number of tokens")
        require_choice(self, "activation", POOLER_ACTIVATIONS)

    @property
    def decodes(self) -> bool:
        """No: an output depends on later tokens."""
        return False

    def plain_maps(self) -> dict[str, Linear]:
        """None: its matrices are one tensor."""
        return {}

    def holds(self) -> dict[str, Weight]:
        """W (d_model, d_model, kernel), as in PyTorch's convolution, and b (d_model)."""
        taps = Weight(shape=(self.d_model, self.d_model, self.kernel), role="matrix")
        return {"taps": taps, "bias": Weight(shape=(self.d_model,), role="bias")}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product of each token's inputs, side by side, zeros around a text included."""
        wide = self.d_model * self.kernel
        return (Product(name="taps", a=run.rows, b=wide, c=self.d_model, weight="taps"),)

"""The short causal convolution that recurrent mixers put before their state: each channel sees a few tokens.

As in H3 (Fu et al. 2022, arXiv 2212.14052) and Mamba (Gu & Dao 2023, arXiv 2312.00752), section 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asbuilt.spec.part import (
    KINDS,
    Kind,
    Part,
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

    x before a text is 0, and so are its padded tokens. A sequence's state is its last kernel - 1 inputs. The sums are
    elementwise, so like those of norms and RoPE they are no products: 2 * kernel FLOPs per token and channel.
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

    def __post_init__(self) -> None:
        require_sizes(self, "channels", "kernel")
        require_flags(self, "bias")
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
        """The last kernel - 1 inputs of a sequence."""
        shape = (self.channels, self.kernel - 1)
        return (Remembered(name="inputs", shape=shape, per="sequence"),) if self.kernel > 1 else ()

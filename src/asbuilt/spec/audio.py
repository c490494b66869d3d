"""Sound as mel spectrograms: convolutions over frames, or over frames and bands, the embedding of speech encoders.

Radford et al. 2022 (Whisper, arXiv 2212.04356), section 2.2; Zhang et al. 2023 (USM, arXiv 2303.01037), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asbuilt.spec.part import (
    LARGEST_SIZE,
    Part,
    Pass,
    Product,
    Weight,
    require,
    require_flags,
    require_number,
    require_sizes,
)

TAPS, STRIDE = 3, 2  # frames (and bands) that an output depends on; the stride of a convolution that leaves fewer
MOST_STEPS = 8  # convolutions, each of which leaves half as many frames


@dataclass(frozen=True, kw_only=True)
class MelEmbedding(Part):
    """gelu(second(gelu(first(x)))): convolutions of 3 frames, the second with a stride of 2.

    x is a log-mel spectrogram of `n_mels` bands and 2 * `n_tokens` frames, of one length for every sound: shorter ones
    are padded with silence.
    """

    kind = "embedding"
    any_length: ClassVar[bool] = False
    n_mels: int
    """Mel bands of a frame."""
    n_tokens: int
    """Tokens of a sound, half as many as frames."""
    d_model: int
    """Width of the residual stream."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_mels", "n_tokens", "d_model")

    @property
    def n_frames(self) -> int:
        """Frames of a sound."""
        return STRIDE * self.n_tokens

    def holds(self) -> dict[str, Weight]:
        """Both kernels (d_model, channels, 3) with their biases."""
        bias = Weight(shape=(self.d_model,), role="bias")
        return {
            "first.weight": Weight(shape=(self.d_model, self.n_mels, TAPS), role="matrix"),
            "first.bias": bias,
            "second.weight": Weight(shape=(self.d_model, self.d_model, TAPS), role="matrix"),
            "second.bias": bias,
        }

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Each convolution as a product of its outputs with the frames that they depend on."""
        frames, tokens = run.batch * self.n_frames, run.batch * self.n_tokens
        return (
            Product(
                name="first", a=frames, b=TAPS * self.n_mels, c=self.d_model, weight="first.weight", one_gradient=True
            ),
            Product(name="second", a=tokens, b=TAPS * self.d_model, c=self.d_model, weight="second.weight"),
        )


@dataclass(frozen=True, kw_only=True)
class MelSubsampling(Part):
    """W x of what convolutions leave of each frame: relu(norm(conv(x))) for each of `channels`, bands side by side.

    Each convolution is over 3 frames and 3 bands, with a stride of 2 in both, and leaves half of either, rounded up. It
    is centred, or with `ahead` begins at a frame and reads the two after it. Its norm is a LayerNorm over channels,
    without a bias; or, `cumulative`, over channels, bands and all frames so far, whose squared differences are each
    from the mean up to that frame. x is a spectrogram of `n_mels` bands and any number of frames of which at most
    `n_tokens` tokens are left.
    """

    kind = "embedding"
    any_length: ClassVar[bool] = True
    n_mels: int
    """Mel bands of a frame."""
    n_tokens: int
    """Most tokens of a sound."""
    channels: tuple[int, ...]
    """Channels after each convolution."""
    d_model: int
    """Width of the residual stream."""
    eps: float = 1e-6
    """Added to the variance, in all norms."""
    ahead: bool = False
    """Whether convolutions read a frame and the two after it, not the one before it and the one after it."""
    cumulative: bool = False
    """Whether norms are over channels, bands and all frames so far, not over channels alone."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_mels", "n_tokens", "d_model")
        require_flags(self, "ahead", "cumulative")
        sizes = all(isinstance(c, int) and not isinstance(c, bool) and 1 <= c <= LARGEST_SIZE for c in self.channels)
        some = isinstance(self.channels, tuple) and 1 <= len(self.channels) <= MOST_STEPS
        require(self, "channels", some and sizes, f"1 to {MOST_STEPS} whole numbers from 1 to 2^31-1")
        require_number(self, "eps")

    @property
    def n_frames(self) -> int:
        """Most frames of a sound."""
        return self.n_tokens * STRIDE ** len(self.channels)

    @property
    def bands(self) -> tuple[int, ...]:
        """Bands after each convolution."""
        return self.left(self.n_mels)

    def left(self, n: int) -> tuple[int, ...]:
        """Returns how many of `n` frames, or bands, are left after each convolution."""
        found = []
        for _ in self.channels:
            n = -(-n // STRIDE)
            found.append(n)
        return tuple(found)

    @property
    def d_frame(self) -> int:
        """Numbers of a token before W: channels of every band."""
        return self.channels[-1] * self.bands[-1]

    def holds(self) -> dict[str, Weight]:
        """A kernel (channels, channels before, 3, 3) and a gain for each convolution; W (d_model, d_frame)."""
        held: dict[str, Weight] = {}
        for i, (inside, out) in enumerate(zip((1, *self.channels), self.channels, strict=False)):
            held[f"conv_{i}.weight"] = Weight(shape=(out, inside, TAPS, TAPS), role="matrix")
            held[f"norm_{i}.weight"] = Weight(shape=(out,), role="gain")
        return held | {"weight": Weight(shape=(self.d_model, self.d_frame), role="matrix")}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Each convolution as a product of its outputs with the nine numbers of a channel that they depend on; and W.

        Sounds are as long as they may be.
        """
        steps = zip(self.left(self.n_frames), self.bands, (1, *self.channels), self.channels, strict=False)
        convolutions = tuple(
            Product(
                name=f"conv_{i}",
                a=run.batch * frames * bands,
                b=TAPS**2 * inside,
                c=out,
                weight=f"conv_{i}.weight",
                one_gradient=i == 0,
            )
            for i, (frames, bands, inside, out) in enumerate(steps)
        )
        rows = run.batch * self.n_tokens
        return (*convolutions, Product(name="frames", a=rows, b=self.d_frame, c=self.d_model, weight="weight"))

"""Sound as mel spectrograms: two convolutions over frames, the embedding of speech encoders.

Radford et al. 2022 (Whisper, arXiv 2212.04356), section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.spec.part import Part, Pass, Product, Weight, require_sizes

TAPS, STRIDE = 3, 2  # frames that an output depends on; frames per token, by the second convolution's stride


@dataclass(frozen=True, kw_only=True)
class MelEmbedding(Part):
    """gelu(second(gelu(first(x)))): convolutions of 3 frames, the second with a stride of 2.

    x is a log-mel spectrogram of `n_mels` bands and 2 * `n_tokens` frames, of one length for every sound: shorter ones
    are padded with silence.
    """

    kind = "embedding"
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

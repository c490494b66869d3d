"""Sounds in a text: an audio encoder whose projected output replaces placeholder tokens, as images do in LLaVA.

Liu et al. 2025, Voxtral (arXiv 2507.13264), section 2: Whisper's encoder, four of its vectors to one token. Sounds are
of one length, or each takes as many tokens as it is long, as the tower says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from asbuilt.spec.audio import MelEmbedding, MelSubsampling
from asbuilt.spec.part import Part, Pass, Product, require, require_flags
from asbuilt.spec.vision import MLPProjector

if TYPE_CHECKING:
    from asbuilt.spec.audio_encoder import AudioEncoder


@dataclass(frozen=True, kw_only=True)
class Hearing(Part):
    """Sounds whose projected vectors replace `placeholder` tokens in the embedded text."""

    tower: AudioEncoder
    """The audio encoder."""
    projector: MLPProjector
    """The projector from its stream to the text's width."""
    placeholder: int
    """Id of the tokens that vectors of sound replace."""
    filled: bool = False
    """Whether a sound takes the most tokens however short it is, the rest of them as the last of its own tokens."""

    def __post_init__(self) -> None:
        embedding = getattr(self.tower, "embedding", None)
        require(self, "tower", isinstance(embedding, MelEmbedding | MelSubsampling), "a model of mel spectrograms")
        require(self, "projector", isinstance(self.projector, MLPProjector), "an MLPProjector")
        number = isinstance(self.placeholder, int) and not isinstance(self.placeholder, bool)
        require(self, "placeholder", number and self.placeholder >= 0, "a token id")
        require_flags(self, "filled")
        single = isinstance(embedding, MelSubsampling) and len(self.projector.widths) == 2
        require(self, "filled", not self.filled or single, "false for sounds of one length, or through several maps")
        same = self.projector.d_in == self.tower.d_model
        require(self, "projector", same, f"d_in = {self.tower.d_model} as in the tower")
        n = self.tower.max_positions
        fits = self.projector.merge == 1 and n % self.projector.stack == 0
        require(self, "projector", fits, f"one that merges no squares, and stacks a divisor of {n} vectors")
        single = self.projector.stack == 1 or not self.tower.embedding.any_length
        require(self, "projector", single, "one that stacks no vectors of sounds of any length")

    @property
    def n_tokens(self) -> int:
        """Placeholders per sound, the most of one of any length."""
        return self.projector.n_tokens(self.tower.max_positions)

    def tokens_of(self, n_frames: int) -> int:
        """Returns the placeholders of a sound of so many frames."""
        return self.n_tokens if self.filled else self.vectors_of(n_frames)

    def vectors_of(self, n_frames: int) -> int:
        """Returns the vectors that are made of a sound of so many frames."""
        embedding = self.tower.embedding
        if not isinstance(embedding, MelSubsampling):
            return self.n_tokens
        return self.projector.n_tokens(embedding.left(n_frames)[-1])

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """What sounds are filled up with, if they are: one vector, through the projector's map."""
        if not self.filled:
            return ()
        weight, (wide, out) = "/hearing.projector.layers_0.weight", self.projector.widths
        return (Product(name="filling", a=1, b=wide, c=out, weight=weight),)

    def child_run(self, name: str, run: Pass) -> Pass:
        """The tower and the projector process the tokens of a sound, as long as it may be."""
        return replace(run, images=0, tokens=self.tower.max_positions)

"""What every mixer says of itself: which tokens it sees, and what it reads beside the stream.

A mixer carries numbers from token to token. It owns its memory: `remembers` says what is kept of earlier tokens, for
each token, for those of a window, or for the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.spec.linear import Mapped


@dataclass(frozen=True, kw_only=True)
class Mixer(Mapped):
    """Base of what carries numbers from token to token; the defaults are those of a causal one, of the stream alone."""

    kind = "attention"
    d_model: int
    """Width of the residual stream."""

    @property
    def decodes(self) -> bool:
        """Whether a text can be continued token by token: none sees those after it, and what came before is kept."""
        return True

    @property
    def source_width(self) -> int | None:
        """Width of what it reads of an encoder; None where it reads the stream alone."""
        return None

    @property
    def sees_images(self) -> bool:
        """Whether tokens of one image can see each other both ways, while all others see those before them."""
        return False

    @property
    def buckets(self) -> tuple[int, int] | None:
        """Buckets and heads of the stack's table of distances that it asks for; None where it asks for none."""
        return None

    @property
    def queries_per_key(self) -> int:
        """How many query heads read one key head."""
        return 1

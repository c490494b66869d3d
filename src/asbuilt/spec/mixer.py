"""The common declarations of mixers: which tokens they attend to, and what they read besides the stream.

A mixer moves information between tokens. It owns its cache: `remembers` declares what is stored of earlier tokens, per
token, for those of a window, or per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.spec.linear import Mapped


@dataclass(frozen=True, kw_only=True)
class Mixer(Mapped):
    """Base class of mixers; the defaults are those of a causal one that reads only the stream."""

    kind = "attention"
    d_model: int
    """Width of the residual stream."""

    @property
    def input_width(self) -> int:
        """Width of what it reads: of the stream, which it writes to."""
        return self.d_model

    @property
    def decodes(self) -> bool:
        """Whether it supports decoding token by token: it is causal, and past tokens are cached."""
        return True

    @property
    def source_width(self) -> int | None:
        """Width of the encoder's output that it reads; None if it reads only the stream."""
        return None

    @property
    def sees_images(self) -> bool:
        """Whether it supports bidirectional attention within an image and causal attention elsewhere."""
        return False

    @property
    def buckets(self) -> tuple[int, int] | None:
        """Buckets and heads of the stack's bias table that it needs; None if it needs none."""
        return None

    @property
    def distances(self) -> tuple[int, int] | None:
        """Rows and width of the stack's table of distances that it needs; None if it needs none."""
        return None

    @property
    def choice(self) -> tuple[bool, int] | None:
        """Whether it chooses keys itself, rather than reuse the last choice, and how many; None if it uses all."""
        return None

    @property
    def lends_choice(self) -> bool:
        """Whether later layers may reuse its choice of keys: it is the same for all heads."""
        return True

    @property
    def window_side(self) -> int | None:
        """Patches per side of the windows into which it divides an image; None if it needs no image."""
        return None

    @property
    def queries_per_key(self) -> int:
        """Query heads per key head."""
        return 1

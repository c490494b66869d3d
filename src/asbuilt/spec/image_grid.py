"""Images of any size: patches of a grid of rows and columns, attention in windows of it, and vectors for a text.

Wang et al. 2024, Qwen2-VL (arXiv 2409.12191); Bai et al. 2025, Qwen2.5-VL (arXiv 2502.13923), section 2.1. Costs are
those of square images of the size that `GridPatches` states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt
from typing import ClassVar

from asbuilt.spec.attention import Attention
from asbuilt.spec.linear import Linear
from asbuilt.spec.mixer import Mixer
from asbuilt.spec.part import Pass, Weight, require, require_sizes
from asbuilt.spec.positions import Rotary
from asbuilt.spec.vision import ConvolvedProjector, MLPProjector, PatchEmbedding, PooledProjector, Vision


@dataclass(frozen=True, kw_only=True)
class GridPatches(PatchEmbedding):
    """W x + b of each patch x, `frames` x `patch_size` x `patch_size` pixels of an image of any size.

    An image is repeated `frames` times. `image_size` is that of the images whose costs are declared.
    """

    any_size: ClassVar[bool] = True
    frames: int = 1
    """Frames per patch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes(self, "frames")
        require(self, "class_token", self.class_token == "none", "none for images of any size")

    @property
    def d_patch(self) -> int:
        """Numbers per patch."""
        return self.channels * self.frames * self.patch_size**2

    def holds(self) -> dict[str, Weight]:
        """W (d_model, channels, frames, patch_size, patch_size) and, if enabled, a bias."""
        shape = (self.d_model, self.channels, self.frames, self.patch_size, self.patch_size)
        return super().holds() | {"weight": Weight(shape=shape, role="matrix")}


@dataclass(frozen=True, kw_only=True)
class Windowed(Mixer):
    """Attention within each window of `side` x `side` patches of an image, as if it were an image of its own.

    Windows at the lower and right edges may be smaller.
    """

    attention: Attention
    """Attention within a window."""
    side: int
    """Patches per side of a window."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "side")
        part = self.attention
        require(self, "attention", isinstance(part, Attention), "an Attention")
        require(self, "attention", part.d_model == self.d_model, f"attention over d_model = {self.d_model}")
        allowed = "bidirectional attention without a window of its own, with RoPE or no positions"
        plain = isinstance(part.positions, Rotary | None)
        require(self, "attention", plain and not part.causal and part.reach is None, allowed)

    def plain_maps(self) -> dict[str, Linear]:
        """None: they are the attention's."""
        return {}

    @property
    def decodes(self) -> bool:
        """False: all patches come at once."""
        return False

    @property
    def window_side(self) -> int:
        """Its side."""
        return self.side

    @property
    def queries_per_key(self) -> int:
        """As in its attention."""
        return self.attention.queries_per_key

    def child_run(self, name: str, run: Pass) -> Pass:
        """Attention processes each window of a square image as a sequence."""
        windows = (isqrt(run.tokens) // self.side) ** 2
        return replace(run, batch=run.batch * windows, tokens=self.side**2)


@dataclass(frozen=True, kw_only=True)
class GridVision(Vision):
    """Images of any size whose projected patches replace `placeholder` tokens in the embedded text.

    The output of the tower's blocks in `taps` is merged too, by one of `mergers` each, and the results are added to the
    stream at those tokens after the text's first blocks (DeepStack, Meng et al. 2024, arXiv 2406.04334). The tokens of
    an image have the coordinates of its grid of squares, from the position that a text token would have; the text after
    it continues at the largest of them plus 1.
    """

    projector: MLPProjector | PooledProjector | ConvolvedProjector
    """The projector from the tower's output to the text's width, of squares of patches or by convolutions."""
    taps: tuple[int, ...] = ()
    """Blocks of the tower whose output is added after the text's first blocks, ascending."""
    mergers: tuple[MLPProjector, ...] = ()
    """A projector for each of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "tower", self.tower.embedding.any_size, "a model of patches of images of any size")
        for name in ("prefix", "layers"):
            require(self, name, not getattr(self, name), "unset for images of any size")
        kinds = isinstance(self.projector, MLPProjector | PooledProjector | ConvolvedProjector)
        require(self, "projector", kinds, "of squares of patches, or convolutions")
        if not isinstance(self.projector, ConvolvedProjector):
            n_side = self.tower.embedding.n_side
            require(
                self, "projector", n_side % self.projector.merge == 0, f"squares that divide {n_side} patches per side"
            )
        n, taps = self.tower.n_layers, self.taps
        listed = isinstance(taps, tuple) and all(type(i) is int and 0 <= i < n for i in taps)
        require(self, "taps", listed and list(taps) == sorted({*taps}), f"ascending numbers from 0 to {n - 1}")
        merges = not isinstance(self.projector, ConvolvedProjector)
        require(self, "taps", merges or not taps, "none beside a projector that is not of squares of patches")
        same = (self.projector.d_in, self.projector.d_out, self.projector.merge)
        alike = all((one.d_in, one.d_out, one.merge) == same for one in self.mergers)
        require(self, "mergers", alike and len(self.mergers) == len(taps), "one like the projector for each of taps")

    @property
    def n_vectors(self) -> int:
        """One that replaces the placeholder, and those added after the text's first blocks."""
        return 1 + len(self.taps)

"""Image encoders: patches to the stream, to class scores or to an embedding.

Shapes: images N, patches P, model width M.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from asbuilt.kernels.rows import row_products
from asbuilt.nn.classifier import first_token
from asbuilt.nn.model import Model
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.nn.vision import PatchEmbedding
from asbuilt.spec import image_encoder as spec
from asbuilt.spec.part import Kernel


@computes(spec.ImageEncoder)
class ImageEncoder(Model):
    """Images to the normalised stream, or to the output of a head that reads the first token."""

    embedding: PatchEmbedding  # pyright: ignore[reportIncompatibleVariableOverride]  # set once, when it is built
    pooler: nn.Module | None

    def forward(self, images: Tensor, *, kernel: Kernel = "fused", **unread: Any) -> Tensor:  # noqa: ANN401
        """Returns the head's output, or the stream (N, P, M), for images (N, C, H, W).

        Raises InputError for images of another size.
        """
        self.refuse(unread)
        return self.of_images(images, kernel)

    def of_images(self, pixels: Tensor, kernel: Kernel, depth: int | None = None) -> Tensor:
        """Returns the output for images (N, C, H, W), or the stream after `depth` blocks if not None."""
        pixels, step = self.opened(pixels, kernel)
        with row_products(self.dtype, self.device, step.batch * step.tokens):
            return self.logits(pixels, step, last=False) if depth is None else self.stream(pixels, step, depth)

    def opened(self, pixels: Tensor, kernel: Kernel) -> tuple[Tensor, Step]:
        """Returns the embedded images, and the step over their patches; raises InputError for another image size."""
        images, pixels = pixels, self.embedding.images(pixels)
        if self.embedding.part.any_size:
            return pixels, self.over(len(pixels), self.embedding.grid(pixels), kernel)
        step = self.begin((len(pixels), self.embedding.part.n_tokens), pixels.device, None, None, kernel)
        self.embedding.show(images, step)
        return pixels, step

    def over(self, count: int, grid: tuple[int, int], kernel: Kernel) -> Step:
        """Returns the step over `count` images of any size, each a grid of rows and columns of patches."""
        step = self.begin((count, grid[0] * grid[1]), self.device, None, None, kernel)
        step.show(grid)
        return step

    def pooled(self, images: Tensor, *, kernel: Kernel = "fused") -> Tensor:
        """Returns (N, M): the pooler's output for each image's first token."""
        assert self.pooler is not None, "this model has no pooler"
        pixels, step = self.opened(images, kernel)
        with row_products(self.dtype, self.device, step.batch * step.tokens):
            return self.pooler(self.normed(first_token(self.stream(pixels, step), None)))[:, 0]

"""Dual encoders, which compare embeddings of texts and images.

Shapes: batch of texts B, new tokens T, images N, width of the vectors D.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from asbuilt.nn.model import Model
from asbuilt.nn.registry import computes
from asbuilt.nn.vision import Contrast
from asbuilt.spec import dual_encoder as spec
from asbuilt.spec.part import Kernel

if TYPE_CHECKING:
    from asbuilt.nn.cache import Cache


@computes(spec.DualEncoder)
class DualEncoder(Model):
    """The similarity of each image with each text; the texts' embeddings without images."""

    vision: Contrast

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        cache: Cache | None = None,
        valid_BT: Tensor | None = None,
        images: Tensor | None = None,
        reach: tuple[int, ...] | None = None,
        last: bool = False,
        kernel: Kernel = "fused",
        **unread: Any,  # noqa: ANN401  # what no forward reads
    ) -> Tensor:
        """Returns the similarity (N, B) of each of the images (N, C, H, W) or (B, n, C, H, W) with each text.

        Without images it returns the texts' embeddings (B, D). Raises InputError for images of another size.
        """
        self.refuse(unread)
        pixels = None if images is None else self.vision.images(images)
        step = self.begin((tokens_BT.shape[0], tokens_BT.shape[1]), tokens_BT.device, cache, valid_BT, kernel, reach)
        texts_BD = self.run(tokens_BT, step, last)
        return texts_BD if pixels is None else self.vision(pixels, texts_BD, kernel)

"""Dual encoders: a text's vector beside an image's, compared: CLIP."""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.spec.embedding import TokenEmbedding
from asbuilt.spec.model import Input, Model
from asbuilt.spec.part import Gives, Pass, require
from asbuilt.spec.vision import Contrast, PatchEmbedding, Projection
from asbuilt.spec.vision_language_model import of_images


@dataclass(frozen=True, kw_only=True, repr=False)
class DualEncoder(Model):
    """An encoder of texts, and one of images in `vision`: how near each image's vector is to each text's.

    Radford et al. 2021 (arXiv 2103.00020). Given texts alone it gives their vectors.
    """

    embedding: TokenEmbedding
    """What tokens become."""
    head: Projection
    """What makes a text's vector of one of its tokens."""
    vision: Contrast
    """What encodes images, and compares their vectors with the texts'."""

    def __post_init__(self) -> None:
        require(self, "vision", isinstance(self.vision, Contrast), "a tower of patches whose vectors are compared")
        super().__post_init__()
        require(self, "embedding", isinstance(self.embedding, TokenEmbedding), "a table of tokens, of its own")
        require(self, "head", isinstance(self.head, Projection), "a projection to a vector")
        wanted = self.head.d_out
        require(self, "vision", self.vision.d_shared == wanted, f"vectors as wide as the text's, {wanted}")

    @property
    def reads(self) -> tuple[Input, ...]:
        """Tokens, and images beside them."""
        return ("tokens", "images")

    @property
    def gives(self) -> Gives:
        """How near each image is to each text."""
        return "similarities"

    @property
    def patches(self) -> PatchEmbedding:
        """The tower's embedding."""
        return self.vision.tower.embedding

    def child_run(self, name: str, run: Pass) -> Pass | None:
        """The tower sees all images; an image is always read as a whole."""
        return of_images(run) if name == "vision" else super().child_run(name, run)

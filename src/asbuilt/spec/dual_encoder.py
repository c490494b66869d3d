"""Dual encoders, which compare embeddings of texts and images: CLIP."""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.spec.embedding import TokenEmbedding
from asbuilt.spec.model import Input, Model
from asbuilt.spec.part import Gives, Pass, require
from asbuilt.spec.vision import Contrast, PatchEmbedding, Projection
from asbuilt.spec.vision_language_model import of_images


@dataclass(frozen=True, kw_only=True, repr=False)
class DualEncoder(Model):
    """A text encoder, and an image encoder in `vision`: the similarity of each image's embedding with each text's.

    Radford et al. 2021 (arXiv 2103.00020). Given only texts, it outputs their embeddings.
    """

    embedding: TokenEmbedding
    """The token embedding."""
    head: Projection
    """The projection of one token to the text's embedding."""
    vision: Contrast
    """The image encoder, and the comparison of embeddings."""

    def __post_init__(self) -> None:
        require(self, "vision", isinstance(self.vision, Contrast), "a tower of patches whose vectors are compared")
        super().__post_init__()
        require(self, "embedding", isinstance(self.embedding, TokenEmbedding), "a TokenEmbedding")
        require(self, "head", isinstance(self.head, Projection), "a Projection")
        wanted = self.head.d_out
        require(self, "vision", self.vision.d_shared == wanted, f"vectors as wide as the text's, {wanted}")

    @property
    def reads(self) -> tuple[Input, ...]:
        """Tokens and images."""
        return ("tokens", "images")

    @property
    def gives(self) -> Gives:
        """The similarity of each image with each text."""
        return "similarities"

    @property
    def patches(self) -> PatchEmbedding:
        """The tower's embedding."""
        return self.vision.tower.embedding

    def child_run(self, name: str, run: Pass) -> Pass | None:
        """The tower processes all images, each in one pass."""
        return of_images(run) if name == "vision" else super().child_run(name, run)

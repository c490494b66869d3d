"""Encoders of images: patches to the stream, to class scores or to a vector: ViT, and the towers of other wholes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asbuilt.spec.encoder import Pooler
from asbuilt.spec.model import Input, Model
from asbuilt.spec.part import Part, Pass, require
from asbuilt.spec.vision import Classifier, PatchEmbedding, Projection


@dataclass(frozen=True, kw_only=True, repr=False)
class ImageEncoder(Model):
    """Images' patches to the stream after the final norm, or to what a head makes of their first token.

    Dosovitskiy et al. 2020 (arXiv 2010.11929). A `pooler` gives one vector of each image, if asked. Its tokens are the
    patches of one image, and `max_positions` says how many they are.
    """

    embedding: PatchEmbedding
    """What patches become."""
    head: Classifier | Projection | None = None
    """What the first token becomes; None leaves the stream."""
    pooler: Pooler | None = None
    """What makes one vector of an image, if asked."""

    def __post_init__(self) -> None:
        require(self, "embedding", isinstance(self.embedding, PatchEmbedding), "one of patches")
        super().__post_init__()
        of_first = not isinstance(self.head, Projection) or self.head.reads == "first"
        require(self, "head", of_first, "one that reads the first token, of patches")
        n = self.embedding.n_tokens
        require(self, "max_positions", self.max_positions == n, f"the {n} tokens of an image")

    @property
    def reads(self) -> tuple[Input, ...]:
        """Images."""
        return ("images",)

    @property
    def patches(self) -> PatchEmbedding:
        """The embedding."""
        return self.embedding

    def end(self, run: Pass) -> Part | None:
        """Returns the head, or the pooler where that is asked for."""
        return self.pooler if run.logits == "pooled" else self.head

    def _own(self, run: Pass) -> Pass:
        """All of an image, and nothing before."""
        logits = "pooled" if run.logits == "pooled" else "all"
        return replace(run, tokens=self.embedding.n_tokens, past=0, logits=logits)

"""Image encoders: patches to the stream, to class scores or to an embedding: ViT, and the towers of other models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asbuilt.spec.attention import Attention
from asbuilt.spec.attention_pooling import AttentionPooling
from asbuilt.spec.classifier import Classifier
from asbuilt.spec.encoder import Pooler
from asbuilt.spec.model import Input, Model
from asbuilt.spec.part import Part, Pass, require
from asbuilt.spec.vision import PatchEmbedding, Projection


@dataclass(frozen=True, kw_only=True, repr=False)
class ImageEncoder(Model):
    """Patches to the stream after the final norm, or to the output of a head that reads the first token or pools all.

    Dosovitskiy et al. 2020 (arXiv 2010.11929). A `pooler` outputs one vector per image, on request. Its tokens are the
    patches of one image; `max_positions` is their number.
    """

    embedding: PatchEmbedding
    """The patch embedding."""
    head: Classifier | Projection | AttentionPooling | None = None
    """The head, which reads the first token, or pools all; None outputs the stream."""
    pooler: Pooler | None = None
    """The pooler, which outputs one vector per image on request."""

    def __post_init__(self) -> None:
        require(self, "embedding", isinstance(self.embedding, PatchEmbedding), "a PatchEmbedding")
        super().__post_init__()
        reads = self.head.reads if isinstance(self.head, Projection) else getattr(self.head, "labels", "first")
        require(self, "head", reads == "first", "one that reads the first token, or pools all")
        plain = all(isinstance(x, Attention) and not x.causal and x.plain_pattern for x in self.mixers)
        require(self, "blocks", plain or not self.embedding.tiled, "plain bidirectional attention, for tiles")
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
        """Returns the head, or the pooler if requested."""
        return self.pooler if run.logits == "pooled" else self.head

    def _own(self, run: Pass) -> Pass:
        """Returns a pass over whole images, without past tokens."""
        logits = "pooled" if run.logits == "pooled" else "all"
        return replace(run, tokens=self.embedding.n_tokens, past=0, padded=self.embedding.tiled, logits=logits)

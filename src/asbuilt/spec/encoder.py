"""Parts of encoders other than blocks: token types, the map of a narrow embedding, the transform before
masked-language-model logits, the pooler.

Devlin et al. 2018, BERT (arXiv 1810.04805).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asbuilt.spec.feedforward import ACTIVATIONS, Activation
from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.part import (
    Part,
    Pass,
    Product,
    Weight,
    require,
    require_choice,
    require_flags,
    require_number,
    require_sizes,
)


@dataclass(frozen=True, kw_only=True)
class TypeEmbedding(Part):
    """A table of one learned vector per token type, added to the token embedding: to which sentence a token belongs."""

    kind = "embedding"
    n_types: int
    """Number of token types."""
    d_model: int
    """Width of the residual stream."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_types", "d_model")

    def holds(self) -> dict[str, Weight]:
        """The table (n_types, d_model)."""
        return {"weight": Weight(shape=(self.n_types, self.d_model), role="table")}


@dataclass(frozen=True, kw_only=True)
class EmbeddingProjection(Mapped):
    """x W^T + b, where x is the sum of all embeddings after its norm, to the width of the residual stream.

    Embeddings then have their own width (ALBERT, Lan et al. 2019, arXiv 1909.11942, section 3.1; ELECTRA, Clark et al.
    2020, arXiv 2003.10555).
    """

    kind = "embedding"
    d_embedding: int
    """Width of the embeddings."""
    d_model: int
    """Width of the residual stream."""
    dense: Map | None = None
    """Replaces the plain map, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_embedding", "d_model")
        self.require_maps()

    def plain_maps(self) -> dict[str, Linear]:
        """One map, d_embedding to d_model, with a bias."""
        return {"dense": Linear(d_in=self.d_embedding, d_out=self.d_model, bias=True, belongs="embedding")}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The map."""
        return self.map_products(run, "dense")


@dataclass(frozen=True, kw_only=True)
class HeadTransform(Mapped):
    """LayerNorm(activation(x W^T + b)), the input of a masked language model's head.

    Its norm counts as part of the head. `bias` is b, `norm_bias` that of the norm. The result may have another width
    than the stream, `d_out`: that of a narrow embedding.
    """

    kind = "head"
    d_model: int
    """Width of the residual stream."""
    d_out: int | None = None
    """Width of the result, if not d_model."""
    activation: Activation
    """Activation between the map and the norm."""
    eps: float = 1e-12
    """Epsilon of the norm."""
    bias: bool = True
    """Whether the map has a bias."""
    norm_bias: bool = True
    """Whether the norm has a bias."""
    dense: Map | None = None
    """Replaces the plain map, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", *(() if self.d_out is None else ("d_out",)))
        require_choice(self, "activation", ACTIVATIONS)
        require_number(self, "eps")
        require_flags(self, "bias", "norm_bias")
        require(self, "d_out", self.d_out != self.d_model, "another width than d_model, or none")
        self.require_maps()

    @property
    def width(self) -> int:
        """Width of the result."""
        return self.d_model if self.d_out is None else self.d_out

    def plain_maps(self) -> dict[str, Linear]:
        """One map, d_model to d_out."""
        return {"dense": Linear(d_in=self.d_model, d_out=self.width, bias=self.bias, belongs="head")}

    def holds(self) -> dict[str, Weight]:
        """The norm's gain (d_out) and bias."""
        gain = {"norm.weight": Weight(shape=(self.width,), role="gain")}
        bias = {"norm.bias": Weight(shape=(self.width,), role="bias")} if self.norm_bias else {}
        return gain | bias

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The map."""
        return self.map_products(run, "dense")


PoolerActivation = Literal["tanh"] | Activation
POOLER_ACTIVATIONS: tuple[PoolerActivation, ...] = ("tanh", *ACTIVATIONS)


@dataclass(frozen=True, kw_only=True)
class Pooler(Mapped):
    """activation(x W^T + b) of one token per sequence: in a classifier, or in a pass that requests pooled vectors."""

    d_model: int
    """Width of the residual stream."""
    activation: PoolerActivation = "tanh"
    """Activation of the map's output."""
    dense: Map | None = None
    """Replaces the plain map, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model")
        require_choice(self, "activation", POOLER_ACTIVATIONS)
        self.require_maps()

    @property
    def width(self) -> int:
        """Width of the result."""
        return self.d_model

    def plain_maps(self) -> dict[str, Linear]:
        """One map, d_model to d_model, with a bias."""
        return {"dense": Linear(d_in=self.d_model, d_out=self.d_model, bias=True)}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The map."""
        return self.map_products(run, "dense")

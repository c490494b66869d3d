"""Language heads: with their own matrix, or tied to the embedding's table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from asbuilt.spec.encoder import HeadTransform
from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.part import (
    Gives,
    Part,
    Pass,
    Product,
    Weight,
    divided_vocabulary,
    require,
    require_flags,
    require_format,
    require_number,
    require_sizes,
)


@dataclass(frozen=True, kw_only=True)
class _Logits(Mapped):
    """The common fields of both heads: scale * x W^T + b, with its own W or the embedding's table."""

    kind = "head"
    gives: ClassVar[Gives] = "logits"
    per_token: ClassVar[bool] = True
    d_model: int
    """Width of the residual stream."""
    n_vocab: int
    """Size of the vocabulary, one logit per token."""
    bias: bool = False
    """Whether the logits have a bias."""
    scale: float = 1.0
    """Factor on the products, before the bias."""
    softcap: float | None = None
    """c, if each logit l is replaced by c * tanh(l / c)."""
    transform: HeadTransform | None = None
    """Transform of the stream before the product."""
    shift: bool = False
    """Whether a buffer, which is not trained, is added to the logits."""
    d_table: int | None = None
    """Width of W's rows, if not d_model."""
    project: Map | None = None
    """Replaces the plain map to that width, if given."""
    format: str | None = None
    """Block format of W; None for plain numbers."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_vocab", *(() if self.d_table is None else ("d_table",)))
        require_flags(self, "bias", "shift")
        require_number(self, "scale")
        if self.softcap is not None:
            require_number(self, "softcap")
        fits = self.transform is None or self.transform.d_model == self.d_model
        require(self, "transform", fits, f"a transform of d_model = {self.d_model}")
        if self.transform is not None:
            made = None if self.transform.width == self.d_model else self.transform.width
            require(self, "d_table", self.d_table == made, f"{made}, as wide as the result of its transform")
        require_format(self, "format", self.width)
        self.require_maps()

    def plain_maps(self) -> dict[str, Linear]:
        """From d_model to the table's width, if they differ and no transform comes before."""
        if self.d_table is None or self.transform is not None:
            return {}
        return {"project": Linear(d_in=self.d_model, d_out=self.d_table, belongs="head")}

    @property
    def n_scores(self) -> int:
        """Number of classes of the loss: one per token of the vocabulary."""
        return self.n_vocab

    @property
    def width(self) -> int:
        """Width of a row of W."""
        return self.d_model if self.d_table is None else self.d_table

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_vocab / tensor of the logits, padded if that is not whole."""
        return replace(self, n_vocab=divided_vocabulary(self.n_vocab, tensor))

    def holds(self) -> dict[str, Weight]:
        """A bias, if enabled."""
        return {"bias": Weight(shape=(self.n_vocab,), role="bias", split="out")} if self.bias else {}

    def buffers(self) -> dict[str, Weight]:
        """The shift, if enabled."""
        return {"shift": Weight(shape=(self.n_vocab,), role="bias", split="out")} if self.shift else {}

    def _products(self, run: Pass, weight: str) -> tuple[Product, ...]:
        """The product with `weight`, after the map to the table's width."""
        frozen = self.format is not None
        logits = Product(name="logits", a=run.rows, b=self.width, c=self.n_vocab, weight=weight, one_gradient=frozen)
        return (*self.map_products(run, *self.maps), logits)


@dataclass(frozen=True, kw_only=True)
class Head(_Logits):
    """Logits scale * x W^T + b with its own matrix; `softcap` c replaces each logit l by c*tanh(l/c).

    x first passes through a `transform` or a linear map, to W's width, which is `d_table` if not d_model. `shift` adds
    a buffer to the logits, an untrained number per token.
    """

    def holds(self) -> dict[str, Weight]:
        """W (n_vocab, d_model or d_table) and a bias, if enabled."""
        shape, packed = (self.n_vocab, self.width), self.format is not None
        own = Weight(shape=shape, role="matrix", split="out", format=self.format, frozen=packed)
        return {"weight": own} | super().holds()

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product, or two."""
        return self._products(run, "weight")


@dataclass(frozen=True, kw_only=True)
class TiedHead(_Logits):
    """Logits scale * x E^T + b with the token embedding's table E: the same product, without its own matrix.

    The other fields are those of `Head`; `d_table` and `format` must equal the embedding's.
    """

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product, or two."""
        return self._products(run, "/embedding.weight")


@dataclass(frozen=True, kw_only=True)
class SharedHead(Part):
    """Logits by the head of the whole model: its matrix, bias, scale and cap, for another part's vectors.

    The matrix is that head's own, or the embedding's table where the head is `tied`.
    """

    kind = "head"
    d_model: int
    """Width of the residual stream."""
    n_vocab: int
    """Size of the vocabulary, one logit per token."""
    tied: bool = False
    """Whether the whole model's head is tied to its embedding."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_vocab")
        require_flags(self, "tied")

    @property
    def _matrix(self) -> str:
        return "embedding.weight" if self.tied else "head.weight"

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device makes n_vocab / tensor of the logits, padded if that is not whole."""
        return replace(self, n_vocab=divided_vocabulary(self.n_vocab, tensor))

    def rereads(self) -> dict[str, Weight]:
        """That head's matrix."""
        return {self._matrix: Weight(shape=(self.n_vocab, self.d_model), role="matrix", split="out")}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product."""
        return (Product(name="logits", a=run.rows, b=self.d_model, c=self.n_vocab, weight=f"/{self._matrix}"),)

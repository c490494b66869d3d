"""Token embeddings: a table of one learned vector per token, or another's table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.part import (
    Part,
    Pass,
    Product,
    Weight,
    divided_vocabulary,
    require_format,
    require_number,
    require_sizes,
)


@dataclass(frozen=True, kw_only=True)
class TokenEmbedding(Mapped):
    """A table of one learned vector per token of the vocabulary; what is looked up is multiplied by `scale`.

    A table `d_table` wide is followed by a matrix to d_model (OPT-350M; ALBERT, arXiv 1909.11942, section 3.1).
    """

    kind = "embedding"
    n_vocab: int
    """Tokens of the vocabulary."""
    d_model: int
    """Width of the residual stream."""
    scale: float = 1.0
    """What the looked-up vectors are multiplied by."""
    d_table: int | None = None
    """Width of the table, where it is not d_model."""
    project: Map | None = None
    """What stands in place of the plain map from the table's width."""
    format: str | None = None
    """The block format that the table is held in; None for plain numbers."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_vocab", "d_model", *(() if self.d_table is None else ("d_table",)))
        require_number(self, "scale")
        require_format(self, "format", self.width)
        self.require_maps()

    @property
    def width(self) -> int:
        """Numbers of a row of the table."""
        return self.d_model if self.d_table is None else self.d_table

    def plain_maps(self) -> dict[str, Linear]:
        """From the table's width to d_model, where the two differ."""
        if self.d_table is None:
            return {}
        return {"project": Linear(d_in=self.d_table, d_out=self.d_model, belongs="embedding")}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_vocab / tensor of the rows, padded where that leaves a rest."""
        return replace(self, n_vocab=divided_vocabulary(self.n_vocab, tensor))

    def holds(self) -> dict[str, Weight]:
        """The table (n_vocab, d_model), or (n_vocab, d_table)."""
        shape, packed = (self.n_vocab, self.width), self.format is not None
        return {"weight": Weight(shape=shape, role="table", split="out", format=self.format, frozen=packed)}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The map where the table has a width of its own."""
        return self.map_products(run, *self.maps)


@dataclass(frozen=True, kw_only=True)
class SharedEmbedding(Part):
    """Looks vectors up in the table of the whole model's own embedding, and multiplies them by `scale`."""

    kind = "embedding"
    n_vocab: int
    """Tokens of the vocabulary."""
    d_model: int
    """Width of the residual stream."""
    scale: float = 1.0
    """What the looked-up vectors are multiplied by."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_vocab", "d_model")
        require_number(self, "scale")

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device finds n_vocab / tensor of the rows, padded where that leaves a rest."""
        return replace(self, n_vocab=divided_vocabulary(self.n_vocab, tensor))

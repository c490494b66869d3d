"""Token embeddings: a table of one learned vector per token, or a shared table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.ngrams import MOST_IDS, NGrams
from asbuilt.spec.part import (
    Part,
    Pass,
    Product,
    Weight,
    divided_vocabulary,
    is_size,
    require,
    require_format,
    require_number,
    require_sizes,
)


@dataclass(frozen=True, kw_only=True)
class TokenEmbedding(Mapped):
    """A table of one learned vector per token of the vocabulary; looked-up rows are multiplied by `scale`.

    After the vocabulary it may have `extra` rows, of tokens that are read and never predicted.

    A table of width `d_table` is followed by a linear map to d_model (OPT-350M; ALBERT, arXiv 1909.11942, section 3.1).
    With `ngrams` the result is averaged with rows that the last tokens choose together.
    """

    kind = "embedding"
    n_vocab: int
    """Size of the vocabulary."""
    d_model: int
    """Width of the residual stream."""
    scale: float = 1.0
    """Factor on the looked-up rows."""
    d_table: int | None = None
    """Width of the table, if not d_model."""
    project: Map | None = None
    """Replaces the plain map from the table's width, if given."""
    extra: int = 0
    """Rows after the vocabulary's, of tokens that are read and never predicted."""
    format: str | None = None
    """Block format of the table; None for plain numbers."""
    ngrams: NGrams | None = None
    """Tables of n-grams, with which a token's vector is averaged; None for none."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_vocab", "d_model", *(() if self.d_table is None else ("d_table",)))
        require_number(self, "scale")
        require(
            self,
            "extra",
            is_size(self.extra) or (type(self.extra) is int and self.extra == 0),
            "a whole number from 0 to 2^31-1",
        )
        require_format(self, "format", self.width)
        self.require_maps()
        ngrams = self.ngrams
        fits = ngrams is None or (isinstance(ngrams, NGrams) and ngrams.d_model == self.d_model)
        require(self, "ngrams", fits, f"NGrams of d_model = {self.d_model}")
        require(self, "ngrams", ngrams is None or self.n_rows <= MOST_IDS, "none where ids exceed 2^24")

    @property
    def width(self) -> int:
        """Width of a row of the table."""
        return self.d_model if self.d_table is None else self.d_table

    @property
    def n_rows(self) -> int:
        """Rows of the table: the tokens that can be read."""
        return self.n_vocab + self.extra

    def plain_maps(self) -> dict[str, Linear]:
        """From the table's width to d_model, if they differ."""
        if self.d_table is None:
            return {}
        return {"project": Linear(d_in=self.d_table, d_out=self.d_model, belongs="embedding")}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Each device holds n_vocab / tensor of the rows, padded if that is not whole; extra rows are divided too."""
        n_vocab, rows = divided_vocabulary(self.n_vocab, tensor), divided_vocabulary(self.n_rows, tensor)
        return replace(self, n_vocab=n_vocab, extra=max(0, rows - n_vocab))

    def holds(self) -> dict[str, Weight]:
        """The table (n_vocab + extra, d_model), or (n_vocab + extra, d_table)."""
        shape, packed = (self.n_rows, self.width), self.format is not None
        return {"weight": Weight(shape=shape, role="table", split="out", format=self.format, frozen=packed)}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The linear map, if the table has its own width."""
        return self.map_products(run, *self.maps)


@dataclass(frozen=True, kw_only=True)
class SharedEmbedding(Part):
    """Looks rows up in the table of the whole model's embedding, and multiplies them by `scale`."""

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
        """Each device looks up n_vocab / tensor of the rows, padded if that is not whole."""
        return replace(self, n_vocab=divided_vocabulary(self.n_vocab, tensor))

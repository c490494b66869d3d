"""N-gram embeddings: beside a token's own row, rows of hashed tables that the last few tokens choose together.

Liu et al. 2026 (LongCat-Flash-Lite, arXiv 2601.21204), and its published code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from asbuilt.errors import InputError
from asbuilt.spec.linear import Linear, Map, Mapped
from asbuilt.spec.part import Part, Pass, Product, Remembered, Weight, is_size, require, require_sizes

MOST_TOKENS = 16  # of one n-gram: with ids and rows bounded as below, no sum of a hash exceeds 63 bits
MOST_IDS = 2**24  # which a state in float32 holds exactly
MOST_TABLES = 1024


@dataclass(frozen=True, kw_only=True)
class HashedTable(Mapped):
    """project(row h), h = (sum over i < n of x_(t-i) n_vocab^i) mod n_rows, of token ids x; 0 before a text."""

    kind = "embedding"
    n: int
    """Tokens that choose a row, the own included."""
    n_rows: int
    """Rows of the table."""
    d: int
    """Width of a row."""
    d_model: int
    """Width of the residual stream."""
    project: Map | None = None
    """Replaces the plain map to the stream, if given."""

    def __post_init__(self) -> None:
        require_sizes(self, "n", "n_rows", "d", "d_model")
        require(self, "n", 2 <= self.n <= MOST_TOKENS, f"a whole number from 2 to {MOST_TOKENS}")
        self.require_maps()

    def plain_maps(self) -> dict[str, Linear]:
        """From d to d_model."""
        return {"project": Linear(d_in=self.d, d_out=self.d_model, belongs="embedding")}

    def holds(self) -> dict[str, Weight]:
        """The table (n_rows, d)."""
        return {"weight": Weight(shape=(self.n_rows, self.d), role="table")}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The map."""
        return self.map_products(run, "project")


@dataclass(frozen=True, kw_only=True)
class NGrams(Part):
    """(x + sum of what each table gives) / (1 + number of tables), x being the token's own vector.

    N-grams do not reach back over a token `boundary`, which ends a text: ids before it count as 0, as do those before
    the first. A sequence's state is its last n - 1 ids, n being the most of any table.
    """

    kind = "embedding"
    n_vocab: int
    """Base of the hash: tokens of the vocabulary."""
    tables: tuple[HashedTable, ...]
    """The tables."""
    boundary: int | None = None
    """Id of the token that ends a text; None for none."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_vocab")
        require(self, "n_vocab", self.n_vocab <= MOST_IDS, "a whole number from 1 to 2^24")
        tables = isinstance(self.tables, tuple) and 1 <= len(self.tables) <= MOST_TABLES
        alike = tables and all(isinstance(one, HashedTable) for one in self.tables)
        require(self, "tables", alike, f"1 to {MOST_TABLES} HashedTables")
        require(self, "tables", len({one.d_model for one in self.tables}) == 1, "tables of one d_model")
        known = self.boundary is None or (type(self.boundary) is int and 0 <= self.boundary < MOST_IDS)
        require(self, "boundary", known, "a token id or None")

    @classmethod
    def of(cls, *, n_vocab: int, d_model: int, n: int, splits: int, ratio: float, boundary: int | None = None) -> Self:
        """Returns LongCat-Flash-Lite's tables: `splits` for each of 2 to `n` tokens, together as wide as the stream.

        They have ratio * n_vocab rows and odd numbers more, so that no two hash alike. Raises InputError where the
        tables do not divide the stream.
        """
        for name, value in (("n", n), ("splits", splits)):
            if not is_size(value):
                raise InputError(field=name, value=value, allowed="a whole number from 1")
        count = splits * (n - 1)
        if not 1 <= count <= MOST_TABLES or d_model % count:
            allowed = f"such that splits * (n - 1) divides d_model = {d_model}"
            raise InputError(field="splits", value=splits, allowed=f"{allowed}, {MOST_TABLES} tables at most")
        rows = int(ratio * n_vocab)
        tables = tuple(
            HashedTable(n=2 + i // splits, n_rows=rows + 2 * i + 1, d=d_model // count, d_model=d_model)
            for i in range(count)
        )
        return cls(n_vocab=n_vocab, tables=tables, boundary=boundary)

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.tables[0].d_model

    @property
    def n(self) -> int:
        """The most tokens that choose a row."""
        return max(one.n for one in self.tables)

    def remembers(self) -> tuple[Remembered, ...]:
        """The last n - 1 token ids of a sequence, in float32, which holds them exactly."""
        return (Remembered(name="tokens", shape=(self.n - 1,), per="sequence", dtype="float32"),)

"""Token ids that belong to images or sounds, looked up in a table as wide as what their tower makes.

Gemma 3n (Google 2025, its published code): the placeholders, and the tokens around them, are such ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asbuilt.spec.norms import RMSNorm
from asbuilt.spec.part import LARGEST_SIZE, Part, Pass, Product, Weight, require, require_choice, require_sizes

Through = Literal["vision", "hearing"]
THROUGH: tuple[Through, ...] = ("vision", "hearing")


@dataclass(frozen=True, kw_only=True)
class OwnTokens(Part):
    """The tokens `first` to `first + n_rows - 1`: rows of an own table, normalised, then mapped as images or sounds.

    What the projector of `through` does after its norm is done to them too, in place of a row of the text's table. It
    is computed for every token of a text, and kept for these.
    """

    kind = "embedding"
    through: Through
    """Whose projector maps the rows: that of `vision` or of `hearing`."""
    first: int
    """Id of the first of the tokens."""
    n_rows: int
    """Number of the tokens."""
    d_table: int
    """Width of a row."""
    d_model: int
    """Width of the residual stream."""
    norm: RMSNorm
    """Norm of a row."""

    def __post_init__(self) -> None:
        require_choice(self, "through", THROUGH)
        whole = isinstance(self.first, int) and not isinstance(self.first, bool) and 0 <= self.first <= LARGEST_SIZE
        require(self, "first", whole, "a token id")
        require_sizes(self, "n_rows", "d_table", "d_model")
        normed = isinstance(self.norm, RMSNorm) and self.norm.d == self.d_table
        require(self, "norm", normed, f"an RMSNorm over d_table = {self.d_table}")

    @property
    def past(self) -> int:
        """The first id after these tokens."""
        return self.first + self.n_rows

    def holds(self) -> dict[str, Weight]:
        """The table (n_rows, d_table)."""
        return {"weight": Weight(shape=(self.n_rows, self.d_table), role="table")}

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The projector's map, once more."""
        weight = f"/{self.through}.projector.layers_0.weight"
        return (Product(name="projection", a=run.rows, b=self.d_table, c=self.d_model, weight=weight),)

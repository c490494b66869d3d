"""Classifiers: one number per label, of a whole sequence or of every token.

A reward model and a reranker are classifiers of one label; one that answers questions labels every token with two
numbers, how well an answer begins and how well it ends there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from asbuilt.spec.encoder import HeadTransform, Pooler
from asbuilt.spec.part import (
    LARGEST_SIZE,
    Gives,
    Part,
    Pass,
    Product,
    Weight,
    require,
    require_choice,
    require_flags,
    require_sizes,
)

Labelled = Literal["first", "last", "mean", "all", "span"]
LABELLED: tuple[Labelled, ...] = ("first", "last", "mean", "all", "span")


@dataclass(frozen=True, kw_only=True)
class Classifier(Part):
    """W x + b, where x is one token of a sequence, the mean of all, or every token: one number per label.

    It `labels` the `first` valid token (a class token), the `last` one, the `mean` over valid tokens, or `all` of them;
    a `span` has two labels for every token, how well it begins there and how well it ends. The last one is that which
    is not the token `padding`, if given; of a text of nothing else, the first. x passes through a `transform` first, if
    there is one.
    """

    kind = "head"
    gives: ClassVar[Gives] = "labels"
    d_model: int
    """Width of the residual stream."""
    n_labels: int
    """Number of labels."""
    bias: bool = True
    """Whether there is a bias."""
    labels: Labelled = "first"
    """What is labelled: the `first` token, the `last`, the `mean`, `all` tokens, or the ends of a `span` of them."""
    padding: int | None = None
    """Id of a token that is never the last one; None if padding alone is skipped."""
    transform: Pooler | HeadTransform | None = None
    """Transform of x, before the product."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_labels")
        require_flags(self, "bias")
        require_choice(self, "labels", LABELLED)
        require(self, "n_labels", self.labels != "span" or self.n_labels == 2, "2 for a span, its beginning and end")
        number = isinstance(self.padding, int) and not isinstance(self.padding, bool)
        skips = self.padding is None or (self.labels == "last" and number and 0 <= self.padding <= LARGEST_SIZE)
        require(self, "padding", skips, "a token id, for `last`, or None")
        widths = set() if self.transform is None else {self.transform.d_model, self.transform.width}
        fits = widths <= {self.d_model}
        require(self, "transform", fits, f"a transform of d_model = {self.d_model}")

    @property
    def per_token(self) -> bool:
        """Whether every token has its labels."""
        return self.labels in ("all", "span")

    @property
    def after_norm(self) -> bool:
        """Whether all tokens are normalised before it chooses, rather than the chosen one."""
        return self.labels == "mean"

    @property
    def n_scores(self) -> int:
        """Number of classes of the loss: one per label."""
        return self.n_labels

    def holds(self) -> dict[str, Weight]:
        """W (n_labels, d_model) and, if enabled, a bias."""
        matrix = {"weight": Weight(shape=(self.n_labels, self.d_model), role="matrix")}
        return matrix | ({"bias": Weight(shape=(self.n_labels,), role="bias")} if self.bias else {})

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product."""
        return (Product(name="labels", a=run.rows, b=self.d_model, c=self.n_labels, weight="weight"),)

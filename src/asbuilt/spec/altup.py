"""Alternating updates: a block computes on one of several streams, and predicts and corrects the others.

Baykal et al. 2023 (AltUp, arXiv 2301.13310), as in Gemma 3n's published code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from asbuilt.spec.norms import Norm
from asbuilt.spec.part import Part, Pass, Product, Weight, require, require_number, require_sizes
from asbuilt.spec.per_layer import PerLayerInput


@dataclass(frozen=True, kw_only=True)
class AlternatingUpdates(Part):
    """Streams p_k = s_k + sum over j of P(s_0)_kj s_j are predicted, then corrected to s_k = p_k + c(y)_k (y - p_0).

    y is what the block's branches make of p_0. With m(x) = tanh(norm(x) R^T / d_model), P(x) = m(x) W_P^T, which are
    n_streams x n_streams numbers, and c(x) = 1 + m(x) W_c^T. With a `vector`, vector_norm(vector(g * s_0)) is added to
    all streams but the first, g one learned factor for each number. tanh is computed in float32 or wider.
    """

    n_streams: int
    """Residual streams."""
    d_model: int
    """Width of each stream."""
    norm: Norm
    """Norm of what the weights of streams are computed from."""
    vector: PerLayerInput | None = None
    """What reads the corrected first stream and the token's vector for this block; None for nothing."""
    vector_norm: Norm | None = None
    """Norm of what that gives."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_streams", "d_model")
        require(self, "n_streams", self.n_streams > 1, "at least 2")
        require(self, "norm", self.norm.d == self.d_model, f"a norm over d_model = {self.d_model}")
        fits = self.vector is None or self.vector.d_model == self.d_model
        require(self, "vector", fits, f"one of d_model = {self.d_model}")
        fits = self.vector_norm is None or (self.vector is not None and self.vector_norm.d == self.d_model)
        require(self, "vector_norm", fits, f"a norm over d_model = {self.d_model}, beside a vector")

    def holds(self) -> dict[str, Weight]:
        """W_P (n_streams^2, n_streams), W_c (n_streams, n_streams), R (n_streams, d_model), and for a vector g."""
        n = self.n_streams
        shapes = {"prediction": (n * n, n), "correction": (n, n), "router": (n, self.d_model)}
        scale = {} if self.vector is None else {"vector_scale": Weight(shape=(self.d_model,), role="gain")}
        return {name: Weight(shape=shape, role="matrix") for name, shape in shapes.items()} | scale

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Replicated: every device has whole streams."""
        return self

    def child_run(self, name: str, run: Pass) -> Pass:
        """The norm reads the stream before the block and what the block gives."""
        return replace(run, tokens=2 * run.tokens) if name == "norm" else run

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The weights of prediction and correction, and the mixed streams."""
        n = self.n_streams
        return (
            Product(name="router", a=2 * run.rows, b=self.d_model, c=n, weight="router"),
            Product(name="prediction", a=run.rows, b=n, c=n * n, weight="prediction"),
            Product(name="mix", a=n, b=n, c=self.d_model, n=run.rows),
            Product(name="correction", a=run.rows, b=n, c=n, weight="correction"),
        )


@dataclass(frozen=True, kw_only=True)
class ProjectedStreams(Part):
    """Streams s_0 = x and s_k = W_k x before the first block, and their mean after the last: of s_0 and each U_k s_k.

    Each product is scaled to the root mean square of x, or of s_0; `eps` is the least that the mean square of a product
    counts as.
    """

    n_streams: int
    """Residual streams."""
    d_model: int
    """Width of each stream."""
    eps: float = 1e-5
    """Least mean square of a projected stream."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_streams", "d_model")
        require(self, "n_streams", self.n_streams > 1, "at least 2")
        require_number(self, "eps")

    def holds(self) -> dict[str, Weight]:
        """All W_k, and all U_k, (n_streams - 1, d_model, d_model)."""
        shape = (self.n_streams - 1, self.d_model, self.d_model)
        return {name: Weight(shape=shape, role="matrix") for name in ("into", "out")}

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Replicated: every device has whole streams."""
        return self

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """Each matrix once."""
        d, more = self.d_model, self.n_streams - 1
        return tuple(Product(name=name, a=run.rows, b=d, c=d, n=more, weight=name) for name in ("into", "out"))

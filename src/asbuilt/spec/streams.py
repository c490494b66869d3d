"""Hyper-connections: several residual streams, which each branch reads as one and writes to with learned weights.

Zhu et al. 2024 (arXiv 2409.19606); with doubly stochastic mixing, Xie et al. 2025 (mHC, arXiv 2512.24880).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from asbuilt.spec.part import Part, Pass, Product, Weight, require_number, require_sizes


@dataclass(frozen=True, kw_only=True)
class _Streams(Part):
    """The common fields: weights of the streams are computed from all of them, normalised together."""

    n_streams: int
    """Residual streams."""
    d_model: int
    """Width of each stream."""
    eps: float = 1e-6
    """Added to weights and to the sums that they are divided by."""
    norm_eps: float = 1e-6
    """Added to the mean square of all streams of a token."""

    def __post_init__(self) -> None:
        require_sizes(self, "n_streams", "d_model")
        require_number(self, "eps")
        require_number(self, "norm_eps")

    @property
    def widths(self) -> tuple[int, ...]:
        """Weights of each kind per token."""
        raise NotImplementedError

    def holds(self) -> dict[str, Weight]:
        """fn (weights, n_streams * d_model), base (weights), and one scale for each kind of weights."""
        count = sum(self.widths)
        return {
            "fn": Weight(shape=(count, self.n_streams * self.d_model), role="matrix"),
            "base": Weight(shape=(count,), role="bias"),
            "scale": Weight(shape=(len(self.widths),), role="gain"),
        }

    def shard(self, tensor: int, expert: int = 1) -> Self:
        """Replicated: every device has whole streams."""
        return self

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The weights of the streams, and their weighted sum."""
        wide, count = self.n_streams * self.d_model, sum(self.widths)
        return (
            Product(name="fn", a=run.rows, b=wide, c=count, weight="fn"),
            Product(name="mix", a=1, b=self.n_streams, c=self.d_model, n=run.rows),
        )


@dataclass(frozen=True, kw_only=True)
class HyperConnection(_Streams):
    """A branch reads x = sum of pre_i s_i of its streams s, and they become s_k = post_k y + sum over j of C_jk s_j.

    With z = (fn s / rms(s)) * scale + base, pre = sigmoid(z) + eps, post = 2 sigmoid(z), and C is softmax(z) + eps with
    its columns and rows divided by their sums in turn, `iterations` times (Sinkhorn and Knopp 1967), ending with the
    columns. Weights are computed in float32 or wider.
    """

    iterations: int = 20
    """How often the columns of C are divided by their sums."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes(self, "iterations")

    @property
    def widths(self) -> tuple[int, ...]:
        """pre, post and C."""
        return (self.n_streams, self.n_streams, self.n_streams**2)

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """The weights, the stream that is read, and the mixed streams."""
        n = self.n_streams
        return (*super().multiplies(run), Product(name="mix", a=n, b=n, c=self.d_model, n=run.rows))


@dataclass(frozen=True, kw_only=True)
class StreamMerge(_Streams):
    """Reads the streams after the last block as one: sum of (sigmoid((fn s / rms(s)) * scale + base) + eps)_i s_i."""

    @property
    def widths(self) -> tuple[int, ...]:
        """One weight for each stream."""
        return (self.n_streams,)

"""FLOPs of a piece by what its backward pass needs, and its products one by one, for their time."""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.cost.bill import TRAINING_FACTOR


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One device's products with one weight in a micro-batch, forward: FLOPs, and the numbers of factors and result.

    `gradients` are the products of the same size in the backward pass. `narrow` ones run in fp8 where products do,
    `spread` weights are those of experts. `repeated` tells that torchtitan's list of operations computes it again.
    """

    flops: int
    rows: int
    weights: int
    gradients: int
    narrow: bool = False
    spread: bool = False
    repeated: bool = False
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs of one forward pass by what its backward pass needs: both factors' gradients, or only one's.

    `frozen` are those of one gradient: of weights that are not trained, and of products with the data itself. `alone`
    are those that are computed without gradients, `recomputed` those that a kernel computes again in its backward pass,
    which are among the others.
    """

    trained: int = 0
    frozen: int = 0
    scores: int = 0
    scores_causal: int = 0
    alone: int = 0
    alone_causal: int = 0
    recomputed: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            trained=self.trained + other.trained,
            frozen=self.frozen + other.frozen,
            scores=self.scores + other.scores,
            scores_causal=self.scores_causal + other.scores_causal,
            alone=self.alone + other.alone,
            alone_causal=self.alone_causal + other.alone_causal,
            recomputed=self.recomputed + other.recomputed,
        )

    def times(self, count: int) -> Work:
        """The same for `count` of them."""
        return Work(
            trained=count * self.trained,
            frozen=count * self.frozen,
            scores=count * self.scores,
            scores_causal=count * self.scores_causal,
            alone=count * self.alone,
            alone_causal=count * self.alone_causal,
            recomputed=count * self.recomputed,
        )

    def forward(self, *, causal: bool = True) -> int:
        """One forward pass."""
        scores = self.scores_causal + self.alone_causal if causal else self.scores + self.alone
        return self.trained + self.frozen + scores

    def training(self, *, causal: bool = True) -> int:
        """Forward, backward at twice that, or once for products whose weight is frozen, and what is recomputed."""
        alone = self.alone_causal if causal else self.alone
        trained = TRAINING_FACTOR * self.forward(causal=causal) + self.recomputed
        return trained - self.frozen - (TRAINING_FACTOR - 1) * alone

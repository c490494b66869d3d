"""Two models on one text: the first path at which their activations diverge, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from asbuilt.inspect.taps import activations
from asbuilt.nn.model import Model


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The relative difference of one path's activations: max |a - b| / max finite |b|, None where the shapes differ."""

    path: str
    relative: float | None

    def beyond(self, tolerance: float) -> bool:
        """Returns whether the difference exceeds `tolerance`; different shapes and NaN always do."""
        return self.relative is None or not self.relative <= tolerance


def diff(first: Model, second: Model, tokens_BT: Tensor) -> list[Difference]:
    """Returns the difference at every path that both have, in order of computation, the logits last (path "")."""
    a, b = activations(first, tokens_BT), activations(second, tokens_BT)
    return [Difference(path=path, relative=relative(a[path], b[path])) for path in a if path in b]


def relative(a: Tensor, b: Tensor) -> float | None:
    """Returns max |a - b| / max finite |b|, where equal infinities are equal; None where the shapes differ."""
    if a.shape != b.shape:
        return None
    a, b = a.double(), b.double()
    largest = b.abs().masked_fill(b.isinf(), 0).max().item()
    distance = (a - b).abs().masked_fill(a == b, 0).max().item()  # masked scores are -inf on both sides
    return distance / largest if largest else distance

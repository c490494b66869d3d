"""Language heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asbuilt.nn.linear import Linear, Matrix, PartModule
from asbuilt.nn.registry import computes, optional
from asbuilt.spec import head as spec


@computes(spec.Head, spec.TiedHead)
class Head(PartModule):
    """Logits from its own matrix, or from the embedding's table."""

    weight: Tensor | None
    bias: Tensor | None
    shift: Tensor | None
    project: Linear | None

    def __init__(self, part: spec.Head | spec.TiedHead, path: str) -> None:
        super().__init__(part, path)
        if not part.maps:
            self.project = None
        self.scale, self.softcap = part.scale, part.softcap
        self.format = part.format
        self.transform = optional(part.transform, f"{path}.transform")
        for name in ("weight", "bias"):
            if name not in part.holds():
                self.register_parameter(name, None)
        if not part.shift:
            self.register_buffer("shift", None)

    def forward(self, x: Tensor, table: Matrix | None) -> Tensor:
        """Returns (..., n_vocab); a tied head uses `table`, the embedding's."""
        if self.transform is not None:
            x = self.transform(x)
        if self.project is not None:
            x = self.project(x)
        matrix = table if self.weight is None else Matrix(self.weight, self.format)
        assert matrix is not None, "a tied head needs the embedding's table"
        logits = self.product(x, matrix)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.shift is not None:
            logits = logits + self.shift.to(logits.dtype)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def product(self, x: Tensor, matrix: Matrix) -> Tensor:
        """Returns x W^T + b."""
        return matrix.product(x, self.bias)


@computes(spec.SharedHead)
class SharedHead(PartModule):
    """Logits by the head of the whole model."""

    def forward(self, x: Tensor, whole: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Returns (..., n_vocab), as `whole` makes them: the head of the model."""
        assert whole is not None, "the whole model must share its head"
        return whole(x)

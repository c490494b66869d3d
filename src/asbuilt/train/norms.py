"""Gradient norms and update sizes of a step, by the path of each weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asbuilt.nn.model import Model
from asbuilt.train.optimizer import trainable


@dataclass(frozen=True)
class Norms:
    """Of each trained weight: the norm of its gradient, as clipped, and |update| / |weight|."""

    gradients: dict[str, float]
    updates: dict[str, float]


class Watched:
    """The weights before a step, to compare with those after it."""

    def __init__(self, model: Model) -> None:
        self.held = trainable(model)
        self.before: list[Tensor] = [one.parameter.detach().clone() for one in self.held]

    @torch.no_grad()
    def norms(self) -> Norms:
        """Returns the norms after the step; an update of weights that were all 0 is measured against the new ones."""
        gradients, updates = {}, {}
        for one, before in zip(self.held, self.before, strict=True):
            grad = one.parameter.grad
            gradients[one.path] = 0.0 if grad is None else float(grad.norm())
            size = float(before.norm()) or float(one.parameter.norm())
            updates[one.path] = float((one.parameter - before).norm()) / size if size else 0.0
        return Norms(gradients, updates)

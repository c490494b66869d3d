"""Gradient norms and update sizes of a step, by the path of each weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asbuilt.nn.model import Model
from asbuilt.spec.part import stored_weights
from asbuilt.train.optimizer import trainable
from asbuilt.train.ranks import ALONE, Ranks
from asbuilt.train.step import local


@dataclass(frozen=True)
class Norms:
    """Of each trained weight: the norm of its gradient, as clipped, and |update| / |weight|."""

    gradients: dict[str, float]
    updates: dict[str, float]


class Watched:
    """The weights before a step, of which this process may have parts, to compare with those after it."""

    def __init__(self, model: Model, ranks: Ranks = ALONE) -> None:
        self.held, self.ranks, self.device = trainable(model), ranks, model.device
        self.paths = [path for path, *_ in stored_weights(model.spec)]  # the same on all ranks
        self.before: list[Tensor] = [local(one.parameter.detach()).clone() for one in self.held]

    @torch.no_grad()
    def norms(self) -> Norms:
        """Returns the norms after the step; an update of weights that were all 0 is measured against the new ones."""
        place = {path: i for i, path in enumerate(self.paths)}
        # of each path: how often it is here, and the squares of gradient, update, and weights before and after
        sums = torch.zeros(len(place), 5, dtype=torch.float64, device=self.device)
        for one, before in zip(self.held, self.before, strict=True):
            after, grad = local(one.parameter), one.parameter.grad
            parts = after.new_zeros(()) if grad is None else local(grad), after - before, before, after
            found = [torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts]
            sums[place[one.path]] = torch.stack([torch.ones_like(found[1]), *found]) / self.ranks.copies(one.parameter)
        gradients, updates = {}, {}
        for path, (here, *squares) in zip(self.paths, self.ranks.added(sums).tolist(), strict=True):
            if here:
                gradient, update, old, new = (square**0.5 for square in squares)
                gradients[path] = gradient
                updates[path] = update / size if (size := old or new) else 0.0
        return Norms(gradients, updates)

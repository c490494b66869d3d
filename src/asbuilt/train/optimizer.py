"""PyTorch's optimizers, over groups that follow from the roles the spec declares.

Weight decay pulls matrices towards 0; vectors (gains, biases) and, unless asked otherwise, embedding tables have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from asbuilt.nn.build import built_parameters
from asbuilt.nn.model import Model
from asbuilt.plan.train.optimizers import orthogonal
from asbuilt.spec.part import Role, stored_weights
from asbuilt.train.settings import Optimizer as Settings


class Optimizers:
    """One or more of PyTorch's optimizers that step together, with the peak learning rate of each."""

    def __init__(self, made: Iterable[tuple[torch.optim.Optimizer, float]]) -> None:
        self.made = list(made)

    def step(self, factor: float = 1.0) -> None:
        """Steps them at the peak learning rates times `factor`."""
        for one, peak in self.made:
            for group in one.param_groups:
                group["lr"] = peak * factor
            one.step()

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for one, _ in self.made:
            one.zero_grad(set_to_none=True)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters that are stepped."""
        return [parameter for one, _ in self.made for group in one.param_groups for parameter in group["params"]]


def optimizers(model: Model, given: Settings) -> Optimizers:
    """Returns the optimizers of a model's trainable parameters."""
    held = trainable(model)
    matrices = [one for one in held if given.name == "muon" and one.matrix]
    rest = [one for one in held if one not in matrices]
    made = [(_plain(given, _groups(rest, given)), given.lr)] if rest else []
    if matrices:
        muon = torch.optim.Muon((one.parameter for one in matrices), lr=given.muon_lr, weight_decay=given.weight_decay)
        made.append((muon, given.muon_lr))
    return Optimizers(made)


class Trained(NamedTuple):
    """A parameter that is trained, with the role of its weight, and whether it is a matrix of Muon's."""

    path: str
    parameter: nn.Parameter
    role: Role
    matrix: bool


def trainable(model: Model) -> list[Trained]:
    """Returns the parameters that are trained, in the order of the spec."""
    held = built_parameters(model)
    return [
        Trained(path, held[path], weight.role, held[path].dim() == 2 and orthogonal(weight, owner.kind))
        for path, weight, owner in stored_weights(model.spec)
        if path in held and held[path].requires_grad
    ]


def _groups(held: list[Trained], given: Settings) -> list[dict[str, object]]:
    """Returns the groups with and without weight decay."""
    decayed = [one.parameter for one in held if one.role in given.decayed]
    others = [one.parameter for one in held if one.role not in given.decayed]
    groups = ({"params": decayed, "weight_decay": given.weight_decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def _plain(given: Settings, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    if given.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=given.lr)
    if given.name == "sgd":
        return torch.optim.SGD(groups, lr=given.lr, momentum=given.betas[0])
    return torch.optim.AdamW(groups, lr=given.lr, betas=given.betas, eps=given.eps, fused=True)

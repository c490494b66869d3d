"""PyTorch's optimizers, over groups that follow from the roles the spec declares.

Weight decay pulls matrices towards 0; vectors (gains, biases) and, unless asked otherwise, embedding tables have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from asbuilt.errors import InputError, one_of
from asbuilt.nn.build import built_parameters
from asbuilt.nn.model import Model
from asbuilt.spec.part import Role, Weight, stored_weights

Name = Literal["adamw", "adafactor", "muon", "sgd"]
NAMES: tuple[Name, ...] = get_args(Name)
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Which optimizer, and its numbers; those that it does not have are left unused."""

    name: Name = "adamw"
    """adamw, adafactor, sgd, or muon: Muon for the matrices of the blocks and AdamW for all else."""
    lr: float = 1e-3
    """Peak learning rate, which the schedule multiplies."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of both moments; the first is SGD's momentum."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay, times the learning rate, of the weights that have it."""
    decayed: tuple[Role, ...] = ("matrix",)
    """Roles of the weights that have weight decay: matrix, table, gain, bias."""
    muon_lr: float = 0.02
    """Muon's peak learning rate; 0.02 suits its orthogonal updates."""
    clip: float = 1.0
    """Gradients of a larger norm are scaled to this one; 0 never clips."""

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise InputError(field="optimizer.name", value=self.name, allowed=one_of(NAMES))
        for role in self.decayed:
            if role not in ROLES:
                raise InputError(field="optimizer.decayed", value=role, allowed=one_of(ROLES))
        for name in ("lr", "muon_lr", "eps", "weight_decay", "clip"):
            value = getattr(self, name)
            if not 0.0 <= value < 1e6:
                raise InputError(field=f"optimizer.{name}", value=value, allowed="a number of at least 0")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise InputError(field="optimizer.betas", value=self.betas, allowed="two numbers from 0 to below 1")


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


def optimizers(model: Model, given: Optimizer) -> Optimizers:
    """Returns the optimizers of a model's trainable parameters."""
    held = trainable(model)
    matrices, rest = (), held
    if given.name == "muon":
        matrices = [one for one in held if _is_matrix(*one)]
        rest = [one for one in held if not _is_matrix(*one)]
    made = [(_plain(given, _groups(rest, given)), given.lr)] if rest else []
    if matrices:
        params = [parameter for _, parameter, _ in matrices]
        made.append((torch.optim.Muon(params, lr=given.muon_lr, weight_decay=given.weight_decay), given.muon_lr))
    return Optimizers(made)


def trainable(model: Model) -> list[tuple[str, nn.Parameter, Weight]]:
    """Returns the parameters that are trained: path, parameter, and the weight that the spec declares."""
    held = built_parameters(model)
    return [
        (path, held[path], weight)
        for path, weight, _ in stored_weights(model.spec)
        if path in held and held[path].requires_grad
    ]


def _is_matrix(path: str, parameter: nn.Parameter, weight: Weight) -> bool:
    return weight.role == "matrix" and parameter.dim() == 2 and path.startswith(("blocks.", "encoder.blocks."))


def _groups(held: list[tuple[str, nn.Parameter, Weight]], given: Optimizer) -> list[dict[str, object]]:
    """Returns the groups with and without weight decay."""
    decayed = [parameter for _, parameter, weight in held if weight.role in given.decayed]
    others = [parameter for _, parameter, weight in held if weight.role not in given.decayed]
    groups = ({"params": decayed, "weight_decay": given.weight_decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def _plain(given: Optimizer, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    if given.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=given.lr)
    if given.name == "sgd":
        return torch.optim.SGD(groups, lr=given.lr, momentum=given.betas[0])
    return torch.optim.AdamW(groups, lr=given.lr, betas=given.betas, eps=given.eps, fused=True)

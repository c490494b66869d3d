"""PyTorch's optimizers, over groups that follow from the roles the spec declares.

Weight decay pulls matrices towards 0; vectors (gains, biases) and, unless asked otherwise, embedding tables have none.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from asbuilt.nn.build import built_parameters
from asbuilt.nn.model import Model
from asbuilt.spec.part import Weight, stored_weights
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


def _groups(held: list[tuple[str, nn.Parameter, Weight]], given: Settings) -> list[dict[str, object]]:
    """Returns the groups with and without weight decay."""
    decayed = [parameter for _, parameter, weight in held if weight.role in given.decayed]
    others = [parameter for _, parameter, weight in held if weight.role not in given.decayed]
    groups = ({"params": decayed, "weight_decay": given.weight_decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def _plain(given: Settings, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    if given.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=given.lr)
    if given.name == "sgd":
        return torch.optim.SGD(groups, lr=given.lr, momentum=given.betas[0])
    return torch.optim.AdamW(groups, lr=given.lr, betas=given.betas, eps=given.eps, fused=True)

"""PyTorch's optimizers, over groups that follow from the roles the spec declares.

Weight decay pulls matrices towards 0; vectors (gains, biases) and, unless asked otherwise, embedding tables have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asbuilt.errors import InputError, one_of
from asbuilt.nn.build import built_parameters
from asbuilt.nn.model import Model
from asbuilt.plan.train.optimizers import orthogonal
from asbuilt.spec.part import Role, stored_weights
from asbuilt.train.device import HOST
from asbuilt.train.eight_bit import AdamW8bit
from asbuilt.train.offload import Offloaded
from asbuilt.train.settings import Optimizer as Settings
from asbuilt.train.width import Scales, scales

ADAM = ("adamw", "adamw-8bit")


class Optimizers:
    """One or more of PyTorch's optimizers that step together, with the peak learning rate of each.

    If they are `offloaded`, they step on its copies of the model's parameters.
    """

    def __init__(self, made: Iterable[tuple[torch.optim.Optimizer, float]], offloaded: Offloaded | None = None) -> None:
        self.made, self.offloaded = list(made), offloaded

    def step(self, factor: float = 1.0, excess: Tensor | None = None) -> None:
        """Steps them at the peak learning rates times `factor`, after dividing the gradients by `excess`, if given.

        A fused kernel divides as it reads them, and writes them back: one pass over all gradients less.
        """
        if self.offloaded is not None:
            self.offloaded.bring()
        for one, peak in self.made:
            for group in one.param_groups:
                group["lr"] = peak * group.get("scale", 1.0) * factor
            if excess is None:
                one.step()
            else:
                _step_divided(one, excess if self.offloaded is None else excess.to(HOST))
        if self.offloaded is not None:
            self.offloaded.give()

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of the model that are trained."""
        stepped = [parameter for one, _ in self.made for group in one.param_groups for parameter in group["params"]]
        return stepped if self.offloaded is None else [self.offloaded.originals[one] for one in stepped]

    def states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yields the model's parameters that have a state, with it."""
        for one, _ in self.made:
            for stepped, state in one.state.items():
                yield self._original(stepped), state

    def restore(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Puts states back, by the model's parameters, whose weights have been put back already."""
        if self.offloaded is not None:
            self.offloaded.read()
        for one, _ in self.made:
            for group in one.param_groups:
                for stepped in group["params"]:
                    state = states.get(self._original(stepped), {})
                    one.state[stepped] = _placed(state, stepped.device, bool(group.get("fused")))

    def _original(self, stepped: Tensor) -> Tensor:
        return stepped if self.offloaded is None else self.offloaded.originals[stepped]


def _placed(state: Mapping[str, Any], device: torch.device, fused: bool) -> dict[str, Any]:
    """Returns a state on a device; the number of steps stays on the host, unless a fused kernel counts them."""
    return {
        name: value.to(device) if isinstance(value, Tensor) and (fused or name != "step") else value
        for name, value in state.items()
    }


def _step_divided(one: torch.optim.Optimizer, excess: Tensor) -> None:
    if one.defaults.get("fused"):
        one.grad_scale = excess  # pyright: ignore[reportAttributeAccessIssue]  # as torch.amp.GradScaler sets it
        try:
            one.step()
        finally:
            del one.grad_scale  # pyright: ignore[reportAttributeAccessIssue]
        return
    for group in one.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.div_(excess)
    one.step()


def optimizers(model: Model, given: Settings, base_width: int = 0, *, offload: bool = False) -> Optimizers:
    """Returns the optimizers of a model's trainable parameters, with muP from a base width, if there is one.

    With `offload` their state lies in host memory, and they step there.
    """
    if base_width and given.name not in ADAM:
        raise InputError("muP's scales are Adam's", field="optimizer.name", value=given.name, allowed=one_of(ADAM))
    held, offloaded = trainable(model), None
    if offload:
        offloaded = Offloaded(one.parameter for one in held)
        held = [one._replace(parameter=offloaded.copies[one.parameter]) for one in held]
    scaled = scales(model.spec, base_width)
    matrices = [one for one in held if given.name == "muon" and one.matrix]
    rest = [one for one in held if one not in matrices]
    made = [(_plain(given, _groups(rest, given, scaled)), given.lr)] if rest else []
    if matrices:
        muon = torch.optim.Muon((one.parameter for one in matrices), lr=given.muon_lr, weight_decay=given.weight_decay)
        made.append((muon, given.muon_lr))
    return Optimizers(made, offloaded)


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


def _groups(held: list[Trained], given: Settings, scaled: Mapping[str, Scales]) -> list[dict[str, object]]:
    """Returns the groups of parameters with equal weight decay and scale of the learning rate.

    Decay is multiplied by the learning rate: a scaled one decays as much a step as one that is not. Parameters that
    other ranks divide are in other groups, since one operation updates a group's.
    """
    found: dict[tuple[float, float, object], list[nn.Parameter]] = {}
    for one in held:
        scale = scaled[one.path].lr
        decay = given.weight_decay / scale if one.role in given.decayed else 0.0
        mesh = getattr(one.parameter, "device_mesh", None)
        found.setdefault((decay, scale, mesh), []).append(one.parameter)
    ordered = sorted(found.items(), key=lambda each: -each[0][0])
    return [{"params": held, "weight_decay": decay, "scale": scale} for (decay, scale, _), held in ordered]


def _plain(given: Settings, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    if given.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=given.lr)
    if given.name == "sgd":
        return torch.optim.SGD(groups, lr=given.lr, momentum=given.betas[0])
    if given.name == "adamw-8bit":
        return AdamW8bit(groups, lr=given.lr, betas=given.betas, eps=given.eps)
    return torch.optim.AdamW(groups, lr=given.lr, betas=given.betas, eps=given.eps, fused=True)

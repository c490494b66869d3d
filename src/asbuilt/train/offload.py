"""Optimizer state in host memory: the optimizer steps on copies of the weights there (arXiv 2101.06840).

The gradients are copied to the host before a step, and the weights back after it, as `plan train --offload optimizer`
counts. What an optimizer makes for a copy, its state, lies where the copy does. The step is that of an optimizer on a
model in host memory, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asbuilt.errors import InputError
from asbuilt.train.device import HOST


class Offloaded:
    """Copies of a model's parameters on the host, with room for their gradients; pinned where a device is beside it.

    A parameter that ranks divide has a copy of this rank's part, divided as it is.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.pairs = [(parameter, _copied(parameter)) for parameter in parameters]
        self._gradients = [_on_host(copy) for _, copy in self.pairs]
        self.copies: dict[Tensor, nn.Parameter] = dict(self.pairs)
        self.originals: dict[Tensor, nn.Parameter] = {copy: parameter for parameter, copy in self.pairs}

    @torch.no_grad()
    def bring(self) -> None:
        """Copies the gradients to the host."""
        for (parameter, copy), room in zip(self.pairs, self._gradients, strict=True):
            copy.grad = None if parameter.grad is None else room
            if parameter.grad is not None:
                _own(room).copy_(_own(parameter.grad))

    @torch.no_grad()
    def give(self) -> None:
        """Copies the weights to their device."""
        for parameter, copy in self.pairs:
            _own(parameter).copy_(_own(copy))

    @torch.no_grad()
    def read(self) -> None:
        """Copies the weights from their device, where they have been changed."""
        for parameter, copy in self.pairs:
            _own(copy).copy_(_own(parameter))


def require_apart(device: torch.device) -> None:
    """Raises InputError for a device whose memory is the host's."""
    if device.type == HOST.type:
        raise InputError(
            "this run is on the processor, whose memory is the host's: nothing would be saved",
            field="step.offload",
            value=True,
            allowed="false",
            fix="leave it out; optimizer.name=adamw-8bit takes less memory; run.device=cuda where there is a GPU",
        )


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    made = _on_host(parameter)
    with torch.no_grad():
        _own(made).copy_(_own(parameter))
    return nn.Parameter(made)


def _on_host(like: Tensor) -> Tensor:
    """Returns room on the host for this rank's part of a tensor, described as the tensor is."""
    own = _own(like.detach())
    pinned = own.device.type != HOST.type and torch.accelerator.is_available()
    made = torch.empty(own.shape, dtype=own.dtype, device=HOST, pin_memory=pinned)
    return DTensor(made, like._spec, requires_grad=False) if isinstance(like, DTensor) else made


def _own(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, of which it is a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

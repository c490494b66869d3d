"""Linear maps, and several maps of one input kept side by side in memory so that inference multiplies them at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from asbuilt.kernels.rows import linear
from asbuilt.spec import linear as spec
from asbuilt.spec.part import Part, Weight


class Linear(nn.Module):
    """x W^T + b, with whatever of W and b is registered."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x W^T + b."""
        return linear(x, self.weight, self.bias)

    def matrix(self) -> Tensor:
        """Returns W (d_out, d_in) of x W^T + b."""
        return self.weight


class Lora(Linear):
    """x W^T + b + scale (x A^T) B^T."""

    lora_a: Tensor
    lora_b: Tensor

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Returns the map with its adapter."""
        return super().forward(x) + linear(linear(x, self.lora_a), self.lora_b) * self.scale

    def matrix(self) -> Tensor:
        """Returns W + scale B A."""
        return self.weight + self.lora_b @ self.lora_a * self.scale


def of_map(part: spec.Map) -> Linear:
    """Returns the module of a linear map, its parameters uninitialised."""
    made = Linear() if isinstance(part, spec.Linear) else Lora(part.scale)
    for name, weight in part.holds().items():
        made.register_parameter(name, parameter(weight))
    return made


def parameter(weight: Weight) -> nn.Parameter:
    """Returns an empty parameter."""
    return nn.Parameter(torch.empty(weight.shape), requires_grad=weight.learned and not weight.frozen)


def hooked(*maps: nn.Module) -> bool:
    """Whether one of the modules has a hook of its own, so that it has to be called.

    Hooks for all modules do not count: profilers and FLOP counters set them, and are to see what usually runs.
    """
    return any(m._forward_hooks or m._forward_pre_hooks for m in maps)


class FusedLinears:
    """Linear maps of one input whose parameters are views of one piece of memory: one product instead of several.

    Autograd gives gradients to the parameters, not to the piece, so training multiplies one by one; so does whatever
    finds a parameter no longer in its place (loaded by assignment, sharded, deep-copied), a hook on one of the maps, or
    one that is not plain.
    """

    def __init__(self, *maps: Linear) -> None:
        self.maps = maps
        self.plain = all(type(m) is Linear for m in maps)
        self.sizes = [len(m.weight) for m in maps]
        self.join()

    def join(self) -> None:
        """Lays the maps' present parameters into one new piece each for weights and biases."""
        if not self.plain:
            return
        self.weight = self._piece([m.weight for m in self.maps])
        biases = [m.bias for m in self.maps if m.bias is not None]
        self.bias = self._piece(biases) if biases else None
        self.places = [m.weight.data_ptr() for m in self.maps]

    @staticmethod
    @torch.no_grad()
    def _piece(parameters: list[Tensor]) -> Tensor:
        piece = torch.cat(parameters)
        for parameter, view in zip(parameters, piece.split([len(p) for p in parameters]), strict=True):
            parameter.data = view
        return piece

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns each map's result."""
        side_by_side = self.joined(x)
        return tuple(m(x) for m in self.maps) if side_by_side is None else side_by_side.split(self.sizes, -1)

    def joined(self, x: Tensor) -> Tensor | None:
        """Returns all results in one tensor, None where the maps have to be multiplied one by one."""
        if not self.plain or torch.is_grad_enabled() or hooked(*self.maps):
            return None
        if [m.weight.data_ptr() for m in self.maps] != self.places:
            return None
        return linear(x, self.weight, self.bias)


class PartModule(nn.Module):
    """A module that is one part: it makes the part's weights, empty, under their own names, and its buffers, of zeros.

    Buffers are float32 or wider: they are few, and what they decide should not depend on the dtype of the weights.
    """

    def __init__(self, part: Part, path: str) -> None:
        super().__init__()
        self.path = path
        self._together: list[FusedLinears] = []
        for name, weight in part.holds().items():
            owner, _, leaf = name.rpartition(".")
            (self._map(owner) if owner else self).register_parameter(leaf, parameter(weight))
        for name, child in part.children():
            if isinstance(child, spec.Map):
                self.add_module(name, of_map(child))
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        for name, buffer in part.buffers().items():
            self.register_buffer(name, torch.zeros(buffer.shape, dtype=wide))

    def _map(self, name: str) -> nn.Module:
        if name not in self._modules:
            self.add_module(name, Linear())
        return self.get_submodule(name)

    def fused(self, *maps: Linear) -> FusedLinears:
        """Returns the maps laid together, and keeps them so when the module changes dtype or device."""
        self._together.append(FusedLinears(*maps))
        return self._together[-1]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PartModule:
        super()._apply(fn, recurse)
        for group in self._together:
            group.join()
        return self

"""Linear maps: plain, clipped, packed or with an adapter; and fused maps, whose weights are contiguous in memory.

Inference computes fused maps as one product, and so does training where one tensor of their outputs is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asbuilt.errors import InputError, one_of
from asbuilt.kernels import packed
from asbuilt.kernels.native import INTERLEAVED
from asbuilt.kernels.rows import linear
from asbuilt.spec import linear as spec
from asbuilt.spec.part import Part, Weight


class Linear(nn.Module):
    """x W^T + b, with the registered W and b; with a `format` W is packed, and dequantised for each product.

    A `clipped` one clamps x and the result to its buffers.
    """

    weight: Tensor
    bias: Tensor | None
    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(self, format: str | None = None, clipped: bool = False) -> None:
        super().__init__()
        self.format, self.clipped = format, clipped
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x W^T + b, from x clamped and clamped itself if the map is clipped."""
        if not self.clipped:
            return self.product(x)
        made = self.product(x.clamp(self.input_min, self.input_max))
        return made.clamp(self.output_min, self.output_max)

    def product(self, x: Tensor) -> Tensor:
        """Returns x W^T + b."""
        if self.format is None:
            return linear(x, self.weight, self.bias)
        return packed.linear(x, self.weight, self.bias, format=self.format)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Returns W (d_out, d_in) of x W^T + b, dequantised to `dtype` if packed."""
        return self.weight if self.format is None else packed.expand(self.weight, self.format, dtype)


class Lora(Linear):
    """x W^T + b + scale (x A^T) B^T."""

    lora_a: Tensor
    lora_b: Tensor

    def __init__(self, scale: float, format: str | None = None, clipped: bool = False) -> None:
        super().__init__(format, clipped)
        self.scale = scale

    def product(self, x: Tensor) -> Tensor:
        """Returns the output of the map and its adapter."""
        return super().product(x) + linear(linear(x, self.lora_a), self.lora_b) * self.scale

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Returns W + scale B A."""
        return super().matrix(dtype) + self.lora_b @ self.lora_a * self.scale


class Matrix(NamedTuple):
    """A matrix for lookups or products, plain or packed: an embedding's table, a head's matrix."""

    weight: Tensor
    format: str | None = None

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns rows (*index.shape, width), dequantised to `dtype` if packed."""
        return packed.look_up(index, self.weight, self.format, dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns x W^T + b."""
        return packed.linear(x, self.weight, bias, format=self.format)


def of_map(part: spec.Map) -> Linear:
    """Returns the module of a linear map, its parameters uninitialised."""
    clipped = part.plain.clipped
    made = Lora(part.scale, part.format, clipped) if isinstance(part, spec.Lora) else Linear(part.format, clipped)
    for name, weight in part.holds().items():
        made.register_parameter(name, parameter(weight))
    register_buffers(made, part)
    return made


def register_buffers(module: nn.Module, part: Part) -> None:
    """Registers the part's buffers, filled as declared: whole numbers, or float32 or wider.

    They are small, and their effect should not depend on the dtype of the weights.
    """
    wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
    for name, buffer in part.buffers().items():
        dtype = torch.int64 if buffer.whole else wide
        module.register_buffer(name, torch.full(buffer.shape, buffer.fill, dtype=dtype))


def parameter(weight: Weight) -> nn.Parameter:
    """Returns an empty parameter, of bytes if packed. Raises InputError for an unsupported block format."""
    if weight.format is None:
        return nn.Parameter(torch.empty(weight.shape), requires_grad=weight.learned and not weight.frozen)
    if weight.format not in packed.EXPANDED:
        raise InputError(
            "not supported for computing", field="format", value=weight.format, allowed=one_of(packed.EXPANDED)
        )
    return nn.Parameter(torch.empty(weight.stored_shape, dtype=torch.uint8), requires_grad=False)


def hooked(*maps: nn.Module) -> bool:
    """Returns whether one of the modules has its own hook, so that it must be called.

    Global module hooks do not count: profilers and FLOP counters set them, and should see what normally runs.
    """
    return any(m._forward_hooks or m._forward_pre_hooks for m in maps)


class FusedLinears:
    """Linear maps with the same input whose parameters are views of one tensor: one product instead of several.

    The maps are computed one by one if a parameter is no longer a view (loaded by assignment, sharded, deep-copied), if
    one of the maps has a hook, if one is not plain, and in training also if one is frozen or only some have a bias.
    """

    def __init__(self, *maps: Linear) -> None:
        self.maps = maps
        self.plain = all(type(m) is Linear and m.format is None and not m.clipped for m in maps)
        self.sizes = [len(m.weight) for m in maps]
        self.join(empty=True)

    def join(self, *, empty: bool = False) -> None:
        """Copies the maps' current parameters into one new tensor each for weights and biases; not `empty` weights."""
        if not self.plain:
            return
        self.weight = self._piece([m.weight for m in self.maps], empty=empty)
        biases = [m.bias for m in self.maps]  # of a map without one the piece has zeros
        none = all(bias is None for bias in biases)
        zeros = [self.weight.new_zeros(size) for size in self.sizes]
        self.bias = None if none else self._piece([z if b is None else b for b, z in zip(biases, zeros, strict=True)])
        self.places = [m.weight.data_ptr() for m in self.maps]

    @torch.no_grad()
    def separate(self) -> None:
        """Gives each map tensors of its own again, for good."""
        if self.plain:
            for one in self.maps:
                for parameter in one.parameters(recurse=False):
                    parameter.data = parameter.detach().clone()
            self.plain, self.weight, self.bias = False, torch.empty(0), None

    @staticmethod
    @torch.no_grad()
    def _piece(parameters: list[Tensor], *, empty: bool = False) -> Tensor:
        size = (sum(map(len, parameters)), *parameters[0].shape[1:])
        piece = parameters[0].new_empty(size) if empty else torch.cat(parameters)
        for parameter, view in zip(parameters, piece.split([len(p) for p in parameters]), strict=True):
            parameter.data = view
        return piece

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns each map's output; in training of a product each, as the gradients of views would be joined first."""
        side_by_side = None if torch.is_grad_enabled() else self.joined(x)
        if side_by_side is not None:
            return side_by_side.split(self.sizes, -1)
        made = self.packed(x) if not self.plain else None
        return tuple(m(x) for m in self.maps) if made is None else tuple(made)

    def packed(self, x: Tensor) -> list[Tensor] | None:
        """Returns each map's output of interleaved weights, x rounded once; None if the maps must be called."""
        if any(type(m) is not Linear or m.clipped or not (m.format or "").endswith(INTERLEAVED) for m in self.maps):
            return None
        return None if hooked(*self.maps) else packed.products(x, [(m.weight, m.format, m.bias) for m in self.maps])

    def joined(self, x: Tensor) -> Tensor | None:
        """Returns all outputs in one tensor, None if the maps must be computed one by one."""
        if not self.plain or hooked(*self.maps) or torch.compiler.is_compiling():  # which knows no addresses
            return None
        if [m.weight.data_ptr() for m in self.maps] != self.places:
            return None
        if not torch.is_grad_enabled():
            return linear(x, self.weight, self.bias)
        held = [m.weight for m in self.maps], [m.bias for m in self.maps if m.bias is not None]
        if not all(one.requires_grad for one in (*held[0], *held[1])) or len(held[1]) not in (0, len(self.maps)):
            return None
        bias = None if self.bias is None else Together.apply(self.bias, *held[1])
        return linear(x, Together.apply(self.weight, *held[0]), bias)  # type: ignore[arg-type]


class Together(torch.autograd.Function):
    """The tensor of which the parameters are views; its gradient is divided among them, by rows."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, *parameters: Tensor) -> Tensor:  # noqa: ANN401, D102
        ctx.sizes = [len(one) for one in parameters]
        return whole.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401, D102  # pyright: ignore[reportIncompatibleMethodOverride]
        return (None, *d.split(ctx.sizes))


class PartModule(nn.Module):
    """The module of one part: creates the part's weights, empty, under their own names, and its buffers, filled."""

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
        register_buffers(self, part)

    def _map(self, name: str) -> nn.Module:
        if name not in self._modules:
            self.add_module(name, Linear())
        return self.get_submodule(name)

    def fused(self, *maps: Linear) -> FusedLinears:
        """Returns the fused maps, which stay fused when the module changes dtype or device."""
        self._together.append(FusedLinears(*maps))
        return self._together[-1]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PartModule:
        super()._apply(fn, recurse)
        for group in self._together:
            group.join()
        return self

"""Convolutions over tokens; of causal ones, with a sequence's last inputs in the cache.

Shapes: batch B, new tokens T, channels C, taps K.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels import convolution
from asbuilt.nn.cache import StateCache
from asbuilt.nn.encoder import pooler_activation
from asbuilt.nn.linear import PartModule
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import convolution as spec


@computes(spec.ShortConvolution)
class ShortConvolution(PartModule):
    """A sum of each channel's last inputs, with an activation.

    Padding counts as zeros before a text and is never stored: a ragged batch is computed with each row's valid tokens
    moved together.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, part: spec.ShortConvolution, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        if not part.bias:
            self.register_parameter("bias", None)

    def forward(self, x_BTC: Tensor, step: Step) -> Tensor:
        """Returns (B, T, C)."""
        keeps = step.cache is not None and bool(self.part.remembers())
        layer = step.cache.layer(self.path, StateCache) if step.cache is not None and keeps else None
        before = None if layer is None or not any(step.past) else layer.read()[0]
        if step.tokens == 1 and step.valid_BT is None and layer is not None and before is not None:
            return self.one(x_BTC, before, layer)
        valid = step.valid_BT
        if valid is None:
            return self.many(x_BTC, before, layer, None)
        order, places, counts = step.once("valid tokens first", lambda: together(valid))
        moved = self.many(_rows(x_BTC, order), before, layer, counts)
        return _rows(moved, places)

    def many(self, x_BTC: Tensor, before: Tensor | None, layer: StateCache | None, counts: Tensor | None) -> Tensor:
        """Returns the outputs of several tokens; of row b the first `counts[b]` are valid, all if None."""
        y = convolution.convolve(x_BTC, self.weight[:, 0], self.bias, before, silu=self.part.activation == "silu")
        if layer is not None:
            layer.write((convolution.last_inputs(x_BTC, before, counts, self.part.kernel - 1),))
        return y

    def one(self, x_B1C: Tensor, before: Tensor, layer: StateCache) -> Tensor:
        """Returns the output of one token."""
        silu = self.part.activation == "silu"
        y, after = convolution.step(x_B1C[:, 0], self.weight[:, 0], self.bias, before, silu=silu)
        layer.write((after,))
        return y[:, None]


@computes(spec.CausalConvolution)
class CausalConvolution(PartModule):
    """A product with each token's last inputs, padding as in short ones."""

    taps: Tensor
    bias: Tensor | None

    def __init__(self, part: spec.CausalConvolution, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        if not part.bias:
            self.register_parameter("bias", None)

    def forward(self, x_BTC: Tensor, step: Step) -> Tensor:
        """Returns (B, T, C)."""
        reach, valid = self.part.reach, step.valid_BT
        layer = step.cache.layer(self.path, StateCache) if step.cache is not None and reach else None
        before = None if layer is None or not any(step.past) else layer.read()[0].to(x_BTC.dtype)
        counts = places = None
        if valid is not None:
            order, places, counts = step.once("valid tokens first", lambda: together(valid))
            x_BTC = _rows(x_BTC, order)
        y = convolution.full(x_BTC, self.taps, self.bias, before, self.part.dilation)
        if layer is not None:
            layer.write((convolution.last_inputs(x_BTC, before, counts, reach),))
        return y if places is None else _rows(y, places)


@computes(spec.CentredConvolution)
class CentredConvolution(PartModule):
    """An activated product with each token's inputs on both sides, of which padding counts as zeros."""

    taps: Tensor
    bias: Tensor

    def __init__(self, part: spec.CentredConvolution, path: str) -> None:
        super().__init__(part, path)
        self.reach, self.activation = part.kernel // 2, pooler_activation(part.activation)

    def forward(self, x_BTC: Tensor, step: Step) -> Tensor:
        """Returns (B, T, C)."""
        x_BTC = x_BTC if step.valid_BT is None else x_BTC * step.valid_BT[..., None]
        near_BTK = F.pad(x_BTC, (0, 0, self.reach, self.reach)).unfold(1, 2 * self.reach + 1, 1).flatten(2)
        y_BTC = F.linear(near_BTK, self.taps.flatten(1), self.bias)
        del near_BTK
        return convolution.activated(y_BTC, self.activation)


def together(valid_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the order (B, T) with each row's valid tokens first, the place of each token in it, and their counts."""
    order = (~valid_BT).int().argsort(dim=1, stable=True)
    return order, order.argsort(1), valid_BT.sum(1, keepdim=True)


def _rows(x_BTC: Tensor, order_BT: Tensor) -> Tensor:
    """Returns the tokens of each row in another order."""
    return x_BTC.gather(1, order_BT[:, :, None].expand_as(x_BTC))

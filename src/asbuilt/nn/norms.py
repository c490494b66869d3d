"""LayerNorm and RMSNorm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from asbuilt.kernels.norm import rms_norm
from asbuilt.nn.linear import PartModule
from asbuilt.nn.registry import computes
from asbuilt.spec import norms as spec


@computes(spec.RMSNorm)
class RMSNorm(PartModule):
    """x / sqrt(mean(x^2) + eps) * gain."""

    weight: Tensor | None

    def __init__(self, part: spec.RMSNorm, path: str) -> None:
        super().__init__(part, path)
        self.d, self.eps, self.offset = part.d, part.eps, part.gain == "offset"
        if part.gain == "none":
            self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x normalised over its last dimension."""
        return rms_norm(x, self.weight, self.eps, offset=self.offset)


@computes(spec.LayerNorm)
class LayerNorm(PartModule):
    """(x - mean) / sqrt(var + eps) * weight + bias."""

    weight: Tensor

    def __init__(self, part: spec.LayerNorm, path: str) -> None:
        super().__init__(part, path)
        self.d, self.eps = part.d, part.eps
        for name in ("weight", "bias"):
            if name not in part.holds():
                self.register_parameter(name, None)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x normalised over its last dimension."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)  # type: ignore[arg-type]


@computes(spec.HeadNorm)
class HeadNorm(PartModule):
    """(x - mean) / sqrt(var + eps) * weight + bias, of heads (..., H, D)."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, part: spec.HeadNorm, path: str) -> None:
        super().__init__(part, path)
        self.d, self.eps = part.d, part.eps
        if not part.bias:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x normalised over its last dimension, times the gains of its heads, plus their biases."""
        scaled = F.layer_norm(x, (self.d,), eps=self.eps) * self.weight
        return scaled if self.bias is None else scaled + self.bias


@computes(spec.SoftplusScale)
class SoftplusScale(PartModule):
    """x * log(1 + e^weight)."""

    weight: Tensor

    def __init__(self, part: spec.SoftplusScale, path: str) -> None:
        super().__init__(part, path)
        self.d = part.d

    def forward(self, x: Tensor) -> Tensor:
        """Returns x times the factors of its last dimension."""
        return x * F.softplus(self.weight)


def normed(norm: nn.Module | None, heads: Tensor) -> Tensor:
    """Returns (B, T, H, D) normalised per head, or over all heads together if the norm is that wide."""
    if norm is None:
        return heads
    per_head = norm.d == heads.shape[-1]
    return norm(heads) if per_head else norm(heads.flatten(2)).view(heads.shape)

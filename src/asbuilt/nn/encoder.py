"""Parts of encoders other than blocks: token types, the map of a narrow embedding, the transform before
masked-language-model logits, the pooler.

Shapes: batch B, new tokens T, width of embeddings E, model width M.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.nn.feedforward import ACTIVATIONS
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes
from asbuilt.spec import encoder as spec


@computes(spec.TypeEmbedding)
class TypeEmbedding(PartModule):
    """Looks up one row per token's type."""

    weight: Tensor

    def forward(self, types_BT: Tensor) -> Tensor:
        """Returns (B, T, M)."""
        return F.embedding(types_BT, self.weight)


@computes(spec.EmbeddingProjection)
class EmbeddingProjection(PartModule):
    """x W^T + b."""

    dense: Linear

    def forward(self, x_BTE: Tensor) -> Tensor:
        """Returns (B, T, M)."""
        return self.dense(x_BTE)


@computes(spec.HeadTransform)
class HeadTransform(PartModule):
    """LayerNorm(activation(x W^T + b))."""

    dense: Linear
    norm: Linear  # has the norm's gain and bias

    def __init__(self, part: spec.HeadTransform, path: str) -> None:
        super().__init__(part, path)
        self.width, self.eps, self.activation = part.width, part.eps, ACTIVATIONS[part.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Returns (..., d_out)."""
        x = self.activation(self.dense(x))
        return F.layer_norm(x, (self.width,), self.norm.weight, self.norm.bias, self.eps)


def pooler_activation(name: spec.PoolerActivation) -> Callable[[Tensor], Tensor]:
    """Returns the function of this name."""
    return torch.tanh if name == "tanh" else ACTIVATIONS[name]


@computes(spec.Pooler)
class Pooler(PartModule):
    """activation(x W^T + b)."""

    dense: Linear

    def __init__(self, part: spec.Pooler, path: str) -> None:
        super().__init__(part, path)
        self.activation = pooler_activation(part.activation)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (..., M)."""
        return self.activation(self.dense(x))

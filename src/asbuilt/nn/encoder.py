"""Parts of encoders other than blocks: token types, the transform before masked-language-model logits, the pooler."""

from __future__ import annotations

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


@computes(spec.HeadTransform)
class HeadTransform(PartModule):
    """LayerNorm(activation(x W^T + b))."""

    dense: Linear
    norm: Linear  # has the norm's gain and bias

    def __init__(self, part: spec.HeadTransform, path: str) -> None:
        super().__init__(part, path)
        self.d_model, self.eps, self.activation = part.d_model, part.eps, ACTIVATIONS[part.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Returns (..., M)."""
        x = self.activation(self.dense(x))
        return F.layer_norm(x, (self.d_model,), self.norm.weight, self.norm.bias, self.eps)


@computes(spec.Pooler)
class Pooler(PartModule):
    """activation(x W^T + b)."""

    dense: Linear

    def __init__(self, part: spec.Pooler, path: str) -> None:
        super().__init__(part, path)
        self.activation = torch.tanh if part.activation == "tanh" else ACTIVATIONS[part.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Returns (..., M)."""
        return self.activation(self.dense(x))

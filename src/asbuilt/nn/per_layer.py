"""Per-layer embeddings: a vector for every token and block, and the branch that reads it.

Shapes: batch B, new tokens T, blocks L, model width M, width of a block's vector P.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asbuilt.nn.embedding import scaled
from asbuilt.nn.feedforward import ACTIVATIONS
from asbuilt.nn.linear import Linear, Matrix, PartModule
from asbuilt.nn.registry import computes, module
from asbuilt.nn.step import Step
from asbuilt.spec import per_layer as spec


@computes(spec.PerLayerEmbedding)
class PerLayerEmbedding(PartModule):
    """Looks up one row per token, and adds the projected stream."""

    weight: Tensor
    project: Linear

    def __init__(self, part: spec.PerLayerEmbedding, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.norm = module(part.norm, f"{path}.norm")

    def forward(self, tokens_BT: Tensor, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, L, P)."""
        part = self.part
        known_BT = torch.where(tokens_BT < part.n_vocab, tokens_BT, 0)
        rows = scaled(Matrix(self.weight, part.format).rows(known_BT, step.dtype), part.scale)
        projected = self.project(x_BTM) * part.project_scale
        shape = (*tokens_BT.shape, part.n_layers, part.d)
        return (self.norm(projected.view(shape)) + rows.view(shape)) * part.sum_scale


@computes(spec.PerLayerInput)
class PerLayerInput(PartModule):
    """down(activation(gate(x)) * e)."""

    gate: Linear
    down: Linear

    def __init__(self, part: spec.PerLayerInput, path: str) -> None:
        super().__init__(part, path)
        self.activation = ACTIVATIONS[part.activation]

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        assert step.per_layer_BTP is not None, "the stack has no per-layer embedding"
        return self.down(self.activation(self.gate(x_BTM)) * step.per_layer_BTP)

"""Alternating updates: several streams of which a block computes on one, and predicts and corrects the others.

Shapes: batch B, tokens T, rows R = B*T, streams N, model width M; all streams of a token are contiguous, N*M wide.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.nn.linear import PartModule
from asbuilt.nn.registry import computes, module, optional
from asbuilt.nn.step import Step
from asbuilt.spec import altup as spec


@computes(spec.AlternatingUpdates)
class AlternatingUpdates(PartModule):
    """Predicted streams before a block, and corrected ones after it."""

    prediction: Tensor
    correction: Tensor
    router: Tensor
    vector_scale: Tensor

    def __init__(self, part: spec.AlternatingUpdates, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.norm = module(part.norm, f"{path}.norm")
        self.vector = optional(part.vector, f"{path}.vector")
        self.vector_norm = optional(part.vector_norm, f"{path}.vector_norm")

    def weights(self, x_RM: Tensor) -> Tensor:
        """Returns m(x), (R, N)."""
        logits_RN = F.linear(self.norm(x_RM), self.router) / self.part.d_model
        return logits_RN.to(torch.promote_types(x_RM.dtype, torch.float32)).tanh().to(x_RM.dtype)

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the predicted streams (R, N, M) of x (B, T, N*M), and the first of them (B, T, M)."""
        n = self.part.n_streams
        streams_RNM = x.reshape(-1, n, self.part.d_model)
        mix_RNN = F.linear(self.weights(streams_RNM[:, 0].clone()), self.prediction).view(-1, n, n)
        predicted_RNM = streams_RNM + torch.bmm(mix_RNN, streams_RNM)
        return predicted_RNM, predicted_RNM[:, 0].clone().view(*x.shape[:-1], -1)

    def correct(self, predicted_RNM: Tensor, read_BTM: Tensor, y_BTM: Tensor, step: Step) -> Tensor:
        """Returns the corrected streams (B, T, N*M), of the predicted ones, their first and the block's result."""
        y_RM = y_BTM.flatten(0, 1)
        gain_RN = F.linear(self.weights(y_RM), self.correction) + 1
        innovation_RM = y_RM - read_BTM.flatten(0, 1)
        streams_RNM = torch.addcmul(predicted_RNM, gain_RN[:, :, None], innovation_RM[:, None])
        if self.vector is not None:
            first_BTM = streams_RNM[:, 0].clone().view(y_BTM.shape) * self.vector_scale
            made = self.vector(first_BTM, step)
            made = made if self.vector_norm is None else self.vector_norm(made)
            streams_RNM[:, 1:] += made.flatten(0, 1)[:, None]
        return streams_RNM.view(*y_BTM.shape[:-1], -1)


@computes(spec.ProjectedStreams)
class ProjectedStreams(PartModule):
    """One stream as several, and several as one."""

    into: Tensor
    out: Tensor

    def __init__(self, part: spec.ProjectedStreams, path: str) -> None:
        super().__init__(part, path)
        self.part = part

    def split(self, x_BTM: Tensor) -> Tensor:
        """Returns (B, T, N*M)."""
        made = F.linear(x_BTM, self.into.flatten(0, 1)).unflatten(-1, (-1, self.part.d_model))
        return torch.cat((x_BTM, self.as_large(made, _size(x_BTM)[..., None, :]).flatten(-2)), -1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, T, M)."""
        streams_NRM = x.reshape(-1, self.part.n_streams, self.part.d_model).transpose(0, 1)
        made = torch.bmm(streams_NRM[1:], self.out.mT)
        total = streams_NRM[0] + self.as_large(made, _size(streams_NRM[0])).sum(0)
        return (total / self.part.n_streams).view(*x.shape[:-1], -1)

    def as_large(self, x: Tensor, size: Tensor) -> Tensor:
        """Returns x scaled along its last dimension to the root mean square `size`."""
        return x * (size / x.square().mean(-1, keepdim=True).clamp(min=self.part.eps).sqrt())


def _size(x: Tensor) -> Tensor:
    """Returns the root mean square of x over its last dimension, which is kept."""
    return x.square().mean(-1, keepdim=True).sqrt()

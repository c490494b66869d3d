"""Classifiers of sequences and of tokens.

Shapes: batch B, tokens T, model width M.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.nn.linear import Matrix, PartModule
from asbuilt.nn.registry import computes, optional
from asbuilt.spec import classifier as spec


@computes(spec.Classifier)
class Classifier(PartModule):
    """W x + b of one token per sequence, their mean, or every token."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, part: spec.Classifier, path: str) -> None:
        super().__init__(part, path)
        self.part, self.transform = part, optional(part.transform, f"{path}.transform")
        if not part.bias:
            self.register_parameter("bias", None)

    def chosen(self, x_BTM: Tensor, tokens_BT: Tensor, valid_BT: Tensor | None) -> Tensor:
        """Returns what is labelled of a sequence, (B, M)."""
        part = self.part
        if part.labels == "mean":
            return mean_token(x_BTM, valid_BT)
        if part.labels == "first":
            return first_token(x_BTM, valid_BT)[:, 0]
        real = valid_BT if part.padding is None else unpadded(tokens_BT, part.padding, valid_BT)
        last_BM = last_token(x_BTM, real)[:, 0]
        return last_BM.clone() if real is None else last_BM  # so that training can free the others

    def forward(self, x: Tensor, table: Matrix | None) -> Tensor:
        """Returns (..., n_labels)."""
        return F.linear(x if self.transform is None else self.transform(x), self.weight, self.bias)


def unpadded(tokens_BT: Tensor, padding: int, valid_BT: Tensor | None) -> Tensor:
    """Returns (B, T), True for valid tokens other than the padding token."""
    real = tokens_BT != padding
    return real if valid_BT is None else real & valid_BT


def mean_token(x_BTM: Tensor, valid_BT: Tensor | None) -> Tensor:
    """Returns (B, M): the mean over each row's valid tokens."""
    if valid_BT is None:
        return x_BTM.mean(1)
    return x_BTM.masked_fill(~valid_BT[..., None], 0).sum(1) / valid_BT.sum(1, keepdim=True).clamp(min=1)


def last_token(x_BTM: Tensor, valid_BT: Tensor | None) -> Tensor:
    """Returns (B, 1, M): each row's last valid token; of a row of padding, its first."""
    if valid_BT is None:
        return x_BTM[:, -1:]
    places = torch.arange(valid_BT.shape[1], device=x_BTM.device)
    index = torch.where(valid_BT, places, -1).amax(1).clamp(min=0)
    return x_BTM[torch.arange(len(index), device=x_BTM.device), index][:, None]


def first_token(x_BTM: Tensor, valid_BT: Tensor | None) -> Tensor:
    """Returns (B, 1, M): a copy of each row's first valid token, so that the others can be freed."""
    if valid_BT is None:
        return x_BTM[:, :1].clone()
    index = valid_BT.int().argmax(1)
    return x_BTM[torch.arange(len(index), device=x_BTM.device), index][:, None]

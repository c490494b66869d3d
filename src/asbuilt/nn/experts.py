"""Mixtures of experts: choose, sort rows by expert, multiply group by group, put back, and add up by weight.

Shapes: rows N = B*T, experts E, chosen per row k, R = N*k sorted rows, model width M, feed-forward width F.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asbuilt.kernels.grouped import group_counts, grouped_product
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.step import Step
from asbuilt.spec import experts
from asbuilt.spec.part import Kernel


class Router(PartModule):
    """Chooses each row's experts and how much each of them counts."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, part: experts.Router, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        if not part.bias:
            self.register_parameter("bias", None)

    def forward(self, x_NM: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights (N, k) in x's dtype, largest first, and the experts (N, k) that they belong to."""
        logits_NE = F.linear(x_NM, self.weight, self.bias)
        wide = torch.promote_types(logits_NE.dtype, torch.float32)
        if self.part.scoring == "softmax":
            scores_NE = logits_NE.softmax(-1, dtype=wide)
        else:
            scores_NE = logits_NE.to(wide).sigmoid()
        weights_Nk, chosen_Nk = scores_NE.topk(self.part.top_k, dim=-1)
        if self.part.renormalise:
            weights_Nk = weights_Nk / weights_Nk.sum(-1, keepdim=True)
        return weights_Nk.to(x_NM.dtype), chosen_Nk


class MixtureOfExperts(PartModule):
    """sum over chosen experts of weight * down(activation(gate(x)) * up(x)), plus the shared expert."""

    gate: Tensor
    up: Tensor
    down: Tensor
    shared_gate: Linear

    def __init__(
        self,
        part: experts.MixtureOfExperts,
        path: str,
        activation: Callable[[Tensor], Tensor],
        shared: nn.Module | None,
    ) -> None:
        super().__init__(part, path)
        self.part, self.activation = part, activation
        self.router = Router(part.router, f"{path}.router")
        self.shared = shared

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        x_NM = x_BTM.reshape(-1, x_BTM.shape[-1])
        y_BTM = self.routed(x_NM, step.kernel).view(x_BTM.shape)
        if self.shared is None:
            return y_BTM
        shared_BTM = self.shared(x_BTM, step)
        if self.part.shared_gate:
            shared_BTM = self.shared_gate(x_BTM).sigmoid() * shared_BTM
        return y_BTM + shared_BTM

    def routed(self, x_NM: Tensor, kernel: Kernel) -> Tensor:
        """Returns (N, M): each row through its chosen experts."""
        weights_Nk, chosen_Nk = self.router(x_NM)
        order_R = chosen_Nk.flatten().argsort(stable=True)
        counts = group_counts(chosen_Nk, self.part.n_experts)
        sorted_RM = self.experts(x_NM.index_select(0, order_R // self.part.top_k), counts, kernel)
        y_RM = sorted_RM.index_select(0, order_R.argsort())  # and not by index_copy, which keeps what it copies
        # a row's results are added in its own order of preference, whoever else went to the same experts
        return (y_RM.view(*weights_Nk.shape, -1) * weights_Nk[:, :, None]).sum(1)

    def experts(self, x_RM: Tensor, counts: list[int], kernel: Kernel) -> Tensor:
        """Returns (R, M): rows sorted by expert, `counts` of them for each, through their experts."""
        hidden = self.activation(grouped_product(x_RM, self.gate, counts, kernel))
        up = grouped_product(x_RM, self.up, counts, kernel)
        # autograd needs the factors later; without it the product may take the first one's place
        hidden = hidden * up if torch.is_grad_enabled() else hidden.mul_(up)
        return grouped_product(hidden, self.down, counts, kernel)

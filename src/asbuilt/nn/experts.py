"""Mixtures of experts: route, sort rows by expert, multiply group by group, restore the order, sum by weight.

Shapes: rows N = B*T, experts E, chosen per row k, R = N*k sorted rows, model width M, feed-forward width F.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.grouped import group_counts, grouped_product
from asbuilt.nn.feedforward import ACTIVATIONS, clamped
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.norms import normed
from asbuilt.nn.registry import computes, optional
from asbuilt.nn.step import Step
from asbuilt.spec import experts
from asbuilt.spec.linear import Lora
from asbuilt.spec.part import Kernel

SCORES: dict[experts.Scoring, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32)),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda x: F.softplus(x).sqrt(),
}


@computes(experts.Router)
class Router(PartModule):
    """Chooses each row's experts and their weights."""

    weight: Tensor
    bias: Tensor | None
    correction: Tensor
    table: Tensor
    expert_scale: Tensor

    def __init__(self, part: experts.Router, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        # told each pass's logits (N, E) and choices (N, k), for losses that balance the experts
        self.heard: Callable[[Tensor, Tensor], None] | None = None
        self.norm = optional(part.norm, f"{path}.norm")
        if not part.bias:
            self.register_parameter("bias", None)

    def forward(self, x_NM: Tensor, tokens_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the weights (N, k) in x's dtype, and their experts (N, k), the first choice first.

        `tokens_N` are the rows' token ids, which a table of experts is looked up by.
        """
        part = self.part
        logits_NE = F.linear(normed(self.norm, x_NM), self.weight, self.bias)
        if part.logit_scale != 1.0:
            logits_NE = logits_NE * part.logit_scale
        wide = torch.promote_types(logits_NE.dtype, torch.float32)
        if part.nearness is not None:
            weights_Nk, chosen_Nk = self.in_turn(logits_NE.to(wide), part.nearness)
            self.tell(logits_NE, chosen_Nk)
            return self.scaled(weights_Nk, chosen_Nk).to(x_NM.dtype), chosen_Nk
        soft = part.scoring == "softmax"
        scores_NE = SCORES[part.scoring](logits_NE.to(wide) if not soft else logits_NE)
        # the logits order large values that sigmoid rounds to 1; corrections and group scores need the sigmoids
        plain = not part.correction and part.groups is None
        if part.table is not None:
            assert tokens_N is not None, "the stack was not given token ids"
            chosen_Nk = self.table[tokens_N]
        else:
            chosen_Nk = self.choose((scores_NE if soft or not plain else logits_NE).detach())
        self.tell(logits_NE, chosen_Nk)
        weights_Nk = scores_NE.gather(-1, chosen_Nk)
        if part.renormalise:
            weights_Nk = weights_Nk / (weights_Nk.sum(-1, keepdim=True) + part.eps)
        return self.scaled(weights_Nk, chosen_Nk).to(x_NM.dtype), chosen_Nk

    def tell(self, logits_NE: Tensor, chosen_Nk: Tensor) -> None:
        """Tells who listens the logits and the choices."""
        if self.heard is not None:
            self.heard(logits_NE, chosen_Nk)

    def scaled(self, weights_Nk: Tensor, chosen_Nk: Tensor) -> Tensor:
        """Returns the weights with the factor of all experts and those of single ones."""
        if self.part.scale != 1.0:
            weights_Nk = weights_Nk * self.part.scale
        if self.part.expert_scale:
            weights_Nk = weights_Nk * self.expert_scale[chosen_Nk].to(weights_Nk.dtype)
        return weights_Nk

    def in_turn(self, logits_NE: Tensor, nearness: float) -> tuple[Tensor, Tensor]:
        """Returns weights and experts, (N, k), chosen one after the other: a softmax over those near the best left."""
        fixed_NE = logits_NE.detach()
        best_Nk, chosen_Nk = fixed_NE.topk(self.part.top_k, dim=-1)
        taken_NE = torch.zeros_like(fixed_NE, dtype=torch.bool)
        weights = []
        for best_N1, chosen_N1 in zip(best_Nk.split(1, -1), chosen_Nk.split(1, -1), strict=True):
            apart_NE = (best_N1 - fixed_NE).div_(fixed_NE.abs().clamp_(min=best_N1))
            closed_NE = (apart_NE > nearness).logical_or_(taken_NE)
            del apart_NE  # before the softmax needs as much
            weights.append(logits_NE.masked_fill(closed_NE, -torch.inf).softmax(-1).gather(-1, chosen_N1))
            taken_NE.scatter_(-1, chosen_N1, True)
        return torch.cat(weights, -1), chosen_Nk

    def choose(self, scores_NE: Tensor) -> Tensor:
        """Returns the experts (N, k) of the largest corrected scores, in the best groups only."""
        part = self.part
        if part.correction:
            scores_NE = scores_NE + self.correction
        if part.groups is not None:
            scores_NGe = scores_NE.unflatten(-1, (part.groups.n_groups, -1))
            counted = 2 if part.groups.score == "two_best" else 1
            best_NG = scores_NGe.topk(counted, dim=-1).values.sum(-1)
            open_Ng = best_NG.topk(part.groups.top_groups, dim=-1).indices
            closed_NG = torch.ones_like(best_NG, dtype=torch.bool).scatter_(-1, open_Ng, False)
            scores_NE = scores_NGe.masked_fill(closed_NG[:, :, None], -torch.inf).flatten(-2)
        return scores_NE.topk(part.top_k, dim=-1).indices


@computes(experts.MixtureOfExperts)
class MixtureOfExperts(PartModule):
    """sum over chosen experts of weight * down(activation(gate(x)) * up(x)), plus the shared expert."""

    shared_gate: Linear
    into_latent: Linear
    from_latent: Linear

    def __init__(self, part: experts.MixtureOfExperts, path: str) -> None:
        super().__init__(part, path)
        self.part, self.activation = part, ACTIVATIONS[part.activation]
        self.formats = {name: stack.format for name, stack in part.stacks.items()}  # as held: interleaved or as stored
        # told each stack's name and inputs, sorted by expert, with so many rows each; a stack is no module to be hooked
        self.watch: Callable[[str, Tensor, list[int]], None] | None = None
        # where gradients are recorded: the capacity as a factor on the mean load, and a hook for dropped choices (N, k)
        self.capacity_factor: float | None = None
        self.told_dropped: Callable[[Tensor], None] | None = None
        self.router = Router(part.router, f"{path}.router")
        self.shared = optional(part.shared, f"{path}.shared")
        self.norm, self.post_norm = optional(part.norm, f"{path}.norm"), optional(part.post_norm, f"{path}.post_norm")
        self.shared_norm = optional(part.shared_norm, f"{path}.shared_norm")
        self.shared_post_norm = optional(part.shared_post_norm, f"{path}.shared_post_norm")

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        x_NM = x_BTM.reshape(-1, x_BTM.shape[-1])
        y_BTM = normed(self.post_norm, self.routed(x_NM, step)).view(x_BTM.shape)
        if self.shared is None:
            return y_BTM
        shared_BTM = normed(self.shared_post_norm, self.shared(normed(self.shared_norm, x_BTM), step))
        if self.part.shared_gate:
            shared_BTM = self.shared_gate(x_BTM).sigmoid() * shared_BTM
        return y_BTM + shared_BTM

    def routed(self, x_NM: Tensor, step: Step) -> Tensor:
        """Returns (N, M): each row through its chosen experts."""
        weights_Nk, chosen_Nk = self.router(x_NM, None if step.tokens_BT is None else step.tokens_BT.flatten())
        x_NM = normed(self.norm, x_NM)
        if self.part.d_latent is not None:
            x_NM = self.into_latent(x_NM)
        capacity = self.capacity_of(chosen_Nk.numel() // step.batch)
        if capacity is not None:
            dropped_Nk = self.dropped(chosen_Nk, step, capacity)
            weights_Nk = weights_Nk.masked_fill(dropped_Nk, 0.0)
            if self.told_dropped is not None:
                self.told_dropped(dropped_Nk)
        order_R = chosen_Nk.flatten().argsort(stable=True)
        counts = group_counts(chosen_Nk, self.part.n_experts)
        if self.part.weighs == "inputs":
            rows_RM = (x_NM[:, None] * weights_Nk[:, :, None]).flatten(0, 1).index_select(0, order_R)
        else:
            rows_RM = x_NM.index_select(0, order_R // self.part.top_k)
        y_RM = self.experts(rows_RM, counts, step.kernel)
        y_RM = y_RM.index_select(0, order_R.argsort())  # rather than index_copy, which saves its input
        # a row's results are summed in its own order of preference, independent of other rows
        y_NkM = y_RM.view(*weights_Nk.shape, -1)
        y_NM = (y_NkM if self.part.weighs == "inputs" else y_NkM * weights_Nk[:, :, None]).sum(1)
        return y_NM if self.part.d_latent is None else self.from_latent(y_NM)

    def capacity_of(self, choices: int) -> int | None:
        """Returns how many of a sequence's choices an expert processes: as described, or by the factor in training."""
        if self.capacity_factor is None or not torch.is_grad_enabled():
            return self.part.capacity
        return math.ceil(self.capacity_factor * choices / self.part.n_experts)

    def dropped(self, chosen_Nk: Tensor, step: Step, capacity: int) -> Tensor:
        """Returns (N, k): the choices that exceed an expert's capacity. Padding does not count."""
        top_k = self.part.top_k
        chosen_BC = chosen_Nk.view(step.batch, -1, top_k).transpose(1, 2).flatten(1)  # all first choices come first
        taken_BCE = chosen_BC[:, :, None] == torch.arange(self.part.n_experts, device=chosen_BC.device)
        if step.valid_BT is not None:
            taken_BCE = taken_BCE & step.valid_BT.repeat(1, top_k)[:, :, None]
        place_BC = taken_BCE.cumsum(1).gather(-1, chosen_BC[:, :, None])[:, :, 0]
        return (place_BC > capacity).unflatten(1, (top_k, -1)).transpose(1, 2).reshape(chosen_Nk.shape)

    def experts(self, x_RM: Tensor, counts: list[int], kernel: Kernel) -> Tensor:
        """Returns (R, M): the outputs of rows sorted by expert, with `counts` rows each."""

        def mapped(name: str, rows: Tensor) -> Tensor:
            if self.watch is not None:
                self.watch(name, rows, counts)
            bias = getattr(self, f"{name}_bias") if self.part.bias else None
            one = self.part.stacks[name]
            made = grouped_product(rows, getattr(self, name), counts, kernel, bias, self.formats[name])
            if not isinstance(one, Lora):
                return made
            narrow = grouped_product(rows, getattr(self, f"{name}_lora_a"), counts, kernel)
            return made + grouped_product(narrow, getattr(self, f"{name}_lora_b"), counts, kernel) * one.scale

        if self.part.gating == "none":
            return mapped("down", self.activation(mapped("up", x_RM)))
        gate, up = mapped("gate", x_RM), mapped("up", x_RM)
        if isinstance(self.part.gating, experts.ClampedGate):
            return mapped("down", clamped(gate, up, self.part.gating))
        hidden = self.activation(gate)
        # autograd saves the factors; without it the product can be in place
        return mapped("down", hidden * up if torch.is_grad_enabled() else hidden.mul_(up))

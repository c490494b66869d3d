"""Keeping the experts of mixtures in equal use: an auxiliary loss, a z-loss, or a correction of the choice.

Shapes: tokens N, experts E, chosen per token k.
"""

from __future__ import annotations

from functools import partial
from types import TracebackType

import torch
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.nn.experts import SCORES, MixtureOfExperts, Router
from asbuilt.nn.model import Model
from asbuilt.train.ranks import ALONE, Ranks
from asbuilt.train.settings import Experts


def auxiliary_loss(router: Router, logits_NE: Tensor, chosen_Nk: Tensor, share_E: Tensor | None = None) -> Tensor:
    """Returns E sum_e f_e p_e: the share f of all choices that an expert has, times its mean probability p.

    1 for choices and probabilities that are equal over the experts, whatever k, since both sum to 1; E if one expert
    has all. Fedus et al. 2021 (arXiv 2101.03961), equations 4 to 6; where f is counted per token instead, as in
    Mixtral's code, the balanced value is k. Scores other than a softmax are divided by their sum (DeepSeek-V3, arXiv
    2412.19437, equations 17 to 20). `share_E` are the shares of all choices, if there are more than these.
    """
    n_experts = logits_NE.shape[-1]
    scores_NE = SCORES[router.part.scoring](logits_NE.float())
    p_E = (scores_NE / scores_NE.sum(-1, keepdim=True)).mean(0)
    f_E = counts(chosen_Nk, n_experts) / chosen_Nk.numel() if share_E is None else share_E
    return n_experts * (f_E * p_E).sum()


def sequence_loss(router: Router, logits_NE: Tensor, chosen_Nk: Tensor, sequences: int, ranks: Ranks = ALONE) -> Tensor:
    """Returns the mean of the auxiliary losses of the rows of each sequence alone (DeepSeek-V3, equations 17 to 20).

    Its balanced value is 1 too, which a sequence has only if it uses all experts equally: it asks for more than the
    loss over a batch. Of sequences that `ranks` divide it is this one's part of their mean.
    """
    logits, chosen = logits_NE.chunk(sequences), chosen_Nk.chunk(sequences)
    found = ranks.along(torch.stack([counts(one, logits_NE.shape[-1]) for one in chosen]))
    rows = zip(logits, chosen, found / found.sum(-1, keepdim=True), strict=True)
    return torch.stack([auxiliary_loss(router, *one) for one in rows]).mean()


def router_z_loss(logits_NE: Tensor) -> Tensor:
    """Returns the mean over tokens of (ln sum_e e^logit)^2 (Zoph et al. 2022, arXiv 2202.08906, equation 5)."""
    return logits_NE.float().logsumexp(-1).square().mean()


def counts(chosen_Nk: Tensor, n_experts: int) -> Tensor:
    """Returns how many choices fell on each expert, (E,)."""
    return torch.bincount(chosen_Nk.flatten(), minlength=n_experts).float()


def _shares(told: list[tuple[Router, Tensor, Tensor]], ranks: Ranks) -> list[Tensor]:
    """Returns each router's shares of the choices of all ranks, (E,), which are counted in one sum."""
    found = [counts(chosen_Nk, logits_NE.shape[-1]) for _, logits_NE, chosen_Nk in told]
    total = ranks.summed(torch.cat(found)).split([len(one) for one in found])
    return [one / one.sum() for one in total]


class Routing:
    """Listens to a model's routers within a `with` statement, and sums their choices over a step's batches."""

    def __init__(self, model: Model, settings: Experts) -> None:
        self.settings = settings
        self.routers = [one for one in model.modules() if isinstance(one, Router)]
        if settings.on and not self.routers:
            raise InputError("the model has no experts", field="experts", value=settings, fix="leave the section out")
        if settings.bias_rate and not any(one.part.correction for one in self.routers):
            raise InputError(
                "no router of the model has a correction", field="experts.bias_rate", value=settings.bias_rate
            )
        self.mixtures = [one for one in model.modules() if isinstance(one, MixtureOfExperts)]
        for one in self.mixtures:
            if settings.capacity and one.part.weighs == "inputs":
                raise InputError(
                    "an expert with weighted inputs drops none", field="experts.capacity", value=settings.capacity
                )
            one.capacity_factor = settings.capacity or None  # stays: blocks may be repeated in the backward pass
        self.loads: dict[Router, Tensor] = {}
        self._dropped: list[Tensor] = []
        self.balances: list[Tensor] = []
        self._told: list[tuple[Router, Tensor, Tensor]] = []

    def __enter__(self) -> None:
        self._told = []
        for one in self.routers:
            one.heard = partial(self._hear, one)
        for one in self.mixtures:
            one.told_dropped = self._hear_dropped

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in self.routers:
            one.heard = None
        for one in self.mixtures:
            one.told_dropped = None

    def _hear_dropped(self, dropped_Nk: Tensor) -> None:
        self._dropped.append(dropped_Nk.float().mean())

    @property
    def choices(self) -> list[tuple[Router, Tensor, Tensor]]:
        """Each router of the last batch with its logits (N, E) and choices (N, k), in order of the blocks."""
        return list(self._told)

    @property
    def dropped(self) -> float | None:
        """The fraction of all choices that exceeded an expert's capacity; None without a capacity."""
        return float(torch.stack(self._dropped).mean()) if self._dropped else None

    def _hear(self, router: Router, logits_NE: Tensor, chosen_Nk: Tensor) -> None:
        self._told.append((router, logits_NE, chosen_Nk))
        found = counts(chosen_Nk, logits_NE.shape[-1])
        self.loads[router] = self.loads[router] + found if router in self.loads else found

    @property
    def weighs(self) -> bool:
        """Whether the loss has terms of the routers."""
        given = self.settings
        return bool(self.routers) and bool(given.auxiliary or given.z_loss or given.sequence)

    def loss(self, weight: float, sequences: int = 1, ranks: Ranks = ALONE) -> Tensor | None:
        """Returns the weighted losses of the last batch, averaged over the routers; None if there are none.

        `sequences` is the number of equal ones that a batch has. The auxiliary loss counts the choices of all ranks'
        shares of the batch; `weight` is this rank's.
        """
        given, told = self.settings, self._told
        if not told or not self.weighs:
            return None
        total = torch.zeros((), device=told[0][1].device)
        if given.auxiliary:
            shares = _shares(told, ranks)
            balance = torch.stack([auxiliary_loss(*one, f_E) for one, f_E in zip(told, shares, strict=True)]).mean()
            self.balances.append(balance.detach() * weight)
            total = total + given.auxiliary * balance
        if given.sequence:
            each = [sequence_loss(*one, sequences, ranks) for one in told]
            total = total + given.sequence * torch.stack(each).mean()
        if given.z_loss:
            total = total + given.z_loss * torch.stack([router_z_loss(logits) for _, logits, _ in told]).mean()
        return total * weight

    @property
    def fullest(self) -> float | None:
        """The load of the fullest expert relative to the mean, averaged over the routers."""
        shares = [load.max() / load.mean() for load in self.loads.values()]
        return float(torch.stack(shares).mean()) if shares else None

    @property
    def auxiliary(self) -> float | None:
        """The auxiliary loss of all batches, unweighted."""
        return float(torch.stack(self.balances).sum()) if self.balances else None

    def gather(self, ranks: Ranks) -> None:
        """Adds the other ranks' choices and losses."""
        self.loads = {router: ranks.summed(load_E) for router, load_E in self.loads.items()}
        if self.balances:
            self.balances = [ranks.summed(torch.stack(self.balances).sum())]
        if self._dropped:
            self._dropped = [ranks.summed(torch.stack(self._dropped).mean()) / ranks.count]

    @torch.no_grad()
    def correct(self) -> None:
        """Moves each router's correction by the rate, up for experts with fewer tokens than the mean, down for more.

        Wang et al. 2024 (arXiv 2408.15664), algorithm 1: it changes the choice alone, and no gradient.
        """
        for router, load_E in self.loads.items():
            if self.settings.bias_rate and router.part.correction:
                router.correction += self.settings.bias_rate * (load_E.mean() - load_E).sign()

"""Expert parallelism: each rank has a part of the experts; rows go to the ranks of their experts, and results return.

Ranks that share batches route their own tokens, sort the rows by expert, and exchange them all-to-all (Lepikhin et al.
2020, arXiv 2006.16668, section 3.2). The gradient of an expert then is that of the rows of all ranks.

Shapes: rows R sorted by expert, width M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd

from asbuilt.nn.experts import MixtureOfExperts
from asbuilt.nn.model import Model
from asbuilt.spec.part import Kernel
from asbuilt.train.many.extent import Extent, spread

Compute = Callable[[Tensor, list[int], Kernel], Tensor]  # results of sorted rows, of their numbers per expert


def mixtures(model: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    """Yields the mixtures of experts by path."""
    for path, one in model.named_modules():
        if isinstance(one, MixtureOfExperts):
            yield path, one


def stacks(mixture: MixtureOfExperts) -> set[nn.Parameter]:
    """Returns the weights that hold all experts of a mixture."""
    return {getattr(mixture, name) for name in mixture.part.spreads()}


@torch.no_grad()
def spread_experts(model: Model, group: ProcessGroup, places: dict[str, Extent]) -> dict[str, Extent]:
    """Leaves a rank its part of each mixture's experts, in place; returns where each of their weights lies."""
    rank, ranks, found = dist.get_rank(group), dist.get_world_size(group), dict[str, Extent]()
    for path, one in mixtures(model):
        each = one.part.n_experts // ranks
        for name in one.part.spreads():
            held = getattr(one, name)
            mine = held.narrow(0, rank * each, each).clone()
            setattr(one, name, nn.Parameter(mine, requires_grad=held.requires_grad))
            found[f"{path}.{name}"] = spread(places[f"{path}.{name}"], rank, ranks)
        one.experts = partial(exchanged, one.experts, group)  # type: ignore[method-assign]
    return found


def exchanged(compute: Compute, group: ProcessGroup, x_RM: Tensor, counts: list[int], kernel: Kernel) -> Tensor:
    """Returns (R, M): the outputs of rows sorted by expert, with `counts` rows each, computed by all ranks."""
    ranks = dist.get_world_size(group)
    sent = torch.tensor(counts, device=x_RM.device).view(ranks, -1)  # by rank, and by the experts that it has
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    there, here = sent.sum(1).tolist(), received.sum(1).tolist()
    rows_RM = all_to_all_single_autograd(x_RM, here, there, group)
    # they come rank by rank, and each rank's by expert
    order_R = _experts_of(received).argsort(stable=True)
    y_RM = compute(rows_RM.index_select(0, order_R), received.sum(0).tolist(), kernel)
    return all_to_all_single_autograd(y_RM.index_select(0, order_R.argsort()), there, here, group)


def _experts_of(received: Tensor) -> Tensor:
    """Returns the expert of each row, (R,), of numbers of rows by rank and expert."""
    ranks, each = received.shape
    return torch.arange(each, device=received.device).repeat(ranks).repeat_interleave(received.flatten())

"""The cross-entropy of logits of which each rank has a part of the columns.

ln Z is that of all ranks' sums of e^(l - m), m being the largest logit of all: three numbers of a row are exchanged.

Shapes: rows N, a rank's part of the vocabulary V.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from asbuilt.train.loss import Loss


def measured(
    logits_NV: Tensor,
    targets_N: Tensor,
    z: float,
    *,
    spent: bool = False,
    group: ProcessGroup,
    start: int,
    held: int,
) -> Loss:
    """Returns the sums of one chunk, as `asbuilt.train.loss.measured` does, of columns from `start` of the vocabulary.

    Columns from `held` on pad it.
    """
    return Loss(*DividedLikelihood.apply(logits_NV, targets_N, z, spent, group, start, held))


class DividedLikelihood(torch.autograd.Function):
    """Both sums, of logits l; e^(l - m) takes the place of a copy, or of the logits themselves if they are `spent`.

    dl = p (1 + 2 z ln Z) - 1[target], p = e^(l - m) / sum of all ranks', takes it then. A second backward pass over the
    same graph raises RuntimeError.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,  # noqa: ANN401
        logits_NV: Tensor,
        targets_N: Tensor,
        z: float,
        spent: bool,
        group: ProcessGroup,
        start: int,
        held: int,
    ) -> tuple[Tensor, Tensor]:
        wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        if wide_NV is logits_NV and not spent:
            wide_NV = logits_NV.clone()
        wide_NV[:, held:] = -torch.inf
        largest_N = wide_NV.amax(-1)
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        own_N = targets_N - start
        here_N = (own_N >= 0) & (own_N < held)
        chosen_N = wide_NV.gather(-1, own_N.where(here_N, 0)[:, None])[:, 0].where(here_N, 0.0)
        wide_NV.sub_(largest_N[:, None]).exp_()
        both = torch.stack((wide_NV.sum(-1), chosen_N))
        dist.all_reduce(both, group=group)
        sums_N, chosen_N = both
        log_z_N = sums_N.log() + largest_N
        nats = (log_z_N - chosen_N).sum()
        ctx.z, ctx.dtype = z, logits_NV.dtype
        ctx.save_for_backward(wide_NV, own_N, here_N, sums_N, log_z_N)
        ctx.mark_non_differentiable(nats)
        return nats.clone() if z == 0.0 else nats + z * log_z_N.square().sum(), nats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401, D102  # pyright: ignore[reportIncompatibleMethodOverride]
        shares_NV, own_N, here_N, sums_N, log_z_N = ctx.saved_tensors
        dl_NV = shares_NV.mul_(((1 + 2 * ctx.z * log_z_N) / sums_N)[:, None])
        dl_NV.scatter_add_(-1, own_N.where(here_N, 0)[:, None], -here_N.to(dl_NV.dtype)[:, None])
        return dl_NV.mul_(d).to(ctx.dtype), *(None,) * 6

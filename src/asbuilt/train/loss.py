"""The cross-entropy of a model's head over its vocabulary, computed in chunks of rows.

The logits of a step, tokens times vocabulary, are often its largest tensor. Here the head runs on a chunk of rows at a
time, and the chunk's gradients are computed at once: no logits outlive their chunk, and nothing is computed twice.

Shapes: rows N = B*T with a target, model width M, vocabulary V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asbuilt.kernels import native_gradients
from asbuilt.nn.model import Model
from asbuilt.train.batch import IGNORED, Batch

Scores = Callable[[Tensor], Tensor]
CHUNK = 1 << 24  # logits of one chunk, unless its rows are given: 64 MiB in float32


class Loss(NamedTuple):
    """Sums over the targets of a batch: what is differentiated, and its cross-entropy alone, in nats."""

    total: Tensor
    nats: Tensor


Measure = Callable[[Tensor, Tensor, float], Loss]  # of a chunk's logits, targets, and the z-loss's weight


def chunk_rows(n_vocab: int) -> int:
    """Returns the rows of a chunk, unless they are given."""
    return max(1, CHUNK // n_vocab)


def loss_of(model: Model, batch: Batch, *, z: float = 0.0, rows: int | None = None) -> Loss:
    """Returns the summed loss of a batch, in chunks of so many of its targets, by default of 2^24 logits."""
    with headless(model):
        x_BTM = model(batch.ids, **batch.inputs)
    x_NM, targets_N = x_BTM.flatten(0, -2), batch.targets.flatten()
    if batch.counted < len(targets_N):
        kept_N = targets_N != IGNORED
        x_NM, targets_N = x_NM[kept_N], targets_N[kept_N]
    return head_loss(model, x_NM, targets_N, z=z, rows=rows)


def head_loss(
    model: Model,
    x_NM: Tensor,
    targets_N: Tensor,
    *,
    z: float,
    rows: int | None,
    held: Sequence[nn.Parameter] | None = None,
) -> Loss:
    """Returns the summed loss of a model's head, of rows of the normalised stream; `held` are all that it may use."""
    measure = partial(model.measured or measured, spent=model.yields_logits)
    held = head_parameters(model) if held is None else held
    rows = rows or chunk_rows(model.spec.n_vocab)
    return cross_entropy(model.scores, x_NM, targets_N, held, z=z, rows=rows, measure=measure)


def cross_entropy(
    scores: Scores,
    x_NM: Tensor,
    targets_N: Tensor,
    parameters: Sequence[nn.Parameter],
    *,
    z: float = 0.0,
    rows: int,
    measure: Measure | None = None,
) -> Loss:
    """Returns sum_n (ln Z_n - l_n[target]) + z (ln Z_n)^2 of logits l = scores(x), Z = sum of e^l.

    The z-loss keeps ln Z near 0 (Chowdhery et al. 2022, arXiv 2204.02311, section 5). `parameters` are all that
    `scores` uses; `rows` is the most of a chunk; a single one is differentiated by autograd as usual. `measure` sums a
    chunk of logits, if not `measured`.
    """
    measure = measure or measured
    rows = max(1, -(-len(x_NM) // max(1, -(-len(x_NM) // rows))))  # as many chunks, of equal size
    if not torch.is_grad_enabled() or len(x_NM) <= rows:
        return _summed([measure(scores(x), t, z) for x, t in _chunks(x_NM, targets_N, rows)], x_NM)
    used = [one for one in parameters if one.requires_grad]
    return Loss(*ChunkedLoss.apply(scores, measure, targets_N, z, rows, used, x_NM, *used))


@contextmanager
def headless(model: Model) -> Iterator[None]:
    """Within it the model's `forward` ends with the normalised stream."""
    model.without_head = True
    try:
        yield
    finally:
        model.without_head = False


def head_parameters(model: Model) -> list[nn.Parameter]:
    """Returns the parameters that the head may use: its own, and those of the embedding."""
    held = () if model.head is None else model.head.parameters()
    return list(dict.fromkeys([*held, *model.embedding.parameters()]))


def _chunks(x_NM: Tensor, targets_N: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(x_NM), rows):
        yield x_NM[start : start + rows], targets_N[start : start + rows]


def measured(logits_NV: Tensor, targets_N: Tensor, z: float, *, spent: bool = False) -> Loss:
    """Returns the sums of one chunk, computed in float32 or wider, in the logits' place if they are `spent`."""
    return Loss(*NegativeLogLikelihood.apply(logits_NV, targets_N, z, spent))


def _summed(losses: list[Loss], x_NM: Tensor) -> Loss:
    if not losses:  # no target: a sum of nothing, which still has a gradient
        return Loss(x_NM.sum() * 0.0, x_NM.new_zeros(()))
    if len(losses) == 1:
        return losses[0]
    return Loss(torch.stack([one.total for one in losses]).sum(), torch.stack([one.nats for one in losses]).sum())


class NegativeLogLikelihood(torch.autograd.Function):
    """Both sums, of logits l; dl = p (1 + 2 z ln Z) - 1[target] takes the place of ln p, which is all that is saved.

    PyTorch's own cross-entropy fills a tensor of that size with zeros for the gradient of ln p, and another with dl. If
    nothing else reads the logits, they are `spent`: ln p or dl takes their place too. A second backward pass over the
    same graph raises RuntimeError, as ln p is gone.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, z: float, spent: bool) -> tuple[Tensor, Tensor]:  # noqa: ANN401, D102
        ctx.z, ctx.spent, ctx.dtype = z, spent, logits_NV.dtype
        made = native_gradients.likelihood(logits_NV, targets_N)
        if made is not None:
            nats, log_z_N = made[0].sum(), made[1]
            ctx.save_for_backward(logits_NV, targets_N, log_z_N)
        else:
            wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
            log_z_N = wide_NV.logsumexp(-1) if z else None
            # a copy is not needed again
            own = spent or wide_NV is not logits_NV
            log_p_NV = torch.log_softmax(wide_NV, -1, out=wide_NV if own else None)
            nats = -log_p_NV.gather(-1, targets_N[:, None]).sum()
            ctx.save_for_backward(log_p_NV, targets_N, log_z_N)
        ctx.native = made is not None
        ctx.mark_non_differentiable(nats)
        total = nats.clone() if log_z_N is None or not z else nats + z * log_z_N.square().sum()
        return total, nats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401, D102  # pyright: ignore[reportIncompatibleMethodOverride]
        numbers_NV, targets_N, log_z_N = ctx.saved_tensors
        if ctx.native:
            if ctx.spent:
                torch.autograd.graph.increment_version(numbers_NV)  # so that whatever saved the logits too raises
            given = (numbers_NV, targets_N, log_z_N, ctx.z, d)
            return native_gradients.likelihood_gradient(*given, within=ctx.spent), None, None, None
        dl_NV = numbers_NV.exp_()
        if log_z_N is not None:
            dl_NV.mul_(1 + 2 * ctx.z * log_z_N[:, None])
        dl_NV.scatter_add_(-1, targets_N[:, None], dl_NV.new_full((len(targets_N), 1), -1.0))
        return dl_NV.mul_(d).to(ctx.dtype), None, None, None


class ChunkedLoss(torch.autograd.Function):
    """Both sums, with the gradients of each chunk computed in the forward pass; the backward pass scales them in place.

    A second backward pass raises RuntimeError.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,  # noqa: ANN401
        scores: Scores,
        measure: Measure,
        targets_N: Tensor,
        z: float,
        rows: int,
        used: list[nn.Parameter],
        x_NM: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        dx_NM, sums = torch.empty_like(x_NM), []
        held: list[Tensor | None] = [None] * len(used)
        for (x, targets), dx in zip(_chunks(x_NM, targets_N, rows), dx_NM.split(rows), strict=True):
            piece = x.detach().requires_grad_()
            with torch.enable_grad():
                loss = measure(scores(piece), targets, z)
                found, *more = torch.autograd.grad(loss.total, [piece, *used], allow_unused=True)
            dx.copy_(found)
            held = [
                new if old is None else old if new is None else old.add_(new)
                for old, new in zip(held, more, strict=True)
            ]
            del found, more  # else alive beside the next chunk's logits
            sums.append(Loss(loss.total.detach(), loss.nats))
        ctx.save_for_backward(dx_NM, *held)
        total, nats = _summed(sums, x_NM)
        ctx.mark_non_differentiable(nats)
        return total, nats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401, D102  # pyright: ignore[reportIncompatibleMethodOverride]
        dx_NM, *held = ctx.saved_tensors
        return (None,) * 6 + (dx_NM.mul_(d), *(None if one is None else one.mul_(d) for one in held))

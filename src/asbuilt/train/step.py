"""One training step: gradients of all its batches, clipped, then the optimizer.

The loss of a step is the mean over all its targets, however they are divided into batches: each batch's sum is divided
by the number of targets of the whole step, so that accumulation equals one large batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from asbuilt.nn.model import Model
from asbuilt.spec.part import stored_weights
from asbuilt.train.batch import Batch, ImageTexts, Preferences
from asbuilt.train.contrastive import contrastive_loss, limit_temperature
from asbuilt.train.experts import Routing
from asbuilt.train.loss import Loss, loss_of
from asbuilt.train.optimizer import Optimizers, trainable
from asbuilt.train.preferences import preference_loss
from asbuilt.train.ranks import ALONE, Ranks
from asbuilt.train.settings import Experts

DENSE = Experts()


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """What a step gives: the mean loss before its update in nats per target or pair, the gradient's norm, its targets.

    `fullest` is the load of a router's fullest expert relative to the mean, averaged over the routers; None without
    experts. `auxiliary` is the mean auxiliary loss, unweighted, `dropped` the fraction of choices beyond a capacity.
    """

    loss: float
    gradient_norm: float
    tokens: int
    fullest: float | None = None
    auxiliary: float | None = None
    dropped: float | None = None


class NotFinite(ArithmeticError):
    """The loss or a gradient is NaN or infinite; `tensor` is the first tensor that is. Nothing was updated."""

    def __init__(self, tensor: str, loss: float) -> None:
        super().__init__(f"{tensor} is not finite (loss {loss})")
        self.tensor, self.loss = tensor, loss


def train_step(
    model: Model,
    batches: Sequence[Batch],
    optimizer: Optimizers,
    *,
    factor: float = 1.0,
    clip: float = 0.0,
    z: float = 0.0,
    rows: int | None = None,
    autocast: torch.dtype | None = None,
    experts: Experts = DENSE,
    ranks: Ranks = ALONE,
) -> Stepped:
    """Updates the model by the gradient of the batches' mean loss; raises NotFinite before an update that is not.

    `factor` multiplies the learning rates, `clip` limits the norm of the gradient, `z` weighs the z-loss, `rows` are
    those of a chunk of the loss, and products run in `autocast`, while weights keep their dtype. The losses of
    `experts` are means over the tokens of each batch, which they weigh by its targets. With other `ranks` the
    batches are this one's shares, equal to theirs; loss, gradient and targets are those of all.
    """
    counted = round(ranks.total(sum(batch.counted for batch in batches)))
    optimizer.zero_grad()
    nats = torch.zeros((), device=model.device)
    routing = Routing(model, experts)
    piped = ranks.pipelined(batches, counted, z=z, rows=rows, autocast=autocast)
    for i, batch in enumerate(batches if piped is None else ()):
        ranks.begin(model, i == len(batches) - 1)
        with casting(model, autocast), routing:
            loss = batch_loss(model, batch, z=z, rows=rows)
        total = loss.total / max(1, counted)
        more = None
        if routing.weighs:  # means over the tokens of all ranks, each of which has an equal number
            weight = ranks.total(batch.counted) / max(1, counted) / ranks.count
            more = routing.loss(weight, len(batch.ids), ranks)
        # ranks that compute layers together sum their gradients of what routers read, each of which is that of all
        (total if more is None else total + more / ranks.together).backward()
        nats += loss.nats
    ranks.finish()
    held = optimizer.parameters
    norm = ranks.norm(held)
    loss, size = ranks.overall(float(nats if piped is None else piped)) / max(1, counted), float(norm)
    if not (abs(loss) < float("inf") and size < float("inf")):
        raise NotFinite(first_not_finite(model, ranks), loss)
    excess = (norm + 1e-6) / clip if 0.0 < clip < size else None
    if excess is not None and ranks.count > 1:
        ranks.clip(held, clip, norm)
        excess = None
    optimizer.step(factor, excess)
    if isinstance(batches[0], ImageTexts):
        limit_temperature(model)
        if optimizer.offloaded is not None:
            optimizer.offloaded.read()
    routing.gather(ranks)
    routing.correct()
    paired = isinstance(batches[0], Preferences | ImageTexts)
    return Stepped(
        loss=loss,
        gradient_norm=size,
        tokens=round(ranks.total(sum(batch.tokens for batch in batches))) if paired else counted,
        fullest=routing.fullest,
        auxiliary=routing.auxiliary,
        dropped=routing.dropped,
    )


def batch_loss(model: Model, batch: Batch, *, z: float = 0.0, rows: int | None = None) -> Loss:
    """Returns the summed loss of a batch: of its targets, or of its pairs."""
    if isinstance(batch, Preferences):
        return preference_loss(model, batch, rows=rows)
    if isinstance(batch, ImageTexts):
        return contrastive_loss(model, batch)
    return loss_of(model, batch, z=z, rows=rows)


def casting(model: Model, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Returns the context in which products run in `dtype`; None for that of the weights."""
    return nullcontext() if dtype is None else torch.autocast(model.device.type, dtype)


def first_not_finite(model: Model, ranks: Ranks = ALONE) -> str:
    """Returns the path of the first weight that is not finite, else of the first such gradient, else "the loss"."""
    paths = [path for path, *_ in stored_weights(model.spec)]
    order = {path: i for i, path in enumerate(paths)}  # the same on all ranks, whatever each of them holds
    found = 2 * len(paths)
    for path, parameter, *_ in trainable(model):
        if not bool(local(parameter).isfinite().all()):
            found = min(found, order[path])
        elif parameter.grad is not None and not bool(local(parameter.grad).isfinite().all()):
            found = min(found, len(paths) + order[path])
    found = ranks.least(found)
    named = [*paths, *(f"the gradient of {path}" for path in paths), "the loss"]
    return named[found]


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, which others may hold too."""
    return getattr(tensor, "to_local", lambda: tensor)()  # of a DTensor


@torch.no_grad()
def evaluate(
    model: Model,
    batches: Sequence[Batch],
    *,
    rows: int | None = None,
    autocast: torch.dtype | None = None,
    ranks: Ranks = ALONE,
) -> float:
    """Returns the mean loss of all targets or pairs, of other ranks' batches too, in nats."""
    total, counted = 0.0, 0
    for batch in batches:
        with casting(model, autocast):
            nats = ranks.nats(batch, rows=rows)
            total += float(batch_loss(model, batch, rows=rows).nats if nats is None else nats)
        counted += batch.counted
    return ranks.overall(total) / max(1.0, ranks.total(counted))

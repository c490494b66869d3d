"""Pipeline parallelism: each rank has a stage, some of a model's blocks; PyTorch's schedule passes micro-batches on.

The first stage has what is before the blocks too, the last what is after them, and the loss. The schedule is 1F1B
(Narayanan et al. 2021, arXiv 2104.04473, section 2.2), of `torch.distributed.pipelining`.

Shapes: batch B, tokens T, model width M, targets N.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from asbuilt.nn.model import Model
from asbuilt.plan.stage import every_stage
from asbuilt.train.batch import IGNORED, Batch
from asbuilt.train.loss import CHUNK, Loss, cross_entropy
from asbuilt.train.many.group import Group
from asbuilt.train.step import casting

BEFORE, AFTER = ("embedding", "positions", "embedding_norm"), ("norm", "head")


def cut(model: Model, number: int, count: int) -> None:
    """Leaves a model what stage `number` of `count` has of it, under its own paths, in place."""
    (mine,) = (stage for stage in every_stage(range(len(model.blocks)), count) if stage.number == number)
    model.blocks = nn.ModuleDict({str(i): model.blocks[i] for i, _ in mine.blocks})  # type: ignore[assignment]
    for name in (*(() if mine.first else BEFORE), *(() if mine.last else AFTER)):
        setattr(model, name, None)
    model.forward = partial(_through, model, mine.first)  # type: ignore[method-assign]


def _through(model: Model, first: bool, x: Tensor) -> Tensor:
    """Returns the stream (B, T, M) after a stage, of tokens (B, T) or of the stream before it."""
    step = model.begin((x.shape[0], x.shape[1]), x.device, None, None, "fused")
    x_BTM = model.entered(x, step) if first else x
    for block in model.blocks.values():  # type: ignore[operator]
        x_BTM = block(x_BTM, step)
    return model.normed(x_BTM)


class Stage(PipelineStage):
    """A stage whose copies sum their gradients once, after the last micro-batch."""

    ranks: Group
    model: Model

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:  # noqa: ANN401
        """Computes the gradients of a micro-batch."""
        self.ranks.begin(self.model, last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class Running(nn.Module):
    """A stage's model as the schedule runs it, in the dtype of the products."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.autocast: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Returns the stream after the stage."""
        with casting(self.model, self.autocast):
            made = self.model(x)
        return made.to(self.model.dtype)  # as it is sent


class Staged:
    """The pipeline of a run: the schedule of a step's micro-batches, and single passes for validation."""

    def __init__(self, model: Model, group: Group) -> None:
        self.model, self.group, self.running = model, group, Running(model)
        self.first, self.last = group.stage == 0, group.stage == group.stages - 1
        self.schedule: Schedule1F1B | None = None
        self._measure: Any = None

    def gradients(
        self, batches: Sequence[Batch], counted: int, *, z: float, rows: int | None, autocast: torch.dtype | None
    ) -> Tensor:
        """Adds the gradients of a step's batches over their `counted` targets; returns their nats on the last stage."""
        found: list[Tensor] = []
        self.running.autocast = autocast

        def measure(x_BTM: Tensor, targets_BT: Tensor) -> Tensor:
            with casting(self.model, autocast):
                loss = self._loss(x_BTM, targets_BT, z, rows)
            found.append(loss.nats)
            return loss.total / max(1, counted)

        if self.schedule is None:
            self.schedule = self._schedule(batches)
        self._measure = measure
        ids = (torch.cat([batch.ids for batch in batches]),) if self.first else ()
        targets = torch.cat([batch.targets for batch in batches]) if self.last else None
        self.schedule.step(*ids, target=targets, losses=[] if self.last else None, return_outputs=False)
        return torch.stack(found).sum() if found else torch.zeros((), device=self.model.device)

    def _schedule(self, batches: Sequence[Batch]) -> Schedule1F1B:
        ids, group = batches[0].ids, self.group
        stream = torch.empty(*ids.shape, self.model.spec.d_model, dtype=self.model.dtype, device="meta")
        stage = Stage(
            self.running,
            group.stage,
            group.stages,
            group.device,
            input_args=ids.to("meta") if self.first else stream.requires_grad_(),
            output_args=stream.requires_grad_(),
            group=group.neighbours,
        )
        stage.ranks, stage.model = group, self.model
        # a schedule without a loss, on whatever stage, has no backward pass
        return Schedule1F1B(stage, len(batches), loss_fn=lambda *given: self._measure(*given), scale_grads=False)

    @torch.no_grad()
    def nats(self, batch: Batch, *, rows: int | None = None) -> Tensor:
        """Returns the nats of a batch on the last stage, 0 on the others."""
        group, at = self.group, self.group.stage
        x = batch.ids
        if not self.first:
            x = torch.empty(*batch.ids.shape, self.model.spec.d_model, dtype=self.model.dtype, device=group.device)
            dist.recv(x, group=group.neighbours, group_src=at - 1)
        made = self.model(x)
        if self.last:
            return self._loss(made, batch.targets, 0.0, rows).nats
        dist.send(made.to(self.model.dtype).contiguous(), group=group.neighbours, group_dst=at + 1)
        return torch.zeros((), device=group.device)

    def _loss(self, x_BTM: Tensor, targets_BT: Tensor, z: float, rows: int | None) -> Loss:
        model = self.model
        x_NM, targets_N = x_BTM.flatten(0, -2), targets_BT.flatten()
        kept_N = targets_N != IGNORED
        if not bool(kept_N.all()):
            x_NM, targets_N = x_NM[kept_N], targets_N[kept_N]
        assert model.head is not None
        rows = rows or max(1, CHUNK // model.spec.n_vocab)
        held = list(model.head.parameters())
        return cross_entropy(model.scores, x_NM, targets_N, held, z=z, rows=rows, measure=model.measured)

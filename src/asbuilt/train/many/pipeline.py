"""Pipeline parallelism: each rank has stages, some of a model's blocks; PyTorch's schedule passes micro-batches on.

The first stage has what is before the blocks too, the last what is after them, and the loss. The schedule is 1F1B, or
with several stages a rank interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), of
`torch.distributed.pipelining`. Of p ranks with v stages each, rank r has the stages r, r + p, ..., r + (v - 1) p.

Shapes: batch B, tokens T, model width M, targets N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from asbuilt.nn.model import Model
from asbuilt.plan.stage import Stage as Chunk
from asbuilt.plan.stage import every_stage
from asbuilt.train.batch import IGNORED, Batch
from asbuilt.train.loss import Loss, head_loss
from asbuilt.train.many.group import Group
from asbuilt.train.step import casting

BEFORE, AFTER = ("embedding", "positions", "embedding_norm"), ("norm", "head")


def chunks_of(n_layers: int, group: Group) -> list[Chunk]:
    """Returns the stages of this rank, in the order in which a micro-batch passes them."""
    return list(every_stage(range(n_layers), group.stages * group.chunks))[group.stage :: group.stages]


def cut(model: Model, chunks: Sequence[Chunk]) -> None:
    """Leaves a model what these stages have of it, under its own paths, in place; `forward` runs one of them."""
    held = {str(i): model.blocks[i] for chunk in chunks for i, _ in chunk.blocks}
    model.blocks = nn.ModuleDict(held)  # type: ignore[assignment]
    for name in (*(() if chunks[0].first else BEFORE), *(() if chunks[-1].last else AFTER)):
        setattr(model, name, None)
    model.forward = partial(_through, model)  # type: ignore[method-assign]


def _through(model: Model, x: Tensor, chunk: Chunk) -> Tensor:
    """Returns the stream (B, T, M) after a stage, of tokens (B, T) or of the stream before it."""
    step = model.begin((x.shape[0], x.shape[1]), x.device, None, None, "fused")
    x_BTM = model.entered(x, step) if chunk.first else x
    for i, _ in chunk.blocks:
        x_BTM = model.blocks[str(i)](x_BTM, step)  # type: ignore[index]
    return model.normed(x_BTM) if chunk.last else x_BTM


class Stage(PipelineStage):
    """A stage that tells, before it computes the gradients of a micro-batch, whether that is its last."""

    begin: Callable[[bool], None]

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:  # noqa: ANN401
        """Computes the gradients of a micro-batch."""
        self.begin(last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class Running(nn.Module):
    """A stage as the schedule runs it, in the dtype of the products."""

    def __init__(self, model: Model, chunk: Chunk) -> None:
        super().__init__()
        self.model, self.chunk = model, chunk
        self.autocast: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Returns the stream after the stage."""
        with casting(self.model, self.autocast):
            made = self.model(x, self.chunk)
        return made.to(self.model.dtype)  # as it is sent


class Staged:
    """The pipeline of a run: the schedule of a step's micro-batches, and single passes for validation."""

    def __init__(self, model: Model, group: Group) -> None:
        self.model, self.group = model, group
        self.chunks = chunks_of(model.spec.n_layers, group)
        self.running = [Running(model, chunk) for chunk in self.chunks]
        self.first, self.last = self.chunks[0].first, self.chunks[-1].last
        self.schedule: Schedule1F1B | ScheduleInterleaved1F1B | None = None
        self._measure: Any = None

    def gradients(
        self, batches: Sequence[Batch], counted: int, *, z: float, rows: int | None, autocast: torch.dtype | None
    ) -> Tensor:
        """Adds the gradients of a step's batches over their `counted` targets; returns their nats on the last stage."""
        found: list[Tensor] = []
        for one in self.running:
            one.autocast = autocast

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

    def _schedule(self, batches: Sequence[Batch]) -> Schedule1F1B | ScheduleInterleaved1F1B:
        stages = [self._stage(one, batches[0].ids) for one in self.running]

        def measure(x_BTM: Tensor, targets_BT: Tensor) -> Tensor:
            return self._measure(x_BTM, targets_BT)

        # a schedule without a loss, on whatever stage, has no backward pass
        if len(stages) == 1:
            return Schedule1F1B(stages[0], len(batches), loss_fn=measure, scale_grads=False)
        return ScheduleInterleaved1F1B([*stages], len(batches), loss_fn=measure, scale_grads=False)

    def _stage(self, running: Running, ids: Tensor) -> Stage:
        group, chunk = self.group, running.chunk
        stream = torch.empty(*ids.shape, self.model.spec.d_model, dtype=self.model.dtype, device="meta")
        stage = Stage(
            running,
            chunk.number,
            chunk.pp,
            group.device,
            input_args=ids.to("meta") if chunk.first else stream.requires_grad_(),
            output_args=stream.requires_grad_(),
            group=group.neighbours,
        )
        stage.begin = partial(self._begin, chunk)
        return stage

    def _begin(self, chunk: Chunk, last: bool) -> None:
        """Has copies sum gradients once: of a stage's blocks after its last micro-batch, of all else at the end.

        The first of a rank's stages ends last.
        """
        self.group.begin(self.model, last and chunk is self.chunks[0])
        for i, _ in chunk.blocks if last else ():
            block = self.model.blocks[str(i)]  # type: ignore[index]
            assert isinstance(block, FSDPModule)
            block.set_requires_gradient_sync(True)

    @torch.no_grad()
    def nats(self, batch: Batch, *, rows: int | None = None) -> Tensor:
        """Returns the nats of a batch on the rank of the last stage, 0 on the others."""
        group, ranks = self.group, self.group.stages
        for chunk in self.chunks:
            x = batch.ids
            if not chunk.first:
                x = torch.empty(*batch.ids.shape, self.model.spec.d_model, dtype=self.model.dtype, device=group.device)
                dist.recv(x, group=group.neighbours, group_src=(chunk.number - 1) % ranks)
            made = self.model(x, chunk)
            if chunk.last:
                return self._loss(made, batch.targets, 0.0, rows).nats
            made = made.to(self.model.dtype).contiguous()
            dist.send(made, group=group.neighbours, group_dst=(chunk.number + 1) % ranks)
        return torch.zeros((), device=group.device)

    def _loss(self, x_BTM: Tensor, targets_BT: Tensor, z: float, rows: int | None) -> Loss:
        model = self.model
        x_NM, targets_N = x_BTM.flatten(0, -2), targets_BT.flatten()
        kept_N = targets_N != IGNORED
        if not bool(kept_N.all()):
            x_NM, targets_N = x_NM[kept_N], targets_N[kept_N]
        assert model.head is not None
        return head_loss(model, x_NM, targets_N, z=z, rows=rows, held=list(model.head.parameters()))

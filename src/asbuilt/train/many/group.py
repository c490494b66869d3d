"""The processes of a run: how they are arranged, and what they ask of each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule
from torch.distributed.rendezvous import rendezvous

from asbuilt import spec
from asbuilt.errors import InputError
from asbuilt.nn.model import Model
from asbuilt.train.batch import IGNORED, Batch, Preferences
from asbuilt.train.divisible import copies, require_shares
from asbuilt.train.many.context import Sequences
from asbuilt.train.many.extent import Extent
from asbuilt.train.ranks import Ranks
from asbuilt.train.recipe import Recipe
from asbuilt.train.step import local

T = TypeVar("T")
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # how often torchrun has started the processes again


MESH = ("stage", "replicate", "shard", "tensor")  # the busiest groups are of neighbours


class Pipeline(Protocol):
    """Passes the batches of a step, or one, through the stages."""

    def gradients(
        self, batches: Sequence[Batch], counted: int, *, z: float, rows: int | None, autocast: torch.dtype | None
    ) -> Tensor:
        """Returns this rank's nats of a step's batches, whose gradients it has added."""
        ...

    def nats(self, batch: Batch, *, rows: int | None = None) -> Tensor:
        """Returns this rank's nats of a batch."""
        ...


class Arrangement(NamedTuple):
    """How many processes there are of each kind: each divides what those after it hold together."""

    replicate: int
    shard: int
    tensor: int = 1
    expert: int = 1  # of the ranks that share batches
    stages: int = 1
    chunks: int = 1  # of the blocks of a rank of the pipeline
    context: int = 1  # of the ranks that share batches

    @property
    def data(self) -> int:
        """Shares of each batch: of its sequences, and of their tokens."""
        return self.replicate * self.shard

    @property
    def of_experts(self) -> tuple[int, int]:
        """How many ranks hold copies of the same experts, and how many divide those that a copy holds."""
        alone = self.shard == 1
        return (self.replicate // self.expert, 1) if alone else (self.replicate, self.shard // self.expert)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank holds of the model of `spec`: the place of each of its tensors in the whole one, by path.

    Of the parameters `partial` each rank that divides layers has a part of the gradient alone; `copies` tells how many
    ranks hold the same part of a parameter.
    """

    spec: spec.Model
    extents: dict[str, Extent]
    partial: list[nn.Parameter]
    copies: dict[Tensor, int]


class Group(Ranks):
    """All processes of a run: `number` and `count` are those of the shares of a batch.

    There are `replicate` groups of `shard` that hold one copy of the weights together, each of which is `tensor`
    processes that compute each layer together. Of neighbours that share batches, `expert` hold a mixture's experts
    together; `experts` is the mesh of those that hold the same. `context` neighbours have parts of the same
    `sequences`. All of these are of one of `stages`.
    """

    held: Held
    pipeline: Pipeline | None = None
    sequences: Sequences | None = None

    def __init__(self, at: Arrangement, device: str) -> None:
        self.at = at
        self.shard, self.tensor, self.expert, self.stages = at.shard, at.tensor, at.expert, at.stages
        self.chunks = at.chunks
        dense, spread = (at.stages, *at[:3]), (at.stages, *at.of_experts, at.expert, at.tensor)
        self.mesh = mesh = init_device_mesh(device, dense, mesh_dim_names=MESH)
        self.spread = init_device_mesh(device, spread, mesh_dim_names=(*MESH[:3], "expert", "tensor"))
        self.stage, self.neighbours = mesh.get_local_rank("stage"), mesh.get_group("stage")
        self.data, self.experts = mesh["replicate", "shard"], self.spread["replicate", "shard"]
        self.everyone = self.data._flatten("data").get_group()  # with whom this rank shares batches
        self.number, self.count = dist.get_rank(self.everyone), at.data
        self.rows = self.number // at.context, at.data // at.context
        if at.context > 1:
            divided = (at.stages, self.rows[1], at.context, at.tensor)
            names = ("stage", "rows", "context", "tensor")
            along = init_device_mesh(device, divided, mesh_dim_names=names)
            self.sequences = Sequences(along.get_group("context"), along.get_local_rank("context"), at.context)
        self.first = dist.get_rank() == 0
        self.together = dist.get_world_size() // self.count

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        kind = self.mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def total(self, value: float) -> float:
        """Returns the sum of the ranks' values."""
        return float(self.summed(torch.tensor(value, dtype=torch.float64)))

    def summed(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the ranks' tensors."""
        made = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(made, group=self.everyone)
        return made

    def along(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the tensors of the ranks that have parts of the same sequences."""
        if self.sequences is None:
            return tensor
        made = tensor.detach().clone()
        dist.all_reduce(made, group=self.sequences.group)
        return made

    def overall(self, value: float) -> float:
        """Returns the sum of the values of all ranks and stages."""
        made = torch.tensor(self.total(value), dtype=torch.float64, device=self.device)
        dist.all_reduce(made, group=self.neighbours)
        return float(made)

    def pipelined(
        self, batches: Sequence[Batch], counted: int, *, z: float, rows: int | None, autocast: torch.dtype | None
    ) -> Tensor | None:
        """Computes the gradients of a step by a pipeline, and returns this rank's nats; None if there is none."""
        one = self.pipeline
        return None if one is None else one.gradients(batches, counted, z=z, rows=rows, autocast=autocast)

    def nats(self, batch: Batch, *, rows: int | None) -> Tensor | None:
        """Returns this rank's nats of a batch that passes through a pipeline; None if there is none."""
        return None if self.pipeline is None else self.pipeline.nats(batch, rows=rows)

    def anywhere(self, value: float) -> float:
        """Returns the sum of the values of all processes."""
        made = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(made)
        return float(made)

    def begin(self, model: Model, last: bool) -> None:
        """Has gradients summed over the copies after the last micro-batch alone."""
        assert isinstance(model, FSDPModule)
        if self.shard == 1:
            model.set_requires_gradient_sync(last)
        else:
            model.set_requires_all_reduce(last)

    def finish(self) -> None:
        """Adds up the gradients of which each rank of a layer has a part."""
        grads = [local(one.grad) for one in self.held.partial if one.grad is not None]
        if grads:
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=self.mesh.get_group("tensor"))
            for grad, found in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(found.view_as(grad))

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Returns the norm of the whole gradient."""
        found = torch.zeros((), dtype=torch.float64, device=self.device)
        for one in parameters:
            if one.grad is not None:
                found += local(one.grad).double().square().sum() / self.held.copies[one]
        dist.all_reduce(found)
        return found.sqrt().float()

    def clip(self, parameters: Sequence[Tensor], most: float, norm: Tensor) -> None:
        """Scales this rank's parts of the gradient, which different ranks may divide."""
        parts = [local(one.grad) for one in parameters if one.grad is not None]
        factor = (most / (norm + 1e-6)).clamp(max=1.0)  # as PyTorch's own does
        torch._foreach_mul_(parts, factor)  # pyright: ignore[reportPrivateImportUsage]

    def least(self, value: int) -> int:
        """Returns the least value of any process."""
        made = torch.tensor(value, device=self.device)
        dist.all_reduce(made, dist.ReduceOp.MIN)
        return int(made)

    def share(self, batch: Batch) -> Batch:
        """Returns this rank's share of a batch; a rank for which there is no row has one without targets.

        Each rank validates on all pairs of preferences: one without targets would still be a term of the loss.
        """
        if isinstance(batch, Preferences):
            return batch
        number, shares = self.rows
        places = torch.arange(len(batch.ids)).tensor_split(shares)[number]
        empty = not len(places)
        places = places if len(places) else torch.zeros(1, dtype=torch.long)
        held = {field.name: getattr(batch, field.name) for field in fields(batch)}
        made = replace(batch, **{name: value[places] for name, value in held.items() if value is not None})
        return self.cut(replace(made, targets=torch.full_like(made.targets, IGNORED)) if empty else made)

    def cut(self, batch: Batch) -> Batch:
        """Returns this rank's tokens of its share of a batch."""
        return batch if self.sequences is None else self.sequences.cut(batch)

    def agree(self, find: Callable[[], T]) -> T:
        """Returns what the first rank finds, or raises the InputError that it meets, on all ranks."""
        told: list[Any] = [None, None]
        if self.first:
            try:
                told[0] = find()
            except InputError as error:
                told[1] = vars(error)
        dist.broadcast_object_list(told)
        if told[1] is not None:
            raise InputError(**told[1])
        return told[0]


def restarted() -> bool:
    """Returns whether torchrun has started this process again, after one of the run was lost."""
    return int(os.environ.get(RESTARTS, "0")) > 0


@contextmanager
def joined(recipe: Recipe) -> Iterator[Group]:
    """Yields the processes of a run, connected; raises InputError if they cannot be arranged as its recipe says."""
    arrangement = arranged(recipe, int(os.environ["WORLD_SIZE"]))
    own = not dist.is_initialized()
    cuda = torch.cuda.is_available()
    if own:
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # torchrun keeps its store when it starts processes again, and with it the addresses of those that are gone
        store, rank, size = next(rendezvous("env://"))
        attempt = PrefixStore(f"attempt {os.environ.get(RESTARTS, '0')}", store)
        backend = "cuda:nccl,cpu:gloo" if cuda else "gloo"
        dist.init_process_group(backend, store=attempt, rank=rank, world_size=size)
    try:
        yield Group(arrangement, "cuda" if cuda else "cpu")
    finally:
        if own:
            dist.destroy_process_group()


def arranged(recipe: Recipe, ranks: int) -> Arrangement:
    """Returns how a number of processes is arranged; raises InputError if it cannot be as the recipe says."""
    given = recipe.parallel
    if given.ranks and given.ranks != ranks:
        raise InputError(
            f"torchrun has started {ranks}", field="parallel.ranks", value=given.ranks, allowed=f"0 or {ranks}"
        )
    data = copies(recipe, ranks)
    shard = given.shard or data
    if data % shard:
        kind = "data-parallel " if data < ranks else ""
        raise InputError(field="parallel.shard", value=shard, allowed=f"0 or a divisor of the {data} {kind}ranks")
    if (shard if shard > 1 else data) % given.expert:
        held = f"the {shard} ranks that divide weights" if shard > 1 else f"the {data} ranks that share batches"
        raise InputError(field="parallel.expert", value=given.expert, allowed=f"a divisor of {held}")
    require_shares(recipe, data)
    if recipe.optimizer.name not in OPTIMIZERS:
        raise InputError(
            "not for many ranks", field="optimizer.name", value=recipe.optimizer.name, allowed=" or ".join(OPTIMIZERS)
        )
    return Arrangement(
        data // shard, shard, given.tensor, given.expert, given.pipeline, given.interleave, given.context
    )


# Their updates are elementwise: a part of a weight needs nothing of the others.
OPTIMIZERS = ("adamw", "sgd")

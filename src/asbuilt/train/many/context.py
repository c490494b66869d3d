"""Context parallelism: each rank has some tokens of a sequence, and attention gathers the keys and values of all.

Of 2n equal runs of a sequence, rank r of n has the runs r and 2n-1-r: under a causal mask every rank then has as many
scores to compute (Llama 3, arXiv 2407.21783, section 3.3.2, which gathers keys and values too). Gathering them is
differentiable: their gradients, of which each rank has a part, are summed and scattered back. Gradients of weights are
summed over these ranks as over those that read other sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from asbuilt.nn.cache import Cache
from asbuilt.nn.model import Model
from asbuilt.nn.step import DividedStep
from asbuilt.spec.part import Kernel
from asbuilt.train.batch import Batch

functional = torch.ops._c10d_functional  # which selective checkpointing sees, to keep what others have sent


class _Gathered(torch.autograd.Function):
    """The ranks' x, one after the other along the first dimension; backward the sum of their gradients of this one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ANN401
        ctx.group = group
        return functional.wait_tensor(functional.all_gather_into_tensor(x, group.size(), group.group_name))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        ranks, name = ctx.group.size(), ctx.group.group_name
        return functional.wait_tensor(functional.reduce_scatter_tensor(d.contiguous(), "sum", ranks, name)), None


@dataclass(frozen=True)
class Sequences:
    """The `ranks` of a group that divide each sequence, as one of them sees them."""

    group: ProcessGroup
    rank: int
    ranks: int

    def places(self, tokens: int) -> tuple[range, ...]:
        """Returns the positions of this rank's tokens, in two runs, of sequences of so many."""
        run = tokens // (2 * self.ranks)
        return tuple(range(i * run, (i + 1) * run) for i in (self.rank, 2 * self.ranks - 1 - self.rank))

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        """Returns x of the tokens of all ranks, in the order of their positions along `dim`."""
        held = _Gathered.apply(x.movedim(dim, 0).contiguous(), self.group)
        assert isinstance(held, Tensor)
        first, second = held.unflatten(0, (self.ranks, 2, -1)).unbind(1)
        return torch.cat((first, second.flip(0))).flatten(0, 1).movedim(0, dim)

    def cut(self, batch: Batch) -> Batch:
        """Returns this rank's tokens of a batch, and their targets."""
        at = torch.cat([torch.arange(run.start, run.stop) for run in self.places(batch.ids.shape[1])])
        held = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return replace(batch, **{name: value[:, at] for name, value in held.items() if value is not None})


def divide_sequences(model: Model, sequences: Sequences) -> None:
    """Has the passes of a model be over this rank's tokens, in place."""
    model.begin = partial(_begin, model, sequences)  # type: ignore[method-assign]


def _begin(
    model: Model,
    sequences: Sequences,
    shape: tuple[int, int],
    device: torch.device,
    cache: Cache | None,
    valid_BT: Tensor | None,
    kernel: Kernel,
    reach: tuple[int, ...] | None = None,
) -> DividedStep:
    assert cache is valid_BT is reach is None, "texts without padding are trained on"
    length = shape[1] * sequences.ranks
    return DividedStep(shape, device, others=sequences, length=length, kernel=kernel, dtype=model.dtype)

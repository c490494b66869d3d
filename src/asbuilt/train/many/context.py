"""Context parallelism: each rank has some tokens of a sequence, and attention gathers the keys and values of all.

Of 2n equal runs of a sequence, rank r of n has the runs r and 2n-1-r: under a causal mask every rank then has as many
scores to compute (Llama 3, arXiv 2407.21783, section 3.3.2, which gathers keys and values too). Gathering them is
differentiable: their gradients, of which each rank has a part, are summed and scattered back. Gradients of weights are
summed over these ranks as over those that read other sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_gather_single_autograd

from asbuilt.nn.cache import Cache
from asbuilt.nn.model import Model
from asbuilt.nn.step import DividedStep
from asbuilt.spec.part import Kernel
from asbuilt.train.batch import Batch


@dataclass(frozen=True)
class Sequences:
    """The ranks of a group that divide each sequence, as one of them sees them."""

    group: ProcessGroup

    @property
    def ranks(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group)

    def places(self, tokens: int) -> tuple[range, ...]:
        """Returns the positions of this rank's tokens, in two runs, of sequences of so many."""
        rank, run = dist.get_rank(self.group), tokens // (2 * self.ranks)
        return tuple(range(i * run, (i + 1) * run) for i in (rank, 2 * self.ranks - 1 - rank))

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        """Returns x of the tokens of all ranks, in the order of their positions along `dim`."""
        held = all_gather_single_autograd(x.movedim(dim, 0).contiguous(), 0, self.group)
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

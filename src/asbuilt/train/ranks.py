"""What a step asks of the other processes of a run; alone there are none, and nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asbuilt.nn.model import Model
from asbuilt.train.batch import Batch


class Ranks:
    """The processes that share each step's batch, its sequences or their tokens: `count`, this one being `number`.

    This class is a process alone; `asbuilt.train.many` has that of many.
    """

    number: int = 0
    count: int = 1
    rows: tuple[int, int] = (0, 1)  # which share of a batch's sequences this one reads, and of how many
    first: bool = True  # the one that reports, and writes the log and the exported model
    together: int = 1  # processes that compute one share of a batch

    def total(self, value: float) -> float:
        """Returns the sum of the ranks' values."""
        return value

    def summed(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the ranks' tensors."""
        return tensor

    def along(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the tensors of the ranks that have parts of the same sequences."""
        return tensor

    def begin(self, model: Model, last: bool) -> None:
        """Prepares for the next micro-batch of a step, or for its last."""

    def pipelined(
        self, batches: Sequence[Batch], counted: int, *, z: float, rows: int | None, autocast: torch.dtype | None
    ) -> Tensor | None:
        """Computes the gradients of a step by a pipeline, and returns this rank's nats; None if there is none."""
        return None

    def nats(self, batch: Batch, *, rows: int | None) -> Tensor | None:
        """Returns this rank's nats of a batch that passes through a pipeline; None if there is none."""
        return None

    def overall(self, value: float) -> float:
        """Returns the sum of the values of all ranks and stages."""
        return self.total(value)

    def finish(self) -> None:
        """Completes the gradients after the last micro-batch of a step."""

    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Returns the norm of the whole gradient."""
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)

    def clip(self, parameters: Sequence[Tensor], most: float, norm: Tensor) -> None:
        """Scales the gradient, which has this norm, to at most another."""
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm, foreach=True)

    def least(self, value: int) -> int:
        """Returns the least value of any process."""
        return value

    def share(self, batch: Batch) -> Batch:
        """Returns this rank's share of a batch."""
        return batch

    def cut(self, batch: Batch) -> Batch:
        """Returns this rank's tokens of its share of a batch."""
        return batch


ALONE = Ranks()

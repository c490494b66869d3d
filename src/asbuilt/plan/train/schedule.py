"""Pipeline schedules: how long a stage idles, and the micro-batches whose saved tensors it holds at once.

Times are in micro-batches of a stage, forward and backward, of which the forward pass, the gradient of the input and
that of the weights are taken to be a third each.
"""

from __future__ import annotations

from typing import Literal

from asbuilt.errors import InputError

Schedule = Literal["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"]
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe")
SAID = {
    "1f1b": "(p-1) / (m + p-1), of m micro-batches in p stages (PipeDream-Flush, arXiv 2104.04473)",
    "interleaved": "(p-1) / (mv + p-1), with v chunks a stage (arXiv 2104.04473, section 2.2)",
    "zb-h1": "a third of 1F1B's: gradients of weights fill it (ZB-H1, arXiv 2401.10241)",
    "zb-v": "none if forward, backward and gradients of weights take equally long (ZB-V, arXiv 2405.15362)",
    "dualpipe": "(p/2 - 1) of forward, two backward, less three gradients of weights: two thirds of a micro-batch each "
    "(arXiv 2412.19437, table 2)",
}


def idle(schedule: Schedule, stages: int, chunks: int) -> float:
    """Returns the micro-batches that a stage could have computed while it idles."""
    if stages == 1:
        return 0.0
    if schedule == "zb-v":
        return 0.0
    if schedule == "zb-h1":
        return (stages - 1) / 3
    if schedule == "dualpipe":
        return (stages / 2 - 1) * 2 / 3
    return (stages - 1) / chunks


def held(schedule: Schedule, number: int, stages: int, chunks: int, micro_batches: int) -> int:
    """Returns the model chunks, each of one micro-batch, whose saved tensors stage `number` holds at once."""
    after = stages - number  # this stage and those after it
    if stages == 1:
        most = 1
    elif schedule == "zb-v":  # as many as the first stage of 1F1B, in halves
        most = stages * chunks
    elif schedule == "dualpipe":
        most = stages + 1
    elif chunks == 1:
        most = after
    else:
        most = 2 * after - 1 + (chunks - 1) * stages
    return min(micro_batches * chunks, most)


def require(schedule: Schedule, stages: int, micro_batches: int) -> None:
    """Raises InputError for a schedule that such a pipeline cannot have."""
    if schedule == "dualpipe" and (stages % 2 or micro_batches % 2 or micro_batches < stages):
        raise InputError(
            "DualPipe feeds an even number of stages from both ends",
            field="schedule",
            value=schedule,
            allowed="an even pp, and an even number of micro-batches, pp or more",
            fix=f"pp is {stages} and --accumulate {micro_batches}",
        )

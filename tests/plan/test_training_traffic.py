"""Traffic counted as it passes: at PyTorch's own process group, and schedules of pipelines played through."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from formulas import every_section
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from asbuilt.catalog import machines
from asbuilt.families import llama
from asbuilt.nn import build
from asbuilt.plan import Options, Subject
from asbuilt.plan.train.plan import attempt
from asbuilt.plan.train.stages import StageMemory
from asbuilt.spec import Rotary

H100 = machines.find("h100-sxm")
RANKS = 4
SPEC = llama.build(
    n_vocab=512,
    d_model=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    d_ff=64,
    max_positions=16,
    rotary=Rotary(d_rotary=8),
    name="small",
)


@pytest.fixture
def group() -> Iterator[Any]:
    """Four ranks of which only this one is real; what it hands over to be sent is seen, and goes nowhere."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=RANKS)
    yield dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


class Sent(TorchDispatchMode):
    """Adds up what one rank of a ring sends: of a gathered or scattered tensor all but its own share."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if func.namespace == "c10d":
            name, (out, inside) = func._schema.name, args[:2]
            whole = {"c10d::_allgather_base_": out, "c10d::_reduce_scatter_base_": inside}[name]
            self.nbytes += whole.numel() * whole.element_size() * (RANKS - 1) // RANKS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_fully_sharded_training_sends_what_zero_3_is_said_to(group: Any, accumulate: int) -> None:  # noqa: ANN401
    """PyTorch's FSDP of each block and of what is outside, over micro-batches: every gather and every scatter."""
    from torch.distributed.fsdp import fully_shard

    model = build(SPEC, dtype=torch.bfloat16, seed=0)
    for block in model.blocks:
        fully_shard(block, mesh=group)
    fully_shard(model, mesh=group)
    with Sent() as sent:
        for _ in range(accumulate):
            model(torch.zeros(2, 16, dtype=torch.long)).float().mean().backward()
    options = Options(gpus=RANKS, zero=3, batch=2, seq=16, accumulate=accumulate)
    assert attempt(Subject(SPEC), H100, options).step.data.bytes == sent.nbytes


def interleaved(stages: int, chunks: int, micro: int) -> tuple[list[int], tuple[int, int], Fraction]:
    """Plays Megatron-LM's interleaved schedule (arXiv 2104.04473): most chunks kept by each stage, most of the model's
    first and last part, share of time idle.

    Chunk c of stage s is the model's part c x stages + s. Micro-batches go in rounds of as many as there are stages,
    each round through all chunks. A stage warms up with 2 (stages - s - 1) + (chunks - 1) x stages forward passes, then
    takes one forward and one backward by turns. Of one chunk, forward takes one unit and backward two.
    """
    rounds = [
        (c, first + i) for first in range(0, micro, stages) for c in range(chunks) for i in range(stages)
    ]  # (chunk, micro-batch), in the order of forward passes
    ready: dict[tuple[str, int, int], int] = {}
    clocks, kept, most, done, order = [0] * stages, [0] * stages, [0] * stages, [0] * stages, []
    of_part, most_of_part = [0] * (chunks * stages), [0] * (chunks * stages)
    for s in range(stages):
        warm = min(len(rounds), 2 * (stages - s - 1) + (chunks - 1) * stages)
        forward = [("f", c * stages + s, i) for c, i in rounds]
        backward = [("b", (chunks - 1 - c) * stages + s, i) for c, i in rounds]
        work = forward[:warm]
        for i in range(len(rounds) - warm):
            work += [forward[warm + i], backward[i]]
        order.append(work + backward[len(rounds) - warm :])
    last = chunks * stages - 1
    while any(done[s] < 2 * len(rounds) for s in range(stages)):
        for s in range(stages):
            while done[s] < len(order[s]):
                kind, part, i = order[s][done[s]]
                needs = [("f", part - 1, i)] if kind == "f" and part else []
                if kind == "b":
                    needs = [("f", part, i)] + ([("b", part + 1, i)] if part < last else [])
                if any(need not in ready for need in needs):
                    break
                start = max([clocks[s], *(ready[need] for need in needs)])
                clocks[s] = ready[kind, part, i] = start + (1 if kind == "f" else 2)
                kept[s] += 1 if kind == "f" else -1
                most[s] = max(most[s], kept[s])
                of_part[part] += 1 if kind == "f" else -1
                most_of_part[part] = max(most_of_part[part], of_part[part])
                done[s] += 1
    length = max(clocks)
    return most, (most_of_part[0], most_of_part[-1]), Fraction(length - 3 * len(rounds), length)


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 4))
def test_an_interleaved_pipeline_played_through(stages: int, chunks: int, rounds: int) -> None:
    micro = stages * rounds
    most, ends, idle = interleaved(stages, chunks, micro)
    spec = llama.build(
        n_vocab=64, d_model=8, n_layers=stages * chunks, n_heads=1, d_ff=8, max_positions=8, rotary=Rotary(d_rotary=8)
    )
    options = Options(gpus=stages, pp=stages, accumulate=micro, seq=4)
    subject = Subject(spec)
    trial = attempt(subject, H100, options)
    assert trial.step.job.interleave == chunks
    every = every_section(subject.shares(options), stages)
    made = [StageMemory(section=s, layout=options.layout, job=trial.step.job) for s in every]
    assert [stage.chunks_in_flight for stage in made] == most
    assert (made[0].outer_in_flight, made[-1].outer_in_flight) == ends  # what lies before the blocks, and after
    assert trial.step.bubble == pytest.approx(float(idle))

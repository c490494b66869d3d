"""Bytes that one rank of a run holds: its state, what a forward pass saves, and the peak of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from asbuilt.train.batch import Batch
from asbuilt.train.loop import Run
from asbuilt.train.loss import headless
from asbuilt.train.many.divide import reshard
from asbuilt.train.step import Stepped, local

COLLECTIVE = "a collective"


class Same:
    """A batch of random tokens without padding, which a run gets in every step; a source is as long."""

    def __init__(self, run: Run) -> None:
        data, spec = run.recipe.data, run.model.spec
        ids = torch.randint(spec.n_vocab, (data.batch // run.ranks.count, data.context))
        self.made = Batch(ids=ids, targets=ids.roll(-1, 1), source=ids.clone() if "source" in spec.reads else None)

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        return self.made

    def validation(self) -> Iterator[Batch]:
        yield self.made


def measured(run: Run, step: Callable[[], Stepped]) -> tuple[Stepped, dict[str, int]]:
    """A step, and the bytes of state, of what a forward pass saves before it, and of its peak.

    The optimizer's counters of steps are left out.
    """
    weights = sum(local(p).nbytes for p in run.model.parameters())
    moments = sum(local(x).nbytes for x in _moments(run))
    saved = saved_bytes(run)
    run.optimizer.zero_grad()
    made = list[Stepped]()
    peak = most(changes(lambda: made.append(step())))
    gradients = sum(local(p.grad).nbytes for p in run.model.parameters() if p.grad is not None)
    return made[0], {"state": weights + gradients + moments, "saved": saved, "peak": peak + weights + moments}


def saved_bytes(run: Run) -> int:
    """Bytes that a forward pass leaves allocated, and its inputs, without weights that stay gathered."""
    batch = run.data.batch(0)
    kept: list[Tensor] = []

    def forward() -> None:
        with headless(run.model):
            kept.append(run.model(batch.ids, **batch.inputs))

    forward()  # selective checkpointing counts a block's products in its first pass
    kept.clear()
    reshard(run.model)
    alive = sum(changes(forward))
    gathered = sum(p.nbytes for p in run.model.parameters() if not hasattr(p, "to_local"))
    kept.clear()
    reshard(run.model)
    return alive - gathered + sum(tensor.nbytes for tensor in (batch.ids, *batch.inputs.values()))


def most(changed: list[int]) -> int:
    """The most of a sum."""
    now = peak = 0
    for nbytes in changed:
        now += nbytes
        peak = max(peak, now)
    return peak


class Apart(TorchDispatchMode):
    """Gives gloo copies of what a collective is called with: its threads hold that for a moment after it returns."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        with record_function(COLLECTIVE):
            own = tree_map_only(Tensor, torch.clone, args)
            made = func(*own, **(kwargs or {}))
            Work.unbox(made[-1] if isinstance(made, tuple) else made).wait()
            for there, here in zip(tree_leaves(args), tree_leaves(own), strict=True):
                if isinstance(there, Tensor):
                    there.copy_(here)
        return made


def changes(work: Callable[[], object]) -> list[int]:
    """What PyTorch's allocator gives out during `work`, and takes back as a negative number of bytes, in order.

    What is allocated within a collective is left out: NCCL's buffers are not the allocator's. So is what was allocated
    before, and is freed whenever the garbage collector finds it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded, Apart():
        work()
    tree = recorded.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    found = sorted(_allocations(tree, inside=False), key=lambda one: one[0])
    own, kept = set[int](), list[int]()
    for _, address, nbytes, inside in found:
        if nbytes > 0:  # what gloo's own threads free is not seen: an address may be given out again
            (own.discard if inside else own.add)(address)
        if address in own:
            kept.append(nbytes)
            if nbytes < 0:
                own.remove(address)
    return kept


def _allocations(events: list[Any], *, inside: bool) -> Iterator[tuple[int, int, int, bool]]:
    """Yields the time, address and bytes of allocations, and whether a collective made them."""
    for event in events:
        if event.name == "[memory]":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, inside
        own = event.name == COLLECTIVE or event.name.startswith("gloo:")
        yield from _allocations(event.children, inside=inside or own)


def _moments(run: Run) -> Iterator[Tensor]:
    held = (each for one, _ in run.optimizer.made for each in one.state.values())
    return (value for each in held for value in each.values() if isinstance(value, Tensor) and value.dim())

"""Measuring the built model: its parameters, its FLOPs, its cache, what autograd keeps, its peak memory, its speed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from asbuilt.generate.cache import Cache
from asbuilt.measure.calibrate import quarter
from asbuilt.nn import build, built_parameters
from asbuilt.nn.modules import Model
from asbuilt.spec import model as spec
from asbuilt.spec.part import Kernel

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would announce itself on stderr


def parameters(model: Model) -> int:
    """Returns the number of parameters as built, each counted once however many names it has."""
    return sum(p.numel() for p in {id(p): p for p in built_parameters(model).values()}.values())


def weight_bytes(model: Model) -> int:
    """Returns the bytes of the parameters as built."""
    return sum(p.nbytes for p in {id(p): p for p in built_parameters(model).values()}.values())


def flops(description: spec.Model, tokens: int, batch: int = 1) -> int:
    """Returns what PyTorch's counter sees of one forward pass on the meta device, with the reference attention.

    The counter knows no fused attention on a CPU, and never halves a causal one.
    """
    model = build(description, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
        model(ids, **source_of(model, ids), kernel="reference")
    return counter.get_total_flops()


def source_of(model: Model, ids: Tensor) -> dict[str, Tensor]:
    """Returns what an encoder reads beside `ids`, a copy of them; nothing where there is no encoder."""
    return {} if model.encoder is None else {"source_BS": ids.clone()}


def cache_bytes(model: Model, batch: int, capacity: int) -> int:
    """Returns the bytes of an allocated cache."""
    table = model.any_weight
    return Cache(model.spec, batch=batch, capacity=capacity, dtype=table.dtype, device=table.device).nbytes


def saved_bytes(
    model: Model, tokens: int, batch: int = 1, kernel: Kernel = "fused", pooled: bool = False
) -> tuple[int, int]:
    """Returns the bytes autograd keeps of one training step: (by the model, by the loss), each storage once.

    Without a head there is no loss; `pooled` is a pass that ends in the pooler.
    """
    ids = torch.arange(batch * tokens).remainder(model.spec.embedding.n_vocab).view(batch, tokens)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept.setdefault(storage.data_ptr(), tensor)  # held, so that no address is used twice
        return tensor

    def total() -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model.pooled(ids, kernel=kernel) if pooled else model(ids, **source_of(model, ids), kernel=kernel)
        by_model = total()
        if pooled or model.head is None:
            return by_model, 0
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten().roll(-1))
    by_loss = total() - by_model
    del loss
    return by_model, by_loss


def peak_bytes(work: Callable[[], object]) -> int:
    """Returns the most bytes that PyTorch's allocator had given out at once during `work`, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")  # pyright: ignore
    now = peak = 0
    for _, nbytes in changes:
        now += nbytes
        peak = max(peak, now)
    return peak


def prefill_peak(model: Model, tokens: int) -> int:
    """Returns the peak bytes of a prefill: weights, the cache that it fills, and what the pass needs to work."""
    ids = _some_tokens(model, tokens)
    with torch.inference_mode():
        return weight_bytes(model) + peak_bytes(lambda: _prefill(model, ids))


def prefill_seconds(model: Model, tokens: int, repeats: int = 7) -> float:
    """Returns the lower quartile of the times of a prefill, its cache allocated each time, after one not counted."""
    ids = _some_tokens(model, tokens)
    with torch.inference_mode():
        _prefill(model, ids)
        return quarter([_timed(lambda: _prefill(model, ids)) for _ in range(repeats)])


def decode_seconds(model: Model, prompt: int, steps: int) -> float:
    """Returns the lower quartile of the times of a decode step, greedy, after a prompt of `prompt` tokens."""
    with torch.inference_mode():
        cache, logits = _prefill(model, _some_tokens(model, prompt), room=steps)
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            chosen = logits[:, -1].max(-1).indices
            logits = model(chosen[:, None], cache=cache, last=True)
            times.append(time.perf_counter() - start)
    return quarter(times)


def _some_tokens(model: Model, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.spec.embedding.n_vocab, (1, tokens), generator=generator)


def _prefill(model: Model, ids: Tensor, room: int = 0) -> tuple[Cache, Tensor]:
    dtype = model.any_weight.dtype
    cache = Cache(model.spec, batch=1, capacity=ids.shape[1] + room, dtype=dtype)
    return cache, cast(Tensor, model(ids, **source_of(model, ids), cache=cache, last=True))


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start

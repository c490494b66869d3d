"""Measuring a built model: parameters, FLOPs, cache, tensors saved by autograd, peak memory, speed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from asbuilt.dtypes import BLOCKS
from asbuilt.measure import timing
from asbuilt.measure.rates import lower_quartile
from asbuilt.nn import build, built_parameters
from asbuilt.nn.cache import Cache
from asbuilt.nn.fixed_inputs import sounds as spectrograms
from asbuilt.nn.fixed_inputs import source_of
from asbuilt.nn.image_encoder import ImageEncoder
from asbuilt.nn.model import Model
from asbuilt.nn.text_encoder import TextEncoder
from asbuilt.spec import PatchEmbedding, VisionLanguageModel, weights
from asbuilt.spec import model as spec
from asbuilt.spec.part import Kernel

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's banner on stderr


def parameters(model: Model) -> int:
    """Returns the number of parameters as built, shared ones counted once."""
    formats = {path: weight.format for path, weight, _ in weights(model.spec) if weight.format is not None}
    built = {id(p): (path, p) for path, p in built_parameters(model).items()}
    return sum(_numbers(p, formats.get(path)) for path, p in built.values())


def _numbers(parameter: Tensor, format: str | None) -> int:
    block, nbytes = (1, 1) if format is None else BLOCKS[format]
    return parameter.numel() // nbytes * block


def weight_bytes(model: Model) -> int:
    """Returns the bytes of the parameters as built."""
    return sum(p.nbytes for p in {id(p): p for p in built_parameters(model).values()}.values())


def flops(description: spec.Model, tokens: int, batch: int = 1, images: int = 0, sounds: int = 0) -> int:
    """Returns the FLOPs that PyTorch counts in one forward pass on the meta device, with the reference attention.

    The counter does not support fused attention on a CPU, and never halves causal attention.
    """
    model = build(description, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        ids, beside = given(model, torch.zeros(batch, tokens, dtype=torch.long, device="meta"), images, sounds)
        kept: dict[str, Cache] = {}
        if description.decodes and "tokens" in description.reads:
            kept["cache"] = Cache(description, batch=batch, capacity=tokens, dtype=torch.float32, device="meta")
        model(ids, **beside, **kept, kernel="reference")
    return counter.get_total_flops()


def given(model: Model, ids: Tensor, images: int = 0, sounds: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns a model's input for tokens `ids` (B, T), and its other inputs: a source, and `images` images or sounds.

    Each text has that many, whose placeholders come first, and after them those of `sounds` beside images. An image
    model's input is B images instead.
    """
    spec, patches = model.spec, model.spec.patches
    if patches is not None and "tokens" not in spec.reads:
        return _pixels(patches, ids, 1).squeeze(1), {}
    if "tokens" not in spec.reads:
        return spectrograms(spec, ids), {}
    if not (images or sounds) or not (patches or spec.heard is not None):
        return ids, source_of(model, ids)
    images, sounds = (images, sounds) if patches is not None else (0, images)
    taken = _placeholders(spec, images, sounds)
    if taken:
        other = next((i for i in range(spec.n_vocab) if i not in taken), 0)
        for token in set(taken):
            ids = ids.masked_fill(ids == token, other)
        placed = torch.tensor(taken[: ids.shape[1]], device=ids.device).expand(len(ids), -1)
        ids = torch.cat((placed, ids[:, placed.shape[1] :]), 1)
    seen = {"images": _pixels(patches, ids, images)} if patches is not None and images else {}
    return ids, seen | ({"audio": spectrograms(spec, ids, sounds)} if sounds else {})


def _placeholders(model: spec.Model, images: int, sounds: int) -> list[int]:
    """Returns the placeholders of so many images and sounds in a text."""
    seen = [model.vision.placeholder] * (images * model.image_tokens) if isinstance(model, VisionLanguageModel) else []
    return seen if model.heard is None else seen + [model.heard.placeholder] * (sounds * model.heard.n_tokens)


def _pixels(embedding: PatchEmbedding, ids: Tensor, images: int) -> Tensor:
    size = embedding.image_size
    shape = (len(ids), images, embedding.channels, size, size)
    return torch.linspace(-1, 1, math.prod(shape), device=ids.device).view(shape)


def cache_bytes(model: Model, batch: int, capacity: int, kv: str | None = None) -> int:
    """Returns the bytes of an allocated cache, in the format `kv` if it is given."""
    return Cache(model.spec, batch=batch, capacity=capacity, dtype=model.dtype, device=model.device, kv=kv).nbytes


def saved_bytes(
    model: Model,
    tokens: int,
    batch: int = 1,
    kernel: Kernel = "fused",
    images: int = 0,
    pooled: bool = False,
    sounds: int = 0,
    documents: Tensor | None = None,
) -> tuple[int, int]:
    """Returns the bytes that autograd saves in one training step, (by the model, by the loss), each storage once.

    Without a head there is no loss; with `pooled` the pass ends in the pooler. `documents` (B, T) are kept apart.
    """
    ids = torch.arange(batch * tokens).remainder(model.spec.n_vocab or 1).view(batch, tokens)
    ids, beside = given(model, ids, images, sounds)
    ids = ids.to(model.dtype) if ids.is_floating_point() else ids
    beside = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in beside.items()}
    beside |= {} if documents is None else {"documents_BT": documents}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept.setdefault(storage.data_ptr(), tensor)  # kept alive, so that no address is reused
        return tensor

    def total() -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = _pooled(model, ids, kernel) if pooled else model(ids, **beside, kernel=kernel)
        by_model = total()
        loss = None if pooled else _loss(model, logits, ids)
    by_loss = total() - by_model
    del loss
    return by_model, by_loss


def _pooled(model: Model, given: Tensor, kernel: Kernel) -> Tensor:
    assert isinstance(model, TextEncoder | ImageEncoder)
    return model.pooled(given, kernel=kernel)


def _loss(model: Model, logits: Tensor, ids: Tensor) -> Tensor | None:
    """Returns the cross-entropy of next tokens, or of each sequence, token or image with some label; None without."""
    if model.spec.gives == "labels":
        labels = logits.float().flatten(0, -2)
        return F.cross_entropy(labels, torch.zeros(len(labels), dtype=torch.long))
    if model.spec.gives != "logits":
        return None
    return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten().roll(-1))


def peak_bytes(work: Callable[[], object]) -> int:
    """Returns the peak bytes of PyTorch's allocator during `work`, beyond those allocated before."""
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
    """Returns the peak bytes of a prefill: weights, the cache that it fills, and working memory."""
    ids = _some_tokens(model, tokens)
    with torch.inference_mode():
        _prefill(model, ids)  # one-time work, such as choosing the faster kernel, allocates memory too
        return weight_bytes(model) + peak_bytes(lambda: _prefill(model, ids))


def prefill_seconds(model: Model, tokens: int, repeats: int = 7) -> float:
    """Returns the lower quartile of the times of a prefill with a fresh cache, after one warm-up."""
    ids = _some_tokens(model, tokens)
    with torch.inference_mode():
        _prefill(model, ids)
        return lower_quartile([timing.seconds(lambda: _prefill(model, ids)) for _ in range(repeats)])


def decode_seconds(model: Model, prompt: int, steps: int) -> float:
    """Returns the lower quartile of the times of a greedy decode step after a prompt of `prompt` tokens."""
    with torch.inference_mode():
        cache, logits = _prefill(model, _some_tokens(model, prompt), room=steps)
        times = []
        for _ in range(steps):
            start = timing.clock()
            chosen = logits[:, -1].max(-1).indices
            logits = model(chosen[:, None], cache=cache, last=True)
            times.append(timing.clock() - start)
    return lower_quartile(times)


def _some_tokens(model: Model, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.spec.n_vocab or 1, (1, tokens), generator=generator)


def _prefill(model: Model, ids: Tensor, room: int = 0) -> tuple[Cache, Tensor]:
    dtype = model.dtype
    cache = Cache(model.spec, batch=1, capacity=ids.shape[1] + room, dtype=dtype)
    ids, beside = given(model, ids)
    return cache, cast(Tensor, model(ids, **beside, cache=cache, last=True))

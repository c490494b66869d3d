"""Activation checkpointing: blocks whose activations are computed again in the backward pass.

`full` keeps a block's input alone and runs the whole block twice (Chen et al. 2016, arXiv 1604.06174). `selective`
keeps the results of matrix products and of attention too, and what other ranks have sent, and repeats only what is
cheap: norms, activations, sums, and products that are larger than both their factors: attention's scores, where no
fused kernel computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from asbuilt import spec
from asbuilt.nn.block import Block
from asbuilt.nn.model import Model
from asbuilt.nn.step import Step
from asbuilt.train.settings import Checkpointing

aten = torch.ops.aten
KEPT = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)
functional = torch.ops._c10d_functional
RECEIVED = frozenset(
    {functional.all_to_all_single.default, functional.all_gather_into_tensor.default} if dist.is_available() else ()
)
BATCHED = frozenset({aten.bmm.default, aten.baddbmm.default})


def recompute_blocks(model: Model, kind: Checkpointing) -> None:
    """Has every block of the model, an encoder's too, run with this kind of checkpointing from now on."""
    for one in model.modules():
        if isinstance(one, Block):
            vars(one).pop("forward", None)
            if kind != "none":
                more = {"context_fn": Selection(ends_with_sum(one.part))} if kind == "selective" else {}
                one.forward = partial(repeated, one.forward, more)


def repeated(forward: Callable[[Tensor, Step], Tensor], more: dict[str, Any], x_BTM: Tensor, step: Step) -> Tensor:
    """Returns forward(x, step), which the backward pass repeats from the step as it was before.

    Layers share tables, and lend keys and values, through the step: what is there already would not be made again, as
    tables and masks without gradients need not be.
    """
    if not torch.is_grad_enabled():
        return forward(x_BTM, step)
    before, first = step.copied(), True

    def run(x_BTM: Tensor) -> Tensor:
        nonlocal first
        given, first = step if first else before.copied(), False
        made = forward(x_BTM, given)
        if given is step:
            before.share(step)
        return made

    made = checkpoint(run, x_BTM, use_reentrant=False, preserve_rng_state=False, **more)
    assert isinstance(made, Tensor)
    return made


class Selection:
    """Which results of a block are kept: those of products and attention, as counted in its first pass.

    That of the last product is not, if it is only `added` to the stream: no gradient depends on it.
    """

    def __init__(self, added: bool) -> None:
        self.added, self.count = added, 0

    def __call__(self) -> Any:  # noqa: ANN401  a pair of context managers
        """Returns the contexts of one pass and of its repetition."""
        known, seen = self.count, {False: 0, True: 0}

        def policy(at: Any, op: Any, *args: Any, **more: Any) -> CheckpointPolicy:  # noqa: ANN401
            if op in RECEIVED:
                return CheckpointPolicy.MUST_SAVE
            cheap = op not in KEPT or (op in BATCHED and _larger(*args[-2:]))
            if cheap or not torch.is_grad_enabled():  # an indexer's scores may change in place
                return CheckpointPolicy.PREFER_RECOMPUTE
            seen[at.is_recompute] += 1
            self.count = max(self.count, seen[False])
            last = self.added and seen[at.is_recompute] == known
            return CheckpointPolicy.PREFER_RECOMPUTE if last else CheckpointPolicy.MUST_SAVE

        first, repetition = create_selective_checkpoint_contexts(policy)
        return first, _from_kept(repetition)


_REPEATS = ContextVar("repeats", default=False)


@contextmanager
def _from_kept(repetition: Any) -> Iterator[None]:  # noqa: ANN401
    token = _REPEATS.set(True)
    try:
        with repetition:
            yield
    finally:
        _REPEATS.reset(token)


def products_are_kept() -> bool:
    """Returns whether a block is being repeated from the products of its first pass: they are as that pass left them.

    What has changed such a product in place must not do so again.
    """
    return _REPEATS.get()


def _larger(a: Tensor, b: Tensor) -> bool:
    """Returns whether a batched product is larger than both factors, as the scores of attention are."""
    return a.shape[0] * a.shape[1] * b.shape[2] > max(a.numel(), b.numel())


def ends_with_sum(part: spec.Block) -> bool:
    """Returns whether a block ends with a product that is only added to the stream."""
    last = part.branches[-1]
    plain = isinstance(last.body, spec.MLP | spec.GatedMLP) and part.updates is None and last.streams is None
    scaled = last.layer_scale or last.gated or last.post_norm is not None or last.sum_norm is not None
    return plain and not scaled and last.beside is None

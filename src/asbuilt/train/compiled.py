"""torch.compile, when asked: every block becomes kernels of its own, forward and backward.

Equal blocks are compiled once. Norms, activations and sums are then fused; products and attention stay those of
PyTorch's libraries. The head and the loss run as they are, chunk by chunk.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.kernels.compiler import require_compiler
from asbuilt.nn.block import Block
from asbuilt.nn.model import Model
from asbuilt.nn.step import Step
from asbuilt.spec.part import walk

SHARED = ("uniform", "lengths", "reach", "positions_BT", "key_positions_BT")

Forward = Callable[[Tensor, Step], Tensor]


def compile_blocks(model: Model) -> None:
    """Has every block of the model run compiled from now on.

    Raises InputError without a compiler, and for experts, whose numbers of rows differ from batch to batch.
    """
    require_compiler(model.device.type, "step.compile")
    for path, part in walk(model.spec):
        if part.spreads():
            problem = f"{path} ({type(part).__name__}): its shapes depend on the tokens"
            raise InputError(problem, field="step.compile", value=True, allowed="false")
    # what our caches hold depends on nothing but their arguments
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    for one in model.modules():
        if isinstance(one, Block):
            one.forward = partial(settled, torch.compile(one.forward, dynamic=False))


def settled(forward: Forward, x_BTM: Tensor, step: Step) -> Tensor:
    """Returns forward(x, step); what all layers share is computed before: a compiler cannot see into how it is kept."""
    for name in SHARED:
        getattr(step, name)
    return forward(x_BTM, step)

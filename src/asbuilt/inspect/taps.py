"""Taps: every module's output in one forward pass, by path, in order of computation."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from asbuilt.nn.fixed_inputs import source_of
from asbuilt.nn.model import Model


def activations(model: Model, tokens_BT: Tensor) -> dict[str, Tensor]:
    """Returns the output of each module that returns one tensor, keyed by path; the logits' path is empty.

    The reference attention is used, so that differences come from the models rather than from the kernel. An encoder
    reads the same tokens. Modules that several depths run are named by the path of each use.
    """
    seen: dict[str, Tensor] = {}
    users: dict[str, list[str]] = {}
    for user, holder in model.spec.holders.items():
        users.setdefault(holder, []).append(user)

    def tap(path: str) -> torch.utils.hooks.RemovableHandle:
        uses = itertools.chain([path], users.get(path, ()))

        def keep(module: nn.Module, args: object, output: object) -> None:
            # what runs again in one use, as a norm before and after a block, is seen as it ran first
            if isinstance(output, Tensor) and (use := next(uses, None)) is not None:
                seen[use] = output

        return model.get_submodule(path).register_forward_hook(keep)

    handles = [tap(path) for path, _ in model.named_modules()]
    source = source_of(model, tokens_BT)
    try:
        with torch.no_grad():  # a map with a hook is called, where others of one input are multiplied at once
            seen[""] = model(tokens_BT, **source, kernel="reference")
    finally:
        for handle in handles:
            handle.remove()
    return seen

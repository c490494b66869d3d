"""Transformer blocks beside the stream, whose weights several depths may use.

Shapes: batch B, new tokens T, model width M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from asbuilt.nn.attention import Attention
from asbuilt.nn.feedforward import GatedMLP
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.norms import normed
from asbuilt.nn.registry import computes, optional
from asbuilt.nn.step import Step
from asbuilt.spec import side as spec

Adapt = Callable[[Tensor], tuple[Tensor, ...]]


@computes(spec.SharedTransformer)
class SharedTransformer(nn.Module):
    """ffn(ffn_norm(attention(norm([x, x_0])))).

    One that borrows its weights has no modules, and in each pass runs those of its lender, with a cache of its own.
    """

    norm: nn.Module | None
    ffn_norm: nn.Module | None
    attention: Attention
    ffn: GatedMLP

    def __init__(self, part: spec.SharedTransformer, path: str) -> None:
        super().__init__()
        self.part, self.path = part, path
        if part.weights_from is None:
            self.norm = optional(part.norm, f"{path}.norm")
            self.attention = Attention(part.attention, f"{path}.attention")
            self.ffn_norm = optional(part.ffn_norm, f"{path}.ffn_norm")
            self.ffn = GatedMLP(part.ffn, f"{path}.ffn")

    def holder(self, step: Step) -> SharedTransformer:
        """Returns the module that holds the weights: itself, which it then lends to later ones, or its lender."""
        name = self.part.weights_from
        if name is not None:
            lender = step.lenders[name]
            assert isinstance(lender, SharedTransformer)
            return lender
        if self.part.weights_name is not None:
            step.lenders[self.part.weights_name] = self
        return self

    @contextmanager
    def at_home(self, holder: SharedTransformer, step: Step) -> Iterator[None]:
        """Within it the holder's mixers find the caches of this module."""
        cache = step.cache
        if cache is not None and holder is not self:
            step.cache = cache.moved(self.path, holder.path)
        try:
            yield
        finally:
            step.cache = cache

    def forward(self, x_BTM: Tensor, step: Step, adapt: Adapt | None = None, beside: Adapt | None = None) -> Tensor:
        """Returns (B, T, M).

        `adapt` gives what is added to gate and up, from the feed-forward's input; `beside` to q, k and v, from that of
        attention.
        """
        assert step.entered_BTM is not None, "the stack must tell the stream before its first block"
        holder = self.holder(step)
        with self.at_home(holder, step):
            y = holder.attention(normed(holder.norm, torch.cat((x_BTM, step.entered_BTM), -1)), step, beside)
        h_BTM = normed(holder.ffn_norm, y)
        gate, up = holder.ffn.gate_up(h_BTM)
        if adapt is not None:
            to_gate, to_up = adapt(h_BTM)
            gate, up = gate + to_gate, up + to_up
        return holder.ffn.combined(gate, up)


@computes(spec.SideTransformer)
class SideTransformer(PartModule):
    """project(shared(x)), with low-rank maps of its own beside the gate and up, and beside q, k and v."""

    project: Linear
    adapt: Linear
    adapt_gate: Linear
    adapt_up: Linear

    def __init__(self, part: spec.SideTransformer, path: str) -> None:
        super().__init__(part, path)
        self.rank, self.attention_rank = part.rank, part.attention_rank
        self.shared = SharedTransformer(part.shared, f"{path}.shared")

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        adapt = None if self.rank is None else self.adapted
        beside = None if self.attention_rank is None else self.beside
        return self.project(self.shared(x_BTM, step, adapt, beside))

    def beside(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Returns what is added to q, k and v."""
        pairs = ((self.get_submodule(f"{name}_down"), self.get_submodule(f"{name}_up")) for name in "qkv")
        return tuple(up(down(x_BTD)) for down, up in pairs)

    def adapted(self, h_BTM: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what is added to gate and up, (B, T, d_ff) each."""
        low = self.adapt(h_BTM)
        return self.adapt_gate(low), self.adapt_up(low)

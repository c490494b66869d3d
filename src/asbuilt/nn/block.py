"""Residual branches and blocks.

Shapes: batch B, new tokens T, model width M.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asbuilt.nn.altup import AlternatingUpdates
from asbuilt.nn.laurel import Laurel
from asbuilt.nn.linear import PartModule
from asbuilt.nn.registry import computes, module, optional
from asbuilt.nn.step import Step
from asbuilt.nn.streams import HyperConnection
from asbuilt.spec import block as spec
from asbuilt.spec.part import Part


@computes(spec.Parallel)
class Parallel(nn.Module):
    """s attention(x) + t ffn(x)."""

    def __init__(self, part: spec.Parallel, path: str) -> None:
        super().__init__()
        self.attention = module(part.attention, f"{path}.attention")
        self.ffn = module(part.ffn, f"{path}.ffn")
        self.part = part

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        part = self.part
        mixed, y = (
            body(x_BTM if scale == 1.0 else x_BTM * scale, step)
            for body, scale in zip((self.attention, self.ffn), part.input_scales, strict=True)
        )
        first, second = part.output_scales
        return torch.add(mixed if first == 1.0 else mixed * first, y, alpha=second)


@computes(spec.Branch)
class Branch(PartModule):
    """sum_norm(r + scale * g * post_norm(body(norm(x))))."""

    layer_scale: Tensor | None
    gate: Tensor | None

    def __init__(self, part: spec.Branch, path: str) -> None:
        super().__init__(part, path)
        if not part.layer_scale:
            self.register_parameter("layer_scale", None)
        if not part.gated:
            self.register_parameter("gate", None)
        self.side = optional(part.side, f"{path}.side")
        self.norm = optional(part.norm, f"{path}.norm")
        self.streams = None if part.streams is None else HyperConnection(part.streams, f"{path}.streams")
        self.body = module(part.body, f"{path}.body")
        self.post_norm = optional(part.post_norm, f"{path}.post_norm")
        self.beside = None if part.beside is None else Laurel(part.beside, f"{path}.beside")
        self.sum_norm = optional(part.sum_norm, f"{path}.sum_norm")
        self.scale, self.after_source = part.scale, part.after_source
        self.parallel, self.block_input = part.parallel, part.block_input
        self.stream_scale, self.normed = part.stream_scale, part.normed

    def forward(self, x_BTM: Tensor, stream_BTM: Tensor, step: Step) -> Tensor:
        """Returns the stream with this branch of x added."""
        if self.streams is not None:
            read_BTM, post, mix = self.streams(stream_BTM)
            return self.streams.write(stream_BTM, self.output(read_BTM, step), post, mix)
        if self.normed and self.norm is not None:
            stream_BTM = self.norm(x_BTM)
            y = self.of(stream_BTM, step)
        else:
            y = self.output(x_BTM, step)
        stream_BTM = stream_BTM if self.stream_scale == 1.0 else stream_BTM * self.stream_scale
        y = stream_BTM + y if self.scale == 1.0 else torch.add(stream_BTM, y, alpha=self.scale)
        return y if self.sum_norm is None else self.sum_norm(y)

    def output(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns g * post_norm(body(norm(x))), or of x and what the side gives."""
        x_BTM = x_BTM if self.side is None else x_BTM + self.side(x_BTM, step)
        return self.of(x_BTM if self.norm is None else self.norm(x_BTM), step)

    def of(self, read_BTM: Tensor, step: Step) -> Tensor:
        """Returns g * post_norm(body(x)) of what the body reads, with what is beside it."""
        y = self.after(self.body(read_BTM, step), step)
        return y if self.beside is None else y + self.beside(read_BTM)

    def after(self, y_BTM: Tensor, step: Step) -> Tensor:
        """Returns g * post_norm(y), or 0 for tokens that it leaves out."""
        y = y_BTM if self.post_norm is None else self.post_norm(y_BTM)
        if self.after_source and step.after_BT is not None:
            y = y * step.after_BT[..., None]
        y = y if self.layer_scale is None else y * self.layer_scale
        return y if self.gate is None else y * self.gate.tanh()


@computes(spec.Block)
class Block(PartModule):
    """Residual branches in order, each under its own name.

    One that borrows its weights has no modules, and in each pass runs those of its lender, with a cache of its own.
    """

    scale: Tensor

    def __init__(self, part: spec.Block, path: str) -> None:
        own = part.weights_from is None
        super().__init__(part if own else Part(), path)
        self.part, self.scaled, self.crosses = part, part.scaled, part.crosses
        for branch in part.branches if own else ():
            self.add_module(branch.name, Branch(branch, f"{path}.{branch.name}"))
        has = own and part.updates is not None
        self.updates = AlternatingUpdates(part.updates, f"{path}.updates") if has else None  # type: ignore[arg-type]

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns the stream with every branch added; as it is, where a source that they read is missing."""
        if step.sourceless and self.crosses:
            return x_BTM
        name = self.part.weights_from
        if name is None:
            if self.part.weights_name is not None:
                step.lenders[self.part.weights_name] = self
            return self.added(x_BTM, step)
        lender, cache = step.lenders[name], step.cache
        assert isinstance(lender, Block)
        step.cache = None if cache is None else cache.moved(self.path, lender.path)
        try:
            return lender.added(x_BTM, step)
        finally:
            step.cache = cache

    def added(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns the stream, or all streams, with every branch added, by the modules of this block."""
        if self.updates is None:
            stream_BTM = self.branched(x_BTM, step)
        else:
            predicted_RNM, read_BTM = self.updates.predict(x_BTM)
            stream_BTM = self.updates.correct(predicted_RNM, read_BTM, self.branched(read_BTM, step), step)
        return stream_BTM * self.scale.to(stream_BTM.dtype) if self.scaled else stream_BTM

    def branched(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns what the branches make of one stream, or of all where each has streams of its own."""
        stream_BTM = first_BTM = x_BTM
        for name in (branch.name for branch in self.part.branches):
            branch = self._modules[name]
            if not branch.parallel:  # type: ignore[union-attr]
                x_BTM = first_BTM if branch.block_input else stream_BTM  # type: ignore[union-attr]
            stream_BTM = branch(x_BTM, stream_BTM, step)  # type: ignore[misc]
        return stream_BTM

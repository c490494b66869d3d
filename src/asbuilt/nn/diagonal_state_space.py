"""Diagonal state spaces, with a sequence's states in the cache.

Shapes: batch B, new tokens T, channels C, which are the stream's numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels import diagonal_state_space as kernels
from asbuilt.kernels.recompute import recomputed
from asbuilt.nn.cache import StateCache
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import diagonal_state_space as spec


@computes(spec.DiagonalStateSpace)
class DiagonalStateSpace(PartModule):
    """o(g) * sigmoid(gate(g)), g = gelu(y + d x), with y read from the states of each channel."""

    o: Linear
    gate: Linear
    a_log: Tensor
    a_im: Tensor
    c_re: Tensor
    c_im: Tensor
    log_dt: Tensor
    d: Tensor

    def __init__(self, part: spec.DiagonalStateSpace, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.both = self.fused(self.o, self.gate)

    def forward(self, x_BTC: Tensor, step: Step) -> Tensor:
        """Returns (B, T, C)."""
        layer = None if step.cache is None else step.cache.layer(self.path, StateCache)
        learned = (self.a_log, self.a_im, self.c_re, self.c_im, self.log_dt, self.d)
        if layer is None:
            read = recomputed(self.alone, x_BTC, step.valid_BT, *learned)
        else:
            read = self.cached(x_BTC, step, layer)
        o, gate = self.both(F.gelu(read))
        return o * torch.sigmoid(gate)

    def alone(self, x_BTC: Tensor, valid_BT: Tensor | None, *learned: Tensor) -> Tensor:
        """Returns y + d x (B, T, C) of texts from their beginning."""
        *numbers, d = learned
        of = kernels.system(*numbers)
        x = self.wide(x_BTC, valid_BT)
        if x.shape[1] == 1 or self.gaps(valid_BT):
            y, _ = kernels.by_tokens(x, of, valid_BT, None)
        else:
            y = kernels.by_transforms(x, of, self.part.pieces(x.shape[1]))
        return torch.addcmul(y, x, d.to(x.dtype)).to(x_BTC.dtype).contiguous()

    def cached(self, x_BTC: Tensor, step: Step, layer: StateCache) -> Tensor:
        """Returns the same after what the cache has, and stores the states after the last token."""
        of = kernels.system(self.a_log, self.a_im, self.c_re, self.c_im, self.log_dt)
        x, T = self.wide(x_BTC, step.valid_BT), step.tokens
        if any(step.past) or T == 1 or step.valid_BT is not None:
            before = torch.view_as_complex(layer.read()[0]) if any(step.past) else None
            y, state = kernels.by_tokens(x, of, step.valid_BT, before)
        else:
            pieces = self.part.pieces(T)
            y, state = kernels.by_transforms(x, of, pieces), kernels.at_end(x, of, pieces)
        layer.write((torch.view_as_real(state),))
        return torch.addcmul(y, x, self.d.to(x.dtype)).to(x_BTC.dtype).contiguous()

    @staticmethod
    def wide(x_BTC: Tensor, valid_BT: Tensor | None) -> Tensor:
        """Returns x in float32 or wider, zero at padding."""
        x = x_BTC.to(torch.promote_types(x_BTC.dtype, torch.float32))
        return x if valid_BT is None else x * valid_BT[..., None]

    @staticmethod
    def gaps(valid_BT: Tensor | None) -> bool:
        """Returns whether padding may stand between tokens; on either side of them it changes nothing."""
        return valid_BT is not None and bool((valid_BT[:, 1:] & ~valid_BT[:, :-1]).sum(1).max() > 1)

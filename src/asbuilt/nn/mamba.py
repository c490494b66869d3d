"""Mamba, with a sequence's states in the cache.

Shapes: batch B, new tokens T, model width M, channels D, state width N.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.mamba import scan
from asbuilt.kernels.mamba2 import gated_norm
from asbuilt.nn.cache import StateCache
from asbuilt.nn.convolution import ShortConvolution
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes, optional
from asbuilt.nn.step import Step
from asbuilt.spec import mamba as spec


@computes(spec.Mamba)
class Mamba(PartModule):
    """(y * silu(z)) W^T, with y read from each channel's state."""

    into: Linear
    select: Linear
    dt: Linear
    out: Linear
    a_log: Tensor
    d: Tensor

    def __init__(self, part: spec.Mamba, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.conv = ShortConvolution(part.conv, f"{path}.conv")
        self.dt_norm = optional(part.dt_norm, f"{path}.dt_norm")
        self.b_norm = optional(part.b_norm, f"{path}.b_norm")
        self.c_norm = optional(part.c_norm, f"{path}.c_norm")

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        inner, z = self.into(x_BTM).split(self.part.d_inner, -1)
        y = self.read(self.conv(inner, step), step)
        return self.out(gated_norm(y, z, None, 0.0, 1, first=False))

    def read(self, x_BTD: Tensor, step: Step) -> Tensor:
        """Returns y (B, T, D) of the convolved x, in float32 or wider; steps of padding are 0 and change no state."""
        selected = self.select(x_BTD).split(self.part.selected, -1)
        norms = (self.dt_norm, self.b_norm, self.c_norm)
        low, b, c = (one if norm is None else norm(one) for norm, one in zip(norms, selected, strict=True))
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        dt = F.softplus(self.dt(low).to(wide))
        if step.valid_BT is not None:
            dt = dt * step.valid_BT[:, :, None]
        layer = None if step.cache is None else step.cache.layer(self.path, StateCache)
        before = None if layer is None or not any(step.past) else layer.read()[0]
        y, state = scan(x_BTD, dt, -self.a_log.to(wide).exp(), b, c, self.d, before)
        if layer is not None:
            layer.write((state,))
        return y

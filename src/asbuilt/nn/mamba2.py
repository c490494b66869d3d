"""Mamba-2, with a sequence's states in the cache.

Shapes: batch B, new tokens T, model width M, groups R, heads of a group H, head width P, state width N, groups of all
rows G = B*R.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.mamba2 import by_chunks, gated_norm
from asbuilt.nn.cache import StateCache
from asbuilt.nn.convolution import ShortConvolution
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import mamba2 as spec


@computes(spec.Mamba2)
class Mamba2(PartModule):
    """norm(y * silu(z)) W^T, with y read from decaying states."""

    into: Linear
    out: Linear
    a_log: Tensor
    d: Tensor
    dt_bias: Tensor
    gain: Tensor | None

    def __init__(self, part: spec.Mamba2, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.conv = ShortConvolution(part.conv, f"{path}.conv")
        if part.gate == "no_norm":
            self.register_parameter("gain", None)

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        part = self.part
        z, inner, raw = self.scaled(self.into(x_BTM)).split(part.widths, -1)
        dt_BTH = self.steps(raw, step)
        y = self.scan(self.conv(inner, step), dt_BTH, step)
        return self.out(gated_norm(y, z, self.gain, part.eps, part.n_groups, first=part.gate == "after_norm"))

    def scaled(self, projected: Tensor) -> Tensor:
        """Returns the input map's result times the factors on its pieces."""
        part = self.part
        if part.scales is None:
            return projected
        shared = part.n_groups * part.d_state
        widths = (part.d_inner, part.d_inner, shared, shared, part.n_heads)
        pieces = [projected.new_full((width,), scale) for width, scale in zip(widths, part.scales, strict=True)]
        return projected * torch.cat(pieces)

    def steps(self, raw_BTH: Tensor, step: Step) -> Tensor:
        """Returns dt of each head (B, T, H), in float32 or wider; 0 for padding, which then changes no state."""
        wide = torch.promote_types(raw_BTH.dtype, torch.float32)
        dt = F.softplus(raw_BTH.to(wide) + self.dt_bias.to(wide))
        if self.part.dt_min > 0 or self.part.dt_max is not None:
            dt = dt.clamp(self.part.dt_min, self.part.dt_max)
        return dt if step.valid_BT is None else dt * step.valid_BT[:, :, None]

    def scan(self, mixed_BTC: Tensor, dt_BTH: Tensor, step: Step) -> Tensor:
        """Returns y (B, T, heads * P) of convolved x, b and c, in the dtype of the steps."""
        part, (B, T, _) = self.part, mixed_BTC.shape
        groups, heads, shared = part.n_groups, part.n_heads // part.n_groups, part.n_groups * part.d_state
        x, b, c = mixed_BTC.split((part.d_inner, shared, shared), -1)
        copied = {"dtype": dt_BTH.dtype, "copy": True, "memory_format": torch.contiguous_format}
        x = x.view(B, T, groups, heads, part.d_head).permute(0, 2, 3, 1, 4).to(**copied)
        b, c = (one.view(B, T, groups, -1).transpose(1, 2).to(**copied).flatten(0, 1) for one in (b, c))
        del mixed_BTC  # freed, if autograd does not need it
        dt = dt_BTH.view(B, T, groups, heads).permute(0, 2, 3, 1)
        a = dt * -self.a_log.to(dt.dtype).exp().view(groups, heads, 1)
        layer = None if step.cache is None else step.cache.layer(self.path, StateCache)
        before = None if layer is None or not any(step.past) else layer.read()[0].flatten(0, 1)
        y, state = by_chunks(
            (x * dt[..., None]).flatten(0, 1), a.flatten(0, 1), b, c, before, spec.CHUNK, keep=layer is not None
        )
        if layer is not None and state is not None:
            layer.write((state.view(B, groups, part.d_state, -1),))
        y = torch.addcmul(y.view(x.shape), x, self.d.to(dt.dtype).view(groups, heads, 1, 1))
        return y.permute(0, 3, 1, 2, 4).reshape(B, T, part.d_inner)

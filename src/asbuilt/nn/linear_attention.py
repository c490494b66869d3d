"""Linear attention, with a sequence's state in the cache.

Shapes: batch B, new tokens T, model width M, heads H, head width D, heads of all rows G = B*H.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels.linear_attention import by_chunks
from asbuilt.nn.cache import StateCache
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import linear_attention as spec


@computes(spec.LinearAttention)
class LinearAttention(PartModule):
    """f(q)^T S / (f(q)^T z + eps), with f = elu + 1."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear

    def __init__(self, part: spec.LinearAttention, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.qkv = self.fused(self.q, self.k, self.v)

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        part = self.part
        B, T, _ = x_BTM.shape
        layer = None if step.cache is None else step.cache.layer(self.path, StateCache)
        before = None if layer is None or not any(step.past) else layer.read()[0].flatten(0, 1)
        y, state = by_chunks(*self.features(x_BTM, step), before, spec.CHUNK, keep=layer is not None)
        if layer is not None and state is not None:
            layer.write((state.view(B, part.n_heads, part.d_head, -1),))
        y = y[..., :-1] / (y[..., -1:] + part.eps)  # padding before a text has an empty sum
        return self.o(y.view(B, part.n_heads, T, part.d_head).transpose(1, 2).reshape(B, T, part.d_query))

    def features(self, x_BTM: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Returns f(q) and f(k) (G, T, D), and values with an appended one (G, T, D + 1)."""
        B, T, _ = x_BTM.shape
        q, k, v = (y.view(B, T, self.part.n_heads, -1) for y in self.qkv(x_BTM))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if step.valid_BT is not None:  # padding adds nothing to the state
            k = k * step.valid_BT[:, :, None, None]
        values = torch.cat((v, v.new_ones(B, T, self.part.n_heads, 1)), -1)
        return self.by_head(q), self.by_head(k), self.by_head(values)

    def by_head(self, x_BTHW: Tensor) -> Tensor:
        """Returns (G, T, width)."""
        return x_BTHW.transpose(1, 2).flatten(0, 1)

"""Lightning attention, with a sequence's states in the cache.

Shapes: batch B, new tokens T, model width M, heads H, head width D, width of all heads W, heads of all rows G = B*H.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from asbuilt.kernels.mamba2 import by_chunks
from asbuilt.kernels.recompute import recomputed
from asbuilt.nn.cache import StateCache
from asbuilt.nn.feedforward import ACTIVATIONS
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes, module
from asbuilt.nn.step import Step
from asbuilt.spec import lightning as spec
from asbuilt.spec import mamba2


@computes(spec.LightningAttention)
class LightningAttention(PartModule):
    """o(sigmoid(gate x) * norm(S^T q)), with states that decay at fixed rates: Mamba-2's recurrence without steps."""

    q: Linear
    k: Linear
    v: Linear
    gate: Linear
    o: Linear

    def __init__(self, part: spec.LightningAttention, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.norm = module(part.norm, f"{path}.norm")
        self.activation = ACTIVATIONS[part.activation]
        self.qkvg = self.fused(self.q, self.k, self.v, self.gate)

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        q, k, v, gate = self.qkvg(x_BTM)
        layer = None if step.cache is None else step.cache.layer(self.path, StateCache)
        if layer is None:
            y = recomputed(partial(self.read, step=step, layer=None), q, k, v)
        else:
            y = self.read(q, k, v, step=step, layer=layer)
        return self.o(self.norm(y) * torch.sigmoid(gate))

    def read(self, q_BTW: Tensor, k_BTW: Tensor, v_BTW: Tensor, *, step: Step, layer: StateCache | None) -> Tensor:
        """Returns what the queries read (B, T, W), and stores the states after the last token."""
        part, (B, T, W) = self.part, q_BTW.shape
        q, k, v = (self.by_head(x) for x in (q_BTW, k_BTW, v_BTW))
        forget_GT = self.slopes(q)[:, None].expand(B, -1, T)
        if step.valid_BT is not None:  # padding writes nothing, and nothing is forgotten meanwhile
            k = k * step.valid_BT.repeat_interleave(part.n_heads, 0)[..., None]
            forget_GT = forget_GT * step.valid_BT[:, None]
        before = None if layer is None or not any(step.past) else layer.read()[0].flatten(0, 1)
        forget_GT = -forget_GT.reshape(-1, 1, T)
        y, state = by_chunks(v[:, None], forget_GT, k, q, before, mamba2.CHUNK, keep=layer is not None)
        if layer is not None and state is not None:
            layer.write((state.view(B, part.n_heads, part.d_head, -1),))
        return y.view(B, part.n_heads, T, -1).transpose(1, 2).to(q_BTW.dtype).reshape(B, T, W)

    def by_head(self, x_BTW: Tensor) -> Tensor:
        """Returns the activated numbers of each head (G, T, D), in float32 or wider."""
        wide = torch.promote_types(x_BTW.dtype, torch.float32)
        x = self.activation(x_BTW).unflatten(-1, (self.part.n_heads, -1)).transpose(1, 2)
        return x.to(wide, memory_format=torch.contiguous_format).flatten(0, 1)

    def slopes(self, like: Tensor) -> Tensor:
        """Returns how fast each head forgets (H): decay * 2^(-8 h / H)."""
        heads = torch.arange(1, self.part.n_heads + 1, dtype=like.dtype, device=like.device)
        return self.part.decay * torch.exp2(heads * (-8 / self.part.n_heads))

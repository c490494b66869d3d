"""Cross-attention: keys and values of the source, computed in a sequence's first pass and then cached.

Shapes: batch B, new tokens T, source tokens S, model width M, heads H, key/value heads K, head width D.
"""

from __future__ import annotations

from torch import Tensor

from asbuilt.kernels.attention import attend
from asbuilt.kernels.codes import Coded
from asbuilt.nn.cache import SourceCache
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.norms import normed
from asbuilt.nn.registry import computes, optional
from asbuilt.nn.step import Step
from asbuilt.spec import cross


@computes(cross.CrossAttention)
class CrossAttention(PartModule):
    """softmax(scale * q k^T) v, with k and v from the encoder's output."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear

    def __init__(self, part: cross.CrossAttention, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.scale = part.scale if part.scale is not None else part.d_head**-0.5
        self.kv = self.fused(self.k, self.v)
        self.q_norm, self.k_norm = (
            optional(norm, f"{path}.{name}") for name, norm in (("q_norm", part.q_norm), ("k_norm", part.k_norm))
        )

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        B, T, _ = x_BTM.shape
        q = normed(self.q_norm, self.q(x_BTM).view(B, T, -1, self.part.d_head)).transpose(1, 2)
        k, v = self.read(step)
        y = attend(q, k, v, step.source_mask, scale=self.scale, kernel=step.kernel)
        return self.o(y.transpose(1, 2).reshape(B, T, self.part.d_query))

    def read(self, step: Step) -> tuple[Tensor | Coded, Tensor | Coded]:
        """Returns k and v (B, K, S, D), from the cache if it holds them."""
        layer = None if step.cache is None else step.cache.layer(self.path, SourceCache)
        if step.source_BSM is None:
            assert layer is not None, "no source was read"
            assert step.cache is not None
            k, v = layer.read(step.cache.source_tokens)
            return k, v
        B, S, _ = step.source_BSM.shape
        k, v = (y.view(B, S, -1, self.part.d_head) for y in self.kv(step.source_BSM))
        k, v = normed(self.k_norm, k).transpose(1, 2), v.transpose(1, 2)
        if layer is not None:
            layer.write((k, v))
            if layer.code is not None:
                k, v = layer.read(S)
        return k, v

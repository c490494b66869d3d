"""Attention pooling: one vector of all tokens, by attention from a learned vector.

Shapes: batch B, tokens T, model width M, heads H, head width D.
"""

from __future__ import annotations

from torch import Tensor

from asbuilt.kernels.attention import attend
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes, module
from asbuilt.nn.step import Step
from asbuilt.spec import attention_pooling as spec


@computes(spec.AttentionPooling)
class AttentionPooling(PartModule):
    """y + ffn(norm(y)), y the attention of a probe to every token."""

    probe: Tensor
    q: Linear
    k: Linear
    v: Linear
    o: Linear

    def __init__(self, part: spec.AttentionPooling, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.norm, self.ffn = module(part.norm, f"{path}.norm"), module(part.ffn, f"{path}.ffn")
        self.kv = self.fused(self.k, self.v)

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, M)."""
        y_BM = self.attended(x_BTM, step)
        return y_BM + self.ffn(self.norm(y_BM), step)

    def attended(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, M): what the probe takes from the tokens."""
        B, T, _ = x_BTM.shape
        q = self.q(self.probe.expand(B, -1)).view(B, 1, -1, self.part.d_head).transpose(1, 2)
        k, v = (y.view(B, T, -1, self.part.d_head).transpose(1, 2) for y in self.kv(x_BTM))
        y = attend(q, k, v, None, scale=self.part.d_head**-0.5, kernel=step.kernel)
        return self.o(y.transpose(1, 2).reshape(B, self.part.d_query))

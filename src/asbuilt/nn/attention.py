"""Attention over grouped heads.

Shapes: batch B, new tokens T, keys S, model width M, query heads H, key/value heads K, head width D.
"""

from __future__ import annotations

from torch import Tensor, nn

from asbuilt.kernels.attention import attend
from asbuilt.kernels.rotary import rotate
from asbuilt.nn.cache import KVCache
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.masks import AttentionPattern, mask
from asbuilt.nn.norms import normed
from asbuilt.nn.positions import rope_tables, temperature
from asbuilt.nn.registry import computes, optional
from asbuilt.nn.relative import ProjectedDistances
from asbuilt.nn.step import Step
from asbuilt.spec import attention as spec
from asbuilt.spec import positions
from asbuilt.spec.relative import RelativeProjection


@computes(spec.Attention)
class Attention(PartModule):
    """Attention over grouped heads, with a KV cache if the step has one."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    sinks: Tensor | None

    def __init__(self, part: spec.Attention, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.scale = part.scale if part.scale is not None else part.d_head**-0.5
        self.qkv = self.fused(self.q, self.k, self.v)
        self.q_norm = optional(part.q_norm, f"{path}.q_norm")
        self.k_norm = optional(part.k_norm, f"{path}.k_norm")
        alibi = part.positions if isinstance(part.positions, positions.Alibi) else None
        relative = part.positions if isinstance(part.positions, positions.RelativeBuckets) else None
        self.pattern = AttentionPattern(part.causal, part.window, part.chunk, alibi, relative)
        far = part.positions if isinstance(part.positions, RelativeProjection) else None
        self.positions = None if far is None else ProjectedDistances(far, f"{path}.positions")
        if not part.sinks:
            self.register_parameter("sinks", None)

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        part = self.part
        B, T, _ = x_BTM.shape
        q, k, v = self.heads(x_BTM, step)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        layer = None if step.cache is None or not part.remembers() else step.cache.layer(self.path, KVCache)
        if layer is not None:
            k, v = layer.update((k, v), step)

        def keys() -> Tensor:
            return step.key_positions_BT if layer is None else layer.positions(step)

        learned = self.pattern.relative is not None or self.positions is not None
        y = attend(
            q.transpose(1, 2),
            k,
            v,
            self.positions(q, step, self.scale, keys) if self.positions else mask(step, self.pattern, q.dtype, keys),
            scale=self.scale,
            softcap=part.softcap,
            sinks=self.sinks,
            # fused kernels compute no gradient of an added mask
            kernel="reference" if learned else step.kernel,
        )
        return self.o((y.transpose(1, 2) if T > 1 else y).reshape(B, T, part.d_query))

    def heads(self, x_BTM: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q (B, T, H, D), k and v (B, T, K, D), q and k normalised and with RoPE applied."""
        part = self.part
        B, T, _ = x_BTM.shape
        joined = None if self.q_norm is not None or self.k_norm is not None else self.qkv.joined(x_BTM)
        if joined is not None:  # no norm in between: RoPE is applied to q and k at once
            qk, v = joined.view(B, T, -1, part.d_head).split((part.n_heads + part.n_kv_heads, part.n_kv_heads), 2)
            q, k = self.turned(qk, step).split((part.n_heads, part.n_kv_heads), 2)
        else:
            q, k, v = (y.view(B, T, -1, part.d_head) for y in self.qkv(x_BTM))
            q, k = self.placed(self.q_norm, q, step), self.placed(self.k_norm, k, step)
        if part.temperature is not None:
            q = q * temperature(step, part.temperature, q.dtype)
        return q, k, v

    def placed(self, norm: nn.Module | None, heads: Tensor, step: Step) -> Tensor:
        """Returns heads normalised and with RoPE applied, in the part's order."""
        if self.part.rotate_first:
            return normed(norm, self.turned(heads, step))
        return self.turned(normed(norm, heads), step)

    def turned(self, heads: Tensor, step: Step) -> Tensor:
        """Returns heads (B, T, any, D) with RoPE applied."""
        rotary = self.part.positions
        if not isinstance(rotary, positions.Rotary):
            return heads
        return rotate(heads, rope_tables(step, rotary, heads.dtype), rotary.pairing)

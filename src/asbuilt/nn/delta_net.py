"""Gated delta networks, with a sequence's states in the cache.

Shapes: batch B, new tokens T, model width M, key heads K, value heads per key head R, key width D, value width V.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels import native
from asbuilt.kernels.delta_rule import Tokens, by_chunks, one_token
from asbuilt.kernels.recompute import recomputed
from asbuilt.nn.cache import StateCache
from asbuilt.nn.convolution import ShortConvolution
from asbuilt.nn.linear import Linear, PartModule, hooked
from asbuilt.nn.norms import RMSNorm
from asbuilt.nn.registry import computes, module
from asbuilt.nn.step import Step
from asbuilt.spec import delta_net as spec

GATES = {"silu": F.silu, "sigmoid": torch.sigmoid}


@computes(spec.GatedDeltaNet)
class GatedDeltaNet(PartModule):
    """o(norm(S^T q) * gate(z)), with the state S of the gated delta rule."""

    q: Linear
    k: Linear
    v: Linear
    beta: Linear
    decay: Linear
    gate: Linear
    o: Linear
    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, part: spec.GatedDeltaNet, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.conv = ShortConvolution(part.conv, f"{path}.conv" if path else "conv")
        self.norm = module(part.norm, f"{path}.norm")
        self.first = [name for name in part.maps if name != "o" and f"{name}_down" not in part.maps]
        self.inward = self.fused(*(self.get_submodule(name) for name in self.first))  # type: ignore[arg-type]

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        B, T, _ = x_BTM.shape
        mixed, gate, beta, decay = self.read(x_BTM)
        y = self.recur(self.conv(mixed, step), beta, decay, step)
        return self.o(self.gated(y.view(B, T, -1, self.part.d_value), gate))

    def gated(self, y_BTHV: Tensor, gate_BTC: Tensor) -> Tensor:
        """Returns norm(y) * gating(gate)."""
        if isinstance(self.norm, RMSNorm) and not hooked(self.norm):
            norm = self.norm
            made = native.gated_norm(
                y_BTHV, gate_BTC, norm.weight, norm.eps, gating=self.part.gating, offset=norm.offset
            )
            if made is not None:
                return made.flatten(2)
        return self.norm(y_BTHV).flatten(2) * GATES[self.part.gating](gate_BTC)

    def read(self, x_BTM: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns q, k and v side by side, the output's gate, and what gives the strengths and decays."""
        joined, sizes = self.inward.joined(x_BTM), self.inward.sizes
        if joined is None:
            found = dict(zip(self.first, self.inward(x_BTM), strict=True))
            mixed = torch.cat([found[name] for name in "qkv"], -1)
        else:
            found = dict(zip(self.first[3:], joined[..., self.part.d_mixed :].split(sizes[3:], -1), strict=True))
            mixed = joined[..., : self.part.d_mixed]
        gate, decay = (
            getattr(self, name)(found[f"{name}_down"]) if f"{name}_down" in found else found[name]
            for name in ("gate", "decay")
        )
        return mixed, gate, found["beta"], decay

    def recur(self, mixed_BTC: Tensor, beta: Tensor, decay: Tensor, step: Step) -> Tensor:
        """Returns what the queries read (B, T, K * R * V), and updates the states."""
        layer = None if step.cache is None else step.cache.layer(self.path, StateCache)
        given = (mixed_BTC, beta, decay, self.A_log, self.dt_bias, step.valid_BT)
        if layer is None:
            return recomputed(partial(self.rule, before=None, into=None), *given)
        before = layer.read()[0].flatten(0, 1) if any(step.past) else None
        return self.rule(*given, before=before, into=layer.tensors[0].flatten(0, 1))

    def rule(
        self,
        mixed_BTC: Tensor,
        beta: Tensor,
        decay: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        valid_BT: Tensor | None,
        *,
        before: Tensor | None,
        into: Tensor | None,
    ) -> Tensor:
        """Returns what the queries read, in float32 or wider until the end; the state after is written to `into`."""
        part = self.part
        T = mixed_BTC.shape[1]
        here = into is None or before is None or before.data_ptr() == into.data_ptr()
        if T > 1 and here and not torch.is_grad_enabled():  # of one token, calls cost more than the numbers
            sizes = (part.n_key_heads, part.values_per_key, part.d_key, part.d_value)
            given = (mixed_BTC, beta, decay, A_log.exp(), dt_bias, valid_BT, sizes, part.length_eps)
            made = native.delta_rule(*given, before if into is None else into, past=before is not None)
            if made is not None:
                return made
        tokens = self.tokens(mixed_BTC, beta, decay, A_log, dt_bias, valid_BT)
        if T == 1:
            y = one_token(tokens, before, into=into)
        else:
            size = min(spec.CHUNK, 1 << (T - 1).bit_length())
            y, after = by_chunks(tokens, before, size, keep=into is not None)
            if into is not None and after is not None:
                into.copy_(after)
        return y.reshape(*mixed_BTC.shape[:2], -1).to(mixed_BTC.dtype)

    def tokens(
        self, mixed_BTC: Tensor, beta: Tensor, decay: Tensor, A_log: Tensor, dt_bias: Tensor, valid_BT: Tensor | None
    ) -> Tokens:
        """Returns what the rule reads: padding has no strength, and no decay."""
        part, wide = self.part, torch.promote_types(mixed_BTC.dtype, torch.float32)
        B, T, _ = mixed_BTC.shape
        K, R, d_keys = part.n_key_heads, part.values_per_key, part.n_key_heads * part.d_key
        q, k, v = mixed_BTC.to(wide).split((d_keys, d_keys, part.d_output), -1)
        q, k = (x.view(B, T, K, part.d_key) for x in (q, k))
        b = beta.to(wide).sigmoid().view(B, T, K, R)
        g = F.softplus(decay.to(wide) + dt_bias.to(wide)).view(B, T, K, -1)
        rate = A_log.to(wide).exp().view(K, R)
        g = g * -rate if part.decays == "head" else (g * -rate)[:, :, :, None]
        if valid_BT is not None:
            b = b * valid_BT[:, :, None, None]
            g = g * valid_BT.view(B, T, *[1] * (g.ndim - 2))
        scale = part.d_key**-0.5
        return Tokens(q * (self.per_length(q) * scale), k * self.per_length(k), v.view(B, T, K, R, -1), g, b)

    def per_length(self, x: Tensor) -> Tensor:
        """Returns 1 / sqrt(|x|^2 + eps) over the last dimension."""
        return torch.rsqrt((x * x).sum(-1, keepdim=True) + self.part.length_eps)

"""RWKV-7's time mixing, with a sequence's states in the cache.

Shapes: batch B, new tokens T, model width M, heads H, key width D, value width V, width of all heads C.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from asbuilt.kernels.delta_rule import by_chunks
from asbuilt.kernels.generalised_delta_rule import Tokens, one_token
from asbuilt.kernels.recompute import recomputed
from asbuilt.nn.cache import StateCache
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.registry import computes, module
from asbuilt.nn.step import Step
from asbuilt.spec import delta_net
from asbuilt.spec import delta_time_mixing as spec


@computes(spec.DeltaTimeMixing)
class DeltaTimeMixing(PartModule):
    """o(gate * (norm(S^T r) + bonus)), with the state S of the generalised delta rule."""

    r: Linear
    k: Linear
    v: Linear
    decay_down: Linear
    decay: Linear
    rate_down: Linear
    rate: Linear
    move_down: Linear
    move: Linear
    gate_down: Linear
    gate: Linear
    o: Linear
    removal: Tensor
    replacement: Tensor
    bonus: Tensor

    def __init__(self, part: spec.DeltaTimeMixing, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.shift = module(part.shift, f"{path}.shift" if path else "shift")
        self.norm = module(part.norm, f"{path}.norm")

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        part, (B, T, _) = self.part, x_BTM.shape
        for_r, for_decay, for_k, for_v, for_rate, for_gate = self.shift(x_BTM, step)
        r, k, v = self.r(for_r), self.k(for_k), self.v(for_v)
        decay = self.decay(torch.tanh(self.decay_down(for_decay)))
        rate = self.rate(self.rate_down(for_rate))
        moved = () if part.value_from is None else (step.lent_values[part.value_from], self.move(self.move_down(for_v)))
        if part.value_name is not None:
            step.lent_values[part.value_name] = v
        y = self.recur(r, k, v, decay, rate, step, moved)
        bonus = recomputed(self.own, r, k, v, rate, self.replacement, self.bonus, *moved)
        y = self.norm(y.view(B, T, part.n_heads, -1)).view(B, T, -1) + bonus
        return self.o(y * self.gate(torch.sigmoid(self.gate_down(for_gate))))

    def recur(
        self, r: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, step: Step, moved: tuple[Tensor, ...]
    ) -> Tensor:
        """Returns what is read of the states (B, T, H * V), and updates them."""
        layer = None if step.cache is None else step.cache.layer(self.path, StateCache)
        given = (r, k, v, decay, rate, self.removal, self.replacement, step.valid_BT, *moved)
        if layer is None:
            return recomputed(partial(self.rule, before=None, into=None), *given)
        before = layer.read()[0].flatten(0, 1) if any(step.past) else None
        return self.rule(*given, before=before, into=layer.tensors[0].flatten(0, 1))

    def rule(
        self,
        r: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        rate: Tensor,
        removal: Tensor,
        replacement: Tensor,
        valid_BT: Tensor | None,
        *moved: Tensor,
        before: Tensor | None,
        into: Tensor | None,
    ) -> Tensor:
        """Returns what is read, in float32 or wider until the end; the state after is written to `into`."""
        tokens = self.tokens(r, k, mixed(v, *moved), decay, rate, removal, replacement, valid_BT)
        B, T, _ = r.shape
        if T == 1:
            y = one_token(tokens, before, into=into)
        else:
            size = min(delta_net.CHUNK, 1 << (T - 1).bit_length())
            y, after = by_chunks(tokens, before, size, keep=into is not None)
            if into is not None and after is not None:
                into.copy_(after)
        return y.reshape(B, T, -1).to(r.dtype)

    def tokens(
        self,
        r: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        rate: Tensor,
        removal: Tensor,
        replacement: Tensor,
        valid_BT: Tensor | None,
    ) -> Tokens:
        """Returns what the rule reads: padding removes, writes and forgets nothing."""
        q, k, v, decay, rate = (self.by_head(x) for x in (r, k, v, decay, rate))
        c, g, a = k * self.by_head(removal), spec.STRONGEST * torch.sigmoid(decay), torch.sigmoid(rate)
        c = c * torch.rsqrt((c * c).sum(-1, keepdim=True) + self.part.length_eps)
        k = replaced(k, a, self.by_head(replacement))
        if valid_BT is not None:
            c, k, g = (x * valid_BT[..., None, None] for x in (c, k, g))
        return Tokens(q, c, c * a, k, v[:, :, :, None], g)

    def own(
        self, r: Tensor, k: Tensor, v: Tensor, rate: Tensor, replacement: Tensor, bonus: Tensor, *moved: Tensor
    ) -> Tensor:
        """Returns the bonus (B, T, H * V): each token's own values, as far as its r and k say."""
        q, k, v, rate = (self.by_head(x) for x in (r, k, mixed(v, *moved), rate))
        k = replaced(k, torch.sigmoid(rate), self.by_head(replacement))
        return ((q * k * bonus).sum(-1, keepdim=True) * v).flatten(2).to(r.dtype)

    def by_head(self, x: Tensor) -> Tensor:
        """Returns (..., C) as (..., H, width), in float32 or wider."""
        return x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (self.part.n_heads, -1))


def mixed(v: Tensor, lent: Tensor | None = None, move: Tensor | None = None) -> Tensor:
    """Returns the values moved towards those of another layer by sigmoid(move), if there is one."""
    return v if lent is None or move is None else torch.lerp(v, lent, torch.sigmoid(move))


def replaced(k: Tensor, rate: Tensor, replacement: Tensor) -> Tensor:
    """Returns the keys that are written: k (1 + (rate - 1) replacement)."""
    return k * (1 + (rate - 1) * replacement)

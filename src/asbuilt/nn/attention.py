"""Attention over grouped heads.

Shapes: batch B, new tokens T, keys S, model width M, query heads H, key/value heads K, head width D, value width V.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from asbuilt.kernels.attention import Mask, attend
from asbuilt.kernels.codes import Coded, expanded, gathered
from asbuilt.kernels.indexer import places
from asbuilt.kernels.rotary import rotate, rotate_joined
from asbuilt.nn.cache import KVCache
from asbuilt.nn.differential import paired
from asbuilt.nn.linear import Linear, PartModule
from asbuilt.nn.masks import AttentionPattern, Keys, attend_in_runs, mask
from asbuilt.nn.norms import normed
from asbuilt.nn.positions import rope_tables, temperature
from asbuilt.nn.registry import computes, optional
from asbuilt.nn.relative import ProjectedDistances, disentangled
from asbuilt.nn.step import KeysAndValues, Step
from asbuilt.spec import attention as spec
from asbuilt.spec import positions
from asbuilt.spec.relative import Disentangled, RelativeProjection

# Returns what is added to q, k and v, from what these are made of.
Beside = Callable[[Tensor], tuple[Tensor, ...]]


@computes(spec.Attention)
class Attention(PartModule):
    """Attention over grouped heads, with a KV cache if the step has one."""

    q: Linear
    k: Linear
    v: Linear
    gate: Linear
    o: Linear
    sinks: Tensor | None

    def __init__(self, part: spec.Attention, path: str) -> None:
        super().__init__(part, path)
        self.part = part
        self.scale = part.scale if part.scale is not None else part.d_head**-0.5
        self.qkv = self.fused(*(self.get_submodule(name) for name in part.inward))  # type: ignore[arg-type]
        self.q_norm, self.k_norm, self.v_norm = (
            optional(norm, f"{path}.{name}")
            for name, norm in (("q_norm", part.q_norm), ("k_norm", part.k_norm), ("v_norm", part.v_norm))
        )
        self.indexer = optional(part.indexer, f"{path}.indexer")
        uneven = part.value_width != part.d_head or part.inward != ("q", "k", "v")
        self.apart = uneven or bool(part.q_norm or part.k_norm or part.v_norm)
        self.learned = isinstance(part.positions, positions.RelativeBuckets | RelativeProjection | Disentangled)
        # whether what a kernel reads is made of copies of q, k or v
        self.copied = bool(part.differential or part.indexer or part.kv_name or part.temperature)
        self.copied |= part.value_scale != 1.0 or isinstance(part.positions, RelativeProjection | Disentangled)
        alibi = part.positions if isinstance(part.positions, positions.Alibi) else None
        relative = part.positions if isinstance(part.positions, positions.RelativeBuckets) else None
        own = (part.causal, part.window, part.chunk, alibi, relative, part.stride, part.summary)
        self.pattern = AttentionPattern(*own)
        far = part.positions if isinstance(part.positions, RelativeProjection) else None
        self.positions = None if far is None else ProjectedDistances(far, f"{path}.positions")
        self.differential = optional(part.differential, f"{path}.differential")
        if not part.sinks:
            self.register_parameter("sinks", None)

    def forward(self, x_BTM: Tensor, step: Step, beside: Beside | None = None) -> Tensor:
        """Returns (B, T, M); `beside` gives what is added to q, k and v."""
        part = self.part
        B, T, _ = x_BTM.shape
        chosen = None if self.indexer is None else self.indexer(x_BTM, step)
        q, (k, v, keys) = self.heads(x_BTM, step, beside)
        if chosen is not None:
            return self.o(self.gated(self.among(chosen, q, k, v, step), x_BTM))
        q, masked = self.masked(q, k, step, keys)
        y = attend_in_runs(
            step,
            q.transpose(1, 2),
            k if self.differential is None else expanded(k),
            v if self.differential is None else paired(expanded(v)),
            masked,
            scale=self.scale,
            softcap=part.softcap,
            sinks=self.sinks,
            sum_capped=isinstance(part.positions, RelativeProjection),
            # fused kernels compute no gradient of an added mask
            kernel="reference" if self.learned else step.kernel,
        )
        if self.differential is not None:
            y = self.differential(y)
        return self.o(self.gated((y.transpose(1, 2) if T > 1 else y).reshape(B, T, part.d_mixed), x_BTM))

    def among(
        self, chosen_BKTS: Tensor, q_BTHD: Tensor, keys: Tensor | Coded, values: Tensor | Coded, step: Step
    ) -> Tensor:
        """Returns the weighted sums (B, T, H*V) over the keys that are chosen for each key head.

        Each group of heads is computed as a sequence of its own, with one mask. A single token gathers its keys.
        """
        B, T, H, D = q_BTHD.shape
        K, part = self.part.n_kv_heads, self.part
        if T == 1 and part.indexer is not None:
            index_BKS, found_BKS = places(chosen_BKTS[:, :, 0], part.indexer.most_keys)
            keys, values = (
                x.gather(index_BKS) if isinstance(x, Coded) else gathered(x, index_BKS) for x in (keys, values)
            )
            chosen_BKTS = found_BKS[:, :, None]
        k, v = expanded(keys), expanded(values)
        y = attend(
            q_BTHD.transpose(1, 2).reshape(B * K, H // K, T, D),
            k.reshape(B * K, 1, *k.shape[2:]),
            v.reshape(B * K, 1, *v.shape[2:]),
            chosen_BKTS.reshape(B * K, 1, *chosen_BKTS.shape[2:]),
            scale=self.scale,
            softcap=part.softcap,
            kernel=step.kernel,
        )
        return y.unflatten(0, (B, K)).permute(0, 3, 1, 2, 4).reshape(B, T, part.d_mixed)

    def masked(self, q_BTHD: Tensor, k_BHSD: Tensor | Coded, step: Step, keys: Keys) -> tuple[Tensor, Mask]:
        """Returns the queries that meet keys, and the mask, or what is added to the scores."""
        if self.positions is not None:
            return self.positions(q_BTHD, step, self.scale, keys)
        if isinstance(self.part.positions, Disentangled):
            maps, k_BSHD = (self.q, self.k), expanded(k_BHSD).transpose(1, 2)
            return q_BTHD, disentangled(q_BTHD, k_BSHD, self.part.positions, maps, step, self.scale, keys)
        fused = step.kernel == "fused" and not (self.learned or self.part.softcap is not None or self.part.sinks)
        return q_BTHD, mask(step, self.pattern, q_BTHD.dtype, keys, fused=fused)

    def gated(self, y_BTC: Tensor, x_BTM: Tensor) -> Tensor:
        """Returns the weighted sums times their gates, if they have any."""
        if self.part.gating is None:
            return y_BTC
        gates = self.gate(x_BTM).sigmoid()[..., None]
        return (y_BTC.view(*gates.shape[:-1], -1) * gates).view(y_BTC.shape)

    def heads(self, x_BTM: Tensor, step: Step, beside: Beside | None = None) -> tuple[Tensor, KeysAndValues]:
        """Returns q (B, T, H, D), after its norm and RoPE if any, and the keys and values that it attends to.

        Those of a `kv_name` are handed to later layers, each head's in one run, so that no layer's kernel copies them.
        """
        layer = self.layer(step)
        again = layer is not None and self.part.caches_input
        if layer is not None and again:
            q, kv = self.read_again(x_BTM, layer, step)
        else:
            q, kv = self.projected(x_BTM, step, beside)
        if self.part.temperature is not None:
            q = q * temperature(step, self.part.temperature, q.dtype)
        if self.part.kv_from is not None:
            return q, step.lent[self.part.kv_from]
        k, v = (step.whole(heads, 1).transpose(1, 2) for heads in (kv[0], self.scaled(kv[1])))
        return q, self.cached(k, v, layer, step, written=again)

    def layer(self, step: Step) -> KVCache | None:
        """Returns this layer's cache, if the step has one and the layer remembers anything."""
        return None if step.cache is None or not self.part.remembers() else step.cache.layer(self.path, KVCache)

    def read_again(self, x_BTM: Tensor, layer: KVCache, step: Step) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns q (B, T, H, D) of the new tokens, k and v (B, S, K, D or V) of all that the layer may attend to.

        The cache holds the layer's input.
        """
        part = self.part
        (seen,) = layer.update((x_BTM[:, None],), step)
        seen_BSM = seen[:, 0]
        B, S, _ = seen_BSM.shape
        q = normed(self.q_norm, self.q(x_BTM).view(*x_BTM.shape[:2], -1, part.d_head))
        return q, (
            self.k(seen_BSM).view(B, S, -1, part.d_head),
            self.v(seen_BSM).view(B, S, -1, part.value_width),
        )

    def projected(self, x_BTM: Tensor, step: Step, beside: Beside | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns q (B, T, H, D), k (B, T, K, D), v (B, T, K, V); only q where keys and values are another layer's."""
        part = self.part
        B, T, _ = x_BTM.shape
        joined = None if self.apart or beside is not None or self.holds_copies(step) else self.qkv.joined(x_BTM)
        if joined is not None:  # no norm in between: RoPE is applied to q and k at once
            heads, counts = joined.view(B, T, -1, part.d_head), (part.n_heads, part.n_kv_heads, part.n_kv_heads)
            if not isinstance(part.positions, positions.Rotary):
                q, k, v = heads.split(counts, 2)
                return q, (k, v)
            turn = rope_tables(step, part.positions, heads.dtype)
            q, k, v = rotate_joined(heads, counts, turn, part.positions.pairing)
            return q, (k, v)
        q, *kv = self.qkv(x_BTM)
        if beside is not None:
            q, *kv = (a + b for a, b in zip((q, *kv), beside(x_BTM), strict=True))
        q = self.placed(self.q_norm, q.view(B, T, -1, part.d_head), step)
        if not kv:
            return q, ()
        k, v = kv[0].view(B, T, -1, part.d_head), kv[-1].view(B, T, -1, part.value_width)
        return q, (self.placed(self.k_norm, k, step), normed(self.v_norm, v))

    def holds_copies(self, step: Step) -> bool:
        """Returns whether the backward pass needs a copy of q, k or v, beside which one tensor of all would be kept.

        The reference kernel copies the queries of a group, and so do parts of attention that come before a kernel.
        """
        part = self.part
        grouped = part.n_heads != part.n_kv_heads
        reference = step.kernel == "reference" or part.softcap is not None or part.sinks
        return torch.is_grad_enabled() and (self.copied or (grouped and (reference or self.learned)))

    def scaled(self, v: Tensor) -> Tensor:
        """Returns the values times the part's factor."""
        return v if self.part.value_scale == 1.0 else v * self.part.value_scale

    def cached(self, k: Tensor, v: Tensor, layer: KVCache | None, step: Step, *, written: bool) -> KeysAndValues:
        """Returns the keys and values (B, K, S, D or V) of all tokens that the layer may attend to, cached or new.

        Those that are made of what the layer's cache holds are `written` already.
        """
        part = self.part
        if part.kv_name is not None:
            k, v = k.contiguous(), v.contiguous()
        held = (k, v) if layer is None or written else layer.attended((k, v), step)
        found = held[0], held[1], lambda: step.key_positions_BT if layer is None else layer.positions(step)
        if part.kv_name is not None:
            step.lent[part.kv_name] = found
        return found

    def placed(self, norm: nn.Module | None, heads: Tensor, step: Step) -> Tensor:
        """Returns heads after their norm and RoPE, if any, in the part's order."""
        if self.part.rotate_first:
            return normed(norm, self.turned(heads, step))
        return self.turned(normed(norm, heads), step)

    def turned(self, heads: Tensor, step: Step) -> Tensor:
        """Returns heads (B, T, any, D) with RoPE applied."""
        rotary = self.part.positions
        if not isinstance(rotary, positions.Rotary):
            return heads
        return rotate(heads, rope_tables(step, rotary, heads.dtype), rotary.pairing)

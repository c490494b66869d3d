"""Multi-head latent attention, expanded or absorbed; the cache holds latents either way.

Shapes: batch B, new tokens T, all tokens S, model width M, heads H, query and key width D, latent width R, value width
V, RoPE width P.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asbuilt.kernels.attention import Mask, attend
from asbuilt.kernels.codes import Coded, expanded, gathered
from asbuilt.kernels.indexer import places
from asbuilt.kernels.rotary import rotate
from asbuilt.nn.cache import KVCache
from asbuilt.nn.linear import Linear, PartModule, hooked
from asbuilt.nn.masks import AttentionPattern, Keys, attend_in_runs, mask
from asbuilt.nn.positions import rope_tables
from asbuilt.nn.registry import computes, optional
from asbuilt.nn.step import Step
from asbuilt.spec import latent


@computes(latent.LatentAttention)
class LatentAttention(PartModule):
    """softmax(scale * q k^T) v, where k and v are expanded from one latent per token."""

    q: Linear
    q_down: Linear
    q_up: Linear
    kv_down: Linear
    k_rope: Linear
    k_up: Linear
    v_up: Linear
    o: Linear

    def __init__(self, part: latent.LatentAttention, path: str) -> None:
        super().__init__(part, path)
        self.part, self.pattern = part, AttentionPattern()
        self.q_norm = optional(part.q_norm, f"{path}.q_norm")
        self.kv_norm = optional(part.kv_norm, f"{path}.kv_norm")
        self.indexer = optional(part.indexer, f"{path}.indexer")
        first = () if part.q_rank is None else (self.q_down,)  # q has no bias, unlike the others
        self.down = self.fused(*first, self.kv_down, self.k_rope)

    def forward(self, x_BTM: Tensor, step: Step) -> Tensor:
        """Returns (B, T, M)."""
        q_BTHD, c_BTR, k_BTP = self.project(x_BTM, step)
        layer = None if step.cache is None else step.cache.layer(self.path, KVCache)

        def keys() -> Tensor:
            return step.key_positions_BT if layer is None else layer.positions(step)

        if layer is not None:
            joined = torch.cat((c_BTR, k_BTP), -1)[:, None]
            (held,) = layer.attended((joined,), step)
            if step.tokens == 1 and max(step.past) > 0 and not hooked(self.k_up, self.v_up):
                return self.o(self.absorbed(q_BTHD, held, step, keys))
            # keys and values of all heads are made of the latents, many times their size
            c_BTR, k_BTP = expanded(held)[:, 0].split((self.part.kv_rank, self.part.d_rope), -1)
        return self.o(self.expanded(q_BTHD, step.whole(c_BTR, 1), step.whole(k_BTP, 1), step, keys))

    def project(self, x_BTM: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the new tokens' queries (B, T, H, D), normalised latents (B, T, R) and RoPE keys (B, T, P).

        The indexer chooses keys by the latents of the queries.
        """
        *down, c_BTR, k_BTP = self.down(x_BTM)
        latent = (down[0] if self.q_norm is None else self.q_norm(down[0])) if down else None
        if self.indexer is not None:
            self.indexer(x_BTM, latent, step)
        q = self.q(x_BTM) if latent is None else self.q_up(latent)
        del latent  # as wide as the queries' rank, and read
        q_BTHD = q.view(*x_BTM.shape[:2], self.part.n_heads, self.part.d_head)
        rotary = self.part.positions
        if rotary is not None:
            turn = rope_tables(step, rotary, x_BTM.dtype)
            plain, turned = q_BTHD.split((self.part.d_nope, self.part.d_rope), -1)
            q_BTHD = torch.cat((plain, rotate(turned, turn, rotary.pairing)), -1)
            k_BTP = rotate(k_BTP[:, :, None], turn, rotary.pairing)[:, :, 0]
        return q_BTHD, c_BTR if self.kv_norm is None else self.kv_norm(c_BTR), k_BTP

    def seen(self, step: Step, dtype: torch.dtype, keys: Keys, *, fused: bool = False) -> Mask:
        """Returns the mask of the keys that are not past, or not chosen."""
        if self.indexer is None or step.choice is None:
            return mask(step, self.pattern, dtype, keys, fused=fused)
        return step.choice[:, None]

    def expanded(self, q_BTHD: Tensor, c_BSR: Tensor, k_BSP: Tensor, step: Step, keys: Keys) -> Tensor:
        """Returns (B, T, H*V): standard attention over the expanded keys and values of all heads."""
        B, S, H = *c_BSR.shape[:2], self.part.n_heads
        shared = k_BSP[:, :, None].expand(B, S, H, self.part.d_rope)
        k_BSHD = torch.cat((self.k_up(c_BSR).view(B, S, H, self.part.d_nope), shared), -1)
        q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BSHD, self.v_up(c_BSR).view(B, S, H, self.part.d_value)))
        seen = self.seen(step, q.dtype, keys, fused=step.kernel == "fused")
        y_BHTV = attend_in_runs(step, q, k, v, seen, scale=self.part.scale, kernel=step.kernel)
        return y_BHTV.transpose(1, 2).flatten(2)

    def absorbed(self, q_BTHD: Tensor, latents: Tensor | Coded, step: Step, keys: Keys) -> Tensor:
        """Returns the same from concatenated latents and RoPE keys (B, 1, S, R + P), without expanding them.

        All heads share one key, the latent, so attention is two plain products: the reference kernel's.
        """
        part = self.part
        B, T, H, _ = q_BTHD.shape
        plain, turned = q_BTHD.split((part.d_nope, part.d_rope), -1)
        k_up = self.k_up.matrix(q_BTHD.dtype).view(H, part.d_nope, part.kv_rank)
        v_up = self.v_up.matrix(q_BTHD.dtype).view(H, part.d_value, part.kv_rank)
        in_latent = torch.bmm(plain.permute(2, 0, 1, 3).reshape(H, B * T, part.d_nope), k_up)
        q_BHTL = torch.cat((in_latent.view(H, B, T, -1).transpose(0, 1), turned.transpose(1, 2)), -1)
        seen = self.seen(step, q_BHTL.dtype, keys)
        if T == 1 and part.most_keys is not None and step.choice is not None:
            index_Bk, chosen_Bk = (x[:, 0] for x in places(step.choice, part.most_keys))
            at = index_Bk[:, None]
            latents = latents.gather(at) if isinstance(latents, Coded) else gathered(latents, at)
            seen = None if step.uniform else chosen_Bk[:, None, None]
        values = latents.first(part.kv_rank) if isinstance(latents, Coded) else latents[..., : part.kv_rank]
        y_BHTR = attend(q_BHTL, latents, values, seen, scale=part.scale, kernel="reference")
        y = torch.bmm(y_BHTR.transpose(0, 1).reshape(H, B * T, part.kv_rank), v_up.transpose(1, 2))
        return y.view(H, B, T, part.d_value).permute(1, 2, 0, 3).flatten(2)

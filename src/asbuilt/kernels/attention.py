"""Scaled dot-product attention over grouped heads: a plain reference, and PyTorch's fused kernel.

Shapes: q (B, H, T, D); k, v (B, K, S, D) with H a multiple of K; query head h reads key head h // (H / K).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.spec.part import Kernel

# "causal": T == S, each token sees itself and those before; None: every key is seen; else True where a key is seen,
# broadcastable to (B, 1, T, S).
Mask = Tensor | Literal["causal"] | None


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float | None, kernel: Kernel) -> Tensor:
    """Returns softmax(scale q k^T, masked) v of shape (B, H, T, D): the one place that chooses a kernel.

    The fused kernel knows no soft-capping, so capped scores always take the reference.
    """
    if kernel == "reference" or softcap is not None:
        return reference(q, k, v, mask, scale, softcap)
    return fused(q, k, v, mask, scale)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float | None = None) -> Tensor:
    """Returns attention as the textbook writes it, softmax in float32 or wider.

    The queries of one group are laid along the token axis, so that grouped keys are never copied.
    """
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    group = H // K
    scores = torch.matmul(q.reshape(B, K, group * T, D), k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(B, K, group, T, S)
    if mask is not None:
        hidden = ~_as_tensor(mask, T, S, q.device)
        hidden = hidden.unsqueeze(1) if hidden.dim() == 4 else hidden  # (B, 1, T, S) gains the group axis
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    wide = torch.float32 if v.dtype in (torch.bfloat16, torch.float16) else v.dtype
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(v.dtype)
    return torch.matmul(weights.view(B, K, group * T, S), v).view(B, H, T, D)


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Returns the same through `scaled_dot_product_attention`.

    Its `is_causal` is aligned to the top left, right only for T == S; a lone query that sees every key is passed as a
    short sequence of its group's heads, which spares the kernel from repeating keys.
    """
    B, H, T, D = q.shape
    K = k.shape[1]
    if T == 1 and mask is None:
        return F.scaled_dot_product_attention(q.reshape(B, K, H // K, D), k, v, scale=scale).reshape(B, H, 1, D)
    causal = isinstance(mask, str)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=None if causal else mask, is_causal=causal, scale=scale, enable_gqa=H != K
    )


def _as_tensor(mask: Tensor | str, T: int, S: int, device: torch.device) -> Tensor:
    if isinstance(mask, str):
        return torch.ones(T, S, dtype=torch.bool, device=device).tril()
    return mask

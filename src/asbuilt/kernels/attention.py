"""Scaled dot-product attention over grouped heads: a plain reference, and PyTorch's fused kernel.

Shapes: q (B, H, T, D); k, v (B, K, S, D) with H a multiple of K; query head h reads key head h // (H / K).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.spec.part import Kernel

# "causal": T == S, each token sees itself and those before; None: every key is seen; a tensor of bool: True where a key
# is seen; of numbers: added to the scores, -inf where a key is hidden. Broadcastable to (B, H or 1, T, S).
Mask = Tensor | Literal["causal"] | None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: Kernel,
) -> Tensor:
    """Returns softmax(scale q k^T, masked) v of shape (B, H, T, width of v): the one place that chooses a kernel.

    The fused kernel knows no soft-capping and no sinks, so these always take the reference.
    """
    if kernel == "reference" or softcap is not None or sinks is not None:
        return reference(q, k, v, mask, scale, softcap, sinks)
    return fused(q, k, v, mask, scale)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention as the textbook writes it, softmax in float32 or wider.

    The queries of one group are laid along the token axis, so that grouped keys are never copied. `sinks` (H) are
    scores that take part in the softmax and have no value.
    """
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    group = H // K
    scores = torch.matmul(q.reshape(B, K, group * T, D), k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = _masked(scores.view(B, H, T, S), mask)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).view(1, H, 1, 1).expand(B, H, T, 1)), -1)
    wide = torch.float32 if v.dtype in (torch.bfloat16, torch.float16) else v.dtype
    weights = torch.softmax(scores, dim=-1, dtype=wide)[..., :S].to(v.dtype)
    return torch.matmul(weights.reshape(B, K, group * T, S), v).view(B, H, T, v.shape[-1])


def _masked(scores: Tensor, mask: Mask) -> Tensor:
    if mask is None:
        return scores
    if isinstance(mask, str):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask


def _widened(x_BHTD: Tensor, width: int) -> Tensor:
    """Returns a copy with zeros added, or numbers cut off, at the end of each head; heads of a token lie together."""
    return F.pad(x_BHTD.transpose(1, 2), (0, width - x_BHTD.shape[-1])).transpose(1, 2)


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Returns the same through `scaled_dot_product_attention`.

    Its `is_causal` is aligned to the top left, right only for T == S; a lone query that sees every key is passed as a
    short sequence of its group's heads, which spares the kernel from repeating keys. It wants queries, keys and values
    of one width: the narrower are filled up with zeros, which change no score and are cut off the result.
    """
    D, V = q.shape[-1], v.shape[-1]
    if D < V:
        return fused(_widened(q, V), _widened(k, V), v, mask, scale)
    if V < D:
        return _widened(fused(q, k, _widened(v, D), mask, scale), V)
    B, H, T, D = q.shape
    K = k.shape[1]
    if T == 1 and mask is None:
        return F.scaled_dot_product_attention(q.reshape(B, K, H // K, D), k, v, scale=scale).reshape(B, H, 1, -1)
    causal = isinstance(mask, str)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=None if causal else mask, is_causal=causal, scale=scale, enable_gqa=H != K
    )

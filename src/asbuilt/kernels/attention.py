"""Scaled dot-product attention over grouped heads: a plain reference, and PyTorch's fused kernel.

Shapes: q (B, H, T, D); k, v (B, K, S, D) with H a multiple of K; query head h reads key head h // (H / K).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.kernels import training_attention
from asbuilt.kernels.coded_attention import attend_coded
from asbuilt.kernels.codes import Coded
from asbuilt.spec.part import Kernel

# "causal": T == S, a causal mask; None: no mask; a bool tensor: True where a query attends to a key; a float tensor:
# added to the scores, -inf where masked. Broadcastable to (B, H or 1, T, S).
Mask = Tensor | Literal["causal"] | None

FEW_KEYS = 256


def attend(
    q: Tensor,
    k: Tensor | Coded,
    v: Tensor | Coded,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sum_capped: bool = False,
    kernel: Kernel,
) -> Tensor:
    """Returns softmax(scale q k^T, masked) v of shape (B, H, T, width of v): the only place that chooses a kernel.

    The fused kernel supports neither soft-capping nor sinks, which always use the reference. With `sum_capped` a mask
    that is added is added before the cap. Keys and values in codes are read in blocks, by a kernel of their own.
    """
    if isinstance(k, Coded) or isinstance(v, Coded):
        assert isinstance(k, Coded), "keys and values are both in codes, or neither"
        assert isinstance(v, Coded), "keys and values are both in codes, or neither"
        return attend_coded(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, sum_capped=sum_capped)
    if kernel == "reference" or softcap is not None or sinks is not None:
        return reference(q, k, v, mask, scale, softcap, sinks, sum_capped)
    return fused(q, k, v, mask, scale)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sum_capped: bool = False,
) -> Tensor:
    """Returns textbook attention, with the softmax in float32 or wider.

    The queries of one group are concatenated along the token axis, so that grouped keys are never copied. `sinks` (H)
    are scores that take part in the softmax without a value.
    """
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    group = H // K
    scores = torch.matmul(q.reshape(B, K, group * T, D), k.transpose(-1, -2)) * scale
    scores = scores.view(B, H, T, S)
    hidden = None
    if softcap is not None and sum_capped and isinstance(mask, Tensor):
        hidden, scores = mask.isneginf(), scores + mask
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = _masked(scores, mask) if hidden is None else scores.masked_fill(hidden, -torch.inf)
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
    """Returns a copy padded with zeros or truncated at the end of each head; a token's heads are contiguous."""
    return F.pad(x_BHTD.transpose(1, 2), (0, width - x_BHTD.shape[-1])).transpose(1, 2)


def _widens(q: Tensor, n_keys: int) -> bool:
    """Returns whether autocast gains by float32: of few keys, the kernel's backward in bfloat16 takes twice that."""
    narrow = q.dtype is torch.bfloat16 and q.device.type == "cpu" and n_keys < FEW_KEYS
    return narrow and torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Returns the same with `scaled_dot_product_attention`.

    Its `is_causal` is aligned to the top left, which is right only for T == S; a single unmasked query is passed as a
    short sequence of its group's heads, so that the kernel need not repeat keys. The kernel needs queries, keys and
    values of one width: narrower ones are padded with zeros, which change no score and are cut off the result.
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
    if _widens(q, k.shape[2]):
        with torch.autocast("cpu", enabled=False):
            wide = mask.float() if isinstance(mask, Tensor) and mask.dtype is q.dtype else mask
            return fused(q.float(), k.float(), v.float(), wide, scale).to(q.dtype)
    if not isinstance(mask, Tensor) and training_attention.attends(q, k, v, causal=causal):
        return training_attention.attend(q, k, v, scale, causal=causal)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=None if causal else mask, is_causal=causal, scale=scale, enable_gqa=H != K
    )

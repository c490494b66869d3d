"""Attention of a training step by the native library: causal or over all keys, in float32 on the CPU.

What is saved for the backward pass is what PyTorch's fused kernel saves: q, k, v, the result and one log-sum-exp per
query, from which the scores are computed again (Dao et al. 2022, arXiv 2205.14135).

Shapes: q (B, H, T, D); k, v (B, K, S, D) with H a multiple of K; the result and gradients lie as (B, T or S, heads, D).
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_bool, c_float, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from asbuilt.kernels import native
from asbuilt.kernels.native import pointer
from asbuilt.kernels.native_gradients import PLAIN

WIDEST = 256  # numbers of a head, as kWidestHead in native/src/kernels.h
# Where the library was measured to be faster: numbers of a key head's keys at most, by whether queries see only earlier
# ones, and B H T S D at least, below which a call from Python takes longer than the kernel saves.
MOST = {True: 1 << 18, False: 1 << 16}
LEAST = 1 << 22


class _HeadRows(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("strides", c_int64 * 3))


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, _HeadRows) for name in ("q", "k", "v", "dy")),
        *((name, c_int64) for name in ("texts", "heads", "key_heads", "tokens", "keys", "d")),
        *(("causal", c_bool), ("scale", c_float)),
        *((name, c_void_p) for name in ("y", "log_z", "dq", "dk", "dv")),
    )


def attends(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> bool:
    """Returns whether the library attends here, under autograd."""
    given = (q, k, v)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in given) or not _faster(q, k, v, causal):
        return False
    if q.stride(1) > q.stride(2) or any(type(x) not in PLAIN or x.stride(-1) != 1 for x in given):
        return False  # PyTorch's result lies as the queries do
    with torch.no_grad():
        return native.ready(*given) is not None


def _faster(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Returns whether shapes are such as the library computes, and sooner than PyTorch, which divides heads further."""
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    fits = k.shape == v.shape == (B, K, S, D) and K > 0 and H % K == 0 and D <= WIDEST and MOST[causal] >= S * D
    return fits and T > 1 and B * H * T * S * D >= LEAST and torch.get_num_threads() <= B * K


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Tensor:
    """Returns softmax(scale q k^T) v (B, H, T, D), if the library `attends`; `causal` needs T == S."""
    assert not causal or q.shape[2] == k.shape[2]
    return Attention.apply(q, k, v, scale, causal)  # type: ignore[no-any-return]


def _job(q: Tensor, k: Tensor, v: Tensor, dy: Tensor | None, scale: float, causal: bool, *more: Tensor) -> _Attention:
    """Returns what the library reads; `more` are the result and log-sum-exps, and gradients, as they lie."""
    given = [_HeadRows() if x is None else _HeadRows(pointer(x), (c_int64 * 3)(*x.stride()[:3])) for x in (q, k, v, dy)]
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    return _Attention(*given, *(B, H, K, T, S, D), causal, scale, *(pointer(x) for x in more))


class Attention(torch.autograd.Function):
    """Saves its inputs, the result and the log-sum-exps (B, H, T), all as PyTorch's own kernel lays them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:  # noqa: ANN401, D102
        lib = native.library()
        assert lib is not None
        B, H, T, D = q.shape
        y, log_z = q.new_empty(B, T, H, D), q.new_empty(B, T, H)
        lib.asbuilt_attention(byref(_job(q, k, v, None, scale, causal, y, log_z)))
        y, log_z = y.transpose(1, 2), log_z.transpose(1, 2)
        ctx.save_for_backward(q, k, v, y, log_z)
        ctx.scale, ctx.causal = scale, causal
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401, D102  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, y, log_z = ctx.saved_tensors
        lib = native.ready(q, k, v, dy)
        if lib is None:
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            return *flash(dy, q, k, v, y, log_z, 0.0, ctx.causal, scale=ctx.scale), None, None
        apart = [x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in (q, k, v)]
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        held = [x.transpose(1, 2).contiguous() for x in (y, log_z)]
        lib.asbuilt_attention(byref(_job(q, k, v, dy, ctx.scale, ctx.causal, *held, *apart)))
        return *(x.transpose(1, 2) for x in apart), None, None

"""What the native library computes of a training step beside products: activations, RMSNorm, RoPE, cross-entropy.

Each has its reference in torch beside its caller: `kernels/gates.py`, `kernels/norm.py`, `kernels/rotary.py` and
`train/loss.py`. All return None where the library cannot, in float32 and, except for norms, in bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_bool, c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor, nn

from asbuilt.kernels import native
from asbuilt.kernels.native import ACTIVATIONS, pointer

NUMBERS = (torch.float32, torch.bfloat16)
PLAIN = (Tensor, nn.Parameter)  # a tensor of another class may have no numbers of its own, as one that ranks share


class _Activated(ctypes.Structure):
    _fields_ = (
        *(("narrow", c_bool), ("activation", c_int)),
        *((name, c_void_p) for name in ("x", "dy", "y")),
    )


class _Norms(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "gain", "dy")),
        *(("eps", c_float), ("rows", c_int64), ("width", c_int64)),
        *((name, c_void_p) for name in ("y", "rstd", "dgain")),
    )


class _Apart(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("heads", c_int64), ("strides", c_int64 * 3))


class _Heads(ctypes.Structure):
    _fields_ = (
        *(("narrow", c_bool), ("back", c_bool), ("joined", c_void_p)),
        *((name, c_int64) for name in ("texts", "tokens", "d", "row_stride")),
        *(("cos", c_void_p), ("sin", c_void_p), ("table_stride", c_int64), ("apart", _Apart * 3)),
    )


class _Likelihood(ctypes.Structure):
    _fields_ = (
        *(("narrow", c_bool), ("logits", c_void_p), ("targets", c_void_p)),
        *((name, c_int64) for name in ("rows", "width", "stride")),
        *(("z", c_float), ("nats", c_void_p), ("log_z", c_void_p), ("d", c_void_p), ("dl", c_void_p)),
    )


def _ready(*tensors: Tensor | None, dtypes: Sequence[torch.dtype] = NUMBERS) -> Any | None:  # noqa: ANN401
    """Returns the library if all are plain tensors of one of these dtypes on the CPU, outside of autograd."""
    given = [one for one in tensors if one is not None]
    if given[0].dtype not in dtypes or any(type(one) not in PLAIN for one in given):
        return None
    return native.ready(*given, dtype=given[0].dtype)


def _narrow(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16


def activated(x: Tensor, activation: str) -> Tensor | None:
    """Returns activation(x)."""
    if activation not in ACTIVATIONS or (lib := _ready(x)) is None or not x.is_contiguous():
        return None
    y = torch.empty_like(x)
    job = _Activated(_narrow(x), ACTIVATIONS[activation], pointer(x), None, pointer(y))
    lib.asbuilt_activate(byref(job), x.numel())
    return y


def activated_gradient(x: Tensor, dy: Tensor, activation: str) -> Tensor | None:
    """Returns the gradient of x from that of activation(x)."""
    if activation not in ACTIVATIONS or (lib := _ready(x, dy)) is None or not x.is_contiguous():
        return None
    dy, dx = dy.contiguous(), torch.empty_like(x)
    job = _Activated(_narrow(x), ACTIVATIONS[activation], pointer(x), pointer(dy), pointer(dx))
    lib.asbuilt_activate(byref(job), x.numel())
    return dx


def norm(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """Returns (x r gain, r), r (..., 1) the reciprocal root mean square of each row, in float32."""
    lib = _ready(x, gain, dtypes=(torch.float32,))
    if lib is None or not (x.is_contiguous() and gain.is_contiguous()):
        return None
    y, rstd, width = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1), x.shape[-1]
    given = pointer(x), pointer(gain), None, eps, rstd.numel(), width
    lib.asbuilt_norm(byref(_Norms(*given, pointer(y), pointer(rstd), None)))
    return y, rstd


def norm_gradient(x: Tensor, gain: Tensor, rstd: Tensor, dy: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the gradients of x and of the gain, in float32."""
    lib = _ready(x, gain, rstd, dy, dtypes=(torch.float32,))
    if lib is None or not (x.is_contiguous() and gain.is_contiguous()):
        return None
    dy, dx, dgain = dy.contiguous(), torch.empty_like(x), torch.zeros_like(gain)
    given = pointer(x), pointer(gain), pointer(dy), 0.0, rstd.numel(), x.shape[-1]
    lib.asbuilt_norm(byref(_Norms(*given, pointer(dx), pointer(rstd), pointer(dgain))))
    return dx, dgain


def _turned(
    joined: Tensor,
    apart: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    lib: Any,  # noqa: ANN401
    *,
    back: bool,
) -> None:
    B, T, _, D = joined.shape
    pieces = (_Apart * 3)(*(_Apart(pointer(x), x.shape[2], (c_int64 * 3)(*x.stride()[:3])) for x in apart))
    table = 0 if len(cos) == 1 else cos.stride(0)
    sizes = (B, T, D, joined.stride(1))
    job = _Heads(_narrow(joined), back, pointer(joined), *sizes, pointer(cos), pointer(sin), table, pieces)
    lib.asbuilt_heads(byref(job))


def turns(joined_BTHD: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Returns whether the library can rotate whole heads that lie side by side, under autograd too."""
    fits = cos.shape[1] == joined_BTHD.shape[1] and cos.shape[-1] == joined_BTHD.shape[-1]
    with torch.no_grad():
        lib = _ready(joined_BTHD, cos, sin)
    return lib is not None and fits and all(x.is_contiguous() for x in (joined_BTHD, cos, sin))


def turned_apart(
    joined_BTHD: Tensor, counts: tuple[int, int, int], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v (B, T, heads, D), of so many heads each, q and k with RoPE over halves; if it `turns` them."""
    B, T, _, D = joined_BTHD.shape
    q, k, v = (joined_BTHD.new_empty(B, T, count, D) for count in counts)
    _turned(joined_BTHD, (q, k, v), cos, sin, native.library(), back=False)
    return q, k, v


def joined_back(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """Returns the gradient of what `turned_apart` takes, from those of what it gives."""
    lib = _ready(dq, dk, dv, cos, sin)
    if lib is None or not (cos.is_contiguous() and sin.is_contiguous()):
        return None
    apart = [x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv)]
    B, T, _, D = dq.shape
    joined = dq.new_empty(B, T, sum(x.shape[2] for x in apart), D)
    _turned(joined, apart, cos, sin, lib, back=True)
    return joined


def likelihood(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns ln Z - l[target] and ln Z, Z = sum of e^l, of rows of logits: (N) each, in float32."""
    lib = _ready(logits_NV)
    if lib is None or logits_NV.dim() != 2 or logits_NV.stride(-1) != 1 or targets_N.dtype is not torch.int64:
        return None
    N, V = logits_NV.shape
    nats, log_z = torch.empty(N), torch.empty(N)
    targets_N = targets_N.contiguous()
    given = _narrow(logits_NV), pointer(logits_NV), pointer(targets_N), N, V, logits_NV.stride(0)
    job = _Likelihood(*given, 0.0, pointer(nats), pointer(log_z), None, None)
    return (nats, log_z) if lib.asbuilt_likelihood(byref(job)) else None


def likelihood_gradient(
    logits_NV: Tensor, targets_N: Tensor, log_z_N: Tensor, z: float, d: Tensor, *, within: bool = False
) -> Tensor:
    """Returns d (p (1 + 2 z ln Z) - 1[target]) of logits that `likelihood` has read, in their place if `within`."""
    lib = native.library()
    assert lib is not None
    N, V = logits_NV.shape
    dl, targets_N, d = logits_NV if within else logits_NV.new_empty(N, V), targets_N.contiguous(), d.float()
    given = _narrow(logits_NV), pointer(logits_NV), pointer(targets_N), N, V, logits_NV.stride(0)
    lib.asbuilt_likelihood(byref(_Likelihood(*given, z, None, pointer(log_z_N), pointer(d), pointer(dl))))
    return dl

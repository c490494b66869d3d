"""The optional library of native kernels (native/, `asbuilt[native]`): plain functions over pointers, by ctypes.

Without it, with ASBUILT_NATIVE=0, under autograd, off the CPU or in another dtype than float32, torch computes. The
library chooses the fastest instruction set of this processor; ASBUILT_NATIVE=portable, or another name, sets one.

Packed weights are multiplied in integers: each 32 inputs are rounded to int8 with one scale d = max|x| / 127, and what
that leaves to int8 again, in steps of d / 254. A product differs from the exact one by at most the sum of |w| d / 508:
254 times less than with int8 alone, as llama.cpp rounds. Many rows are multiplied in float32, or with tiles of bfloat16
by two such parts of each number: within 2^-16 of the sum of |w| |x|.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_bool, c_char_p, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asbuilt.dtypes import BLOCKS
from asbuilt.errors import InputError
from asbuilt.kernels.codebooks import GRIDS

log = logging.getLogger(__name__)
VERSION, SWITCH = 7, "ASBUILT_NATIVE"
# A format whose name ends so holds groups of 8 rows interleaved, the layout that the native kernels read.
INTERLEAVED = "x8"
GROUP = 8  # rows
# Plain numbers that the library reads, by its names.
NUMBERS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class PackedMatrix(ctypes.Structure):
    """A matrix of interleaved blocks or plain numbers."""

    _fields_ = (("format", c_int), ("data", c_void_p), ("rows", c_int64), ("inputs", c_int64))


class _DeltaRule(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "tokens", "key_heads", "values_per_key", "d_key", "d_value")),
        *((name, c_void_p) for name in ("q", "k", "v")),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("beta", "decay")),
        *((name, c_int64) for name in ("beta_stride", "decay_stride")),
        *((name, c_void_p) for name in ("rate", "dt_bias")),
        ("by_channel", c_bool),
        ("valid", c_void_p),
        ("eps", c_float),
        ("state", c_void_p),
        ("past", c_bool),
        ("y", c_void_p),
    )


@cache
def library() -> Any | None:  # noqa: ANN401  # ctypes' functions have no types
    """Returns the library, or None where it is not installed, not wanted, or cannot be loaded, which is logged.

    Raises InputError for an instruction set that this processor or build lacks.
    """
    wanted = os.environ.get(SWITCH, "")
    found = importlib.util.find_spec("asbuilt_native") if wanted != "0" else None
    places = [] if found is None or found.origin is None else [*Path(found.origin).parent.glob("*asbuilt_kernels.*")]
    if not places:
        return None
    try:
        lib = ctypes.CDLL(str(places[0]))
    except OSError as error:
        log.warning("the native kernels cannot be loaded, torch computes: %s", error)
        return None
    if lib.asbuilt_version() != VERSION:
        log.warning("the native kernels are of version %d, not %d; torch computes", lib.asbuilt_version(), VERSION)
        return None
    lib.asbuilt_instructions.restype = lib.asbuilt_usable.restype = c_char_p
    lib.asbuilt_packed.argtypes = (c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int)
    lib.asbuilt_interleave.argtypes = (c_int, c_void_p, c_int64, c_int64, c_int)
    lib.asbuilt_grid.argtypes = (c_char_p, c_void_p, c_int)
    lib.asbuilt_rows.argtypes = (c_void_p, c_void_p, c_int64, c_void_p)
    lib.asbuilt_convolve.argtypes = (c_void_p, c_int64, c_void_p, c_void_p, c_void_p, *(c_int64,) * 4, c_int, c_void_p)
    lib.asbuilt_gated_norm.argtypes = (
        *(c_void_p, c_int64) * 2,
        *(c_void_p, c_float, c_float),
        *(c_int64,) * 3,
        *(c_int, c_void_p),
    )
    lib.asbuilt_gated_product.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p)
    lib.asbuilt_delta_rule.argtypes = (c_void_p, c_int)
    lib.asbuilt_activate.argtypes = (c_void_p, c_int64)
    lib.asbuilt_norm.argtypes = lib.asbuilt_heads.argtypes = lib.asbuilt_likelihood.argtypes = (c_void_p,)
    lib.asbuilt_attention.argtypes = (c_void_p,)
    lib.asbuilt_layers.argtypes = (c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p)
    if wanted not in ("", "1") and not lib.asbuilt_choose(wanted.encode()):
        raise InputError(
            "not an instruction set of this processor and build",
            field=SWITCH,
            value=wanted,
            allowed=f"0 (torch computes), {', '.join(lib.asbuilt_usable().decode().split())}",
        )
    return lib


def missing() -> bool:
    """Returns whether the library is wanted and not there."""
    return os.environ.get(SWITCH, "") != "0" and library() is None


def instructions() -> str | None:
    """Returns the instruction set that the library uses here, None without the library."""
    lib = library()
    return None if lib is None else lib.asbuilt_instructions().decode()


_threads, _off = 0, False


def fast_blocks() -> bool:
    """Returns whether blocks are multiplied by vector instructions: the portable code may be slower than expanding."""
    return instructions() not in (None, "portable")


@contextmanager
def switched_off() -> Iterator[None]:
    """Has torch compute meanwhile."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


def ready(*tensors: Tensor | None, dtype: torch.dtype = torch.float32) -> Any | None:  # noqa: ANN401
    """Returns the library if it can compute with these tensors: of this dtype, on the CPU, without autograd.

    Not under a dispatch mode either, such as a FLOP counter, which would not see what the library computes.
    """
    global _threads
    if torch.compiler.is_compiling():  # a compiler cannot look into it
        return None
    lib = library()
    if lib is None or _off or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return None
    for tensor in tensors:
        if tensor is not None and (tensor.dtype is not dtype or tensor.device.type != "cpu"):
            return None
    if _threads != (threads := torch.get_num_threads()):
        lib.asbuilt_threads(threads)
        _threads = threads
    return lib


@cache
def number(format: str) -> int:
    """Returns the library's number of a block format or of one in NUMBERS, -1 for one that it lacks."""
    lib, name = library(), format.removesuffix(INTERLEAVED)
    if lib is None:
        return -1
    if name in GRIDS:  # the library has no tables of its own
        points = GRIDS[name].points().to(torch.int8).contiguous()
        known = lib.asbuilt_grid(name.upper().encode(), points.data_ptr(), points.numel())
        assert known, f"the native kernels have another grid of {name}"
    return lib.asbuilt_format(name.upper().encode())


def inputs(blocks: Tensor, format: str) -> int:
    """Returns how many numbers a row of blocks (..., K) holds."""
    size, nbytes = BLOCKS[format.removesuffix(INTERLEAVED)]
    return blocks.shape[-1] // nbytes * size


def interleave(blocks: Tensor, format: str, *, back: bool = False) -> None:
    """Interleaves the rows of a matrix of blocks (O, K) in place, or undoes it; rows beyond a multiple of 8 stay."""
    lib = library()
    assert lib is not None
    assert blocks.is_contiguous()
    lib.asbuilt_interleave(number(format), blocks.data_ptr(), len(blocks), inputs(blocks, format), int(back))


def as_stored(blocks: Tensor, format: str) -> Tensor:
    """Returns the rows (O, K) of an interleaved matrix as files hold them: a copy."""
    made = blocks.detach().to("cpu", copy=True)
    interleave(made, format, back=True)
    return made.to(blocks.device)


def multiplies(weight: Tensor, format: str | None) -> bool:
    """Returns whether the library multiplies this matrix: interleaved blocks, or plain numbers row by row."""
    if format is not None:
        return format.endswith(INTERLEAVED)
    return weight.dtype in NUMBERS and weight.dim() == 2 and weight.is_contiguous() and weight.device.type == "cpu"


def products(
    x: Tensor,
    weights: Sequence[tuple[Tensor, str | None, Tensor | None]],
    lib: Any,  # noqa: ANN401
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Returns x W^T + b (..., O) in float32 for each matrix that the library multiplies, x and the biases in float32.

    A matrix is (interleaved blocks, format, b), or (numbers, None, b). `dtype` is the model's: in bfloat16
    many rows of x, and W, may be rounded to it, where the processor multiplies such numbers.
    """
    if any(x.shape[-1] != _width(weight, format) for weight, format, _ in weights):
        raise RuntimeError(f"{x.shape[-1]} inputs, and rows of {[_width(w, f) for w, f, _ in weights]}")
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    n, rows = len(weights), len(flat)
    made = [x.new_empty(*x.shape[:-1], len(weight)) for weight, _, _ in weights]
    matrices = (PackedMatrix * n)(*(matrix(w, f) for w, f, _ in weights))
    biases = (c_void_p * n)(*(None if b is None else b.data_ptr() for _, _, b in weights))
    outs = (c_void_p * n)(*(y.data_ptr() for y in made))
    strides = (c_int64 * n)(*(len(w) for w, _, _ in weights))
    narrow = int(dtype is torch.bfloat16)
    lib.asbuilt_packed(n, matrices, flat.data_ptr(), rows, flat.stride(0), biases, outs, strides, narrow)
    return made


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Returns x W^T + b of plain numbers in x's dtype, computed in float32; None where the library cannot."""
    if x.dtype not in NUMBERS or (lib := ready(x, weight, bias, dtype=x.dtype)) is None or not multiplies(weight, None):
        return None
    made = products(x.float(), [(weight, None, None if bias is None else bias.float())], lib, x.dtype)
    return made[0].to(x.dtype)


def matrix(weight: Tensor, format: str | None) -> PackedMatrix:
    """Returns what the library reads of a matrix."""
    known = NUMBERS[weight.dtype] if format is None else format
    return PackedMatrix(number(known), weight.data_ptr(), len(weight), _width(weight, format))


def _width(weight: Tensor, format: str | None) -> int:
    return weight.shape[-1] if format is None else inputs(weight, format)


def look_up(index: Tensor, blocks: Tensor, format: str) -> Tensor:
    """Returns rows (*index.shape, I) of an interleaved table in float32."""
    lib, d = library(), inputs(blocks, format)
    assert lib is not None
    flat = index.reshape(-1).to(torch.int64).contiguous()
    if flat.numel() and not (int(flat.min()) >= 0 and int(flat.max()) < len(blocks)):
        raise IndexError("index out of range in a packed table")
    made = torch.empty(*index.shape, d)
    table = matrix(blocks, format)
    lib.asbuilt_rows(byref(table), flat.data_ptr(), flat.numel(), made.data_ptr())
    return made


def _rows(x: Tensor) -> int | None:
    """Returns how far rows of x (..., width) are apart, None if they are not evenly."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return None
    far = span = None
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if span is not None and stride != span:
            return None
        far, span = stride if far is None else far, stride * size
    return x.shape[-1] if far is None else far


def pointer(x: Tensor | None) -> int | None:
    """Returns where a tensor's numbers begin."""
    return None if x is None else x.data_ptr()


def convolve(x_BTC: Tensor, w_CK: Tensor, bias: Tensor | None, before: Tensor | None, *, silu: bool) -> Tensor | None:
    """Returns what `kernels.convolution.convolve` does, None where the library cannot."""
    lib, far = ready(x_BTC, w_CK, bias, before), _rows(x_BTC)
    if lib is None or far is None:
        return None
    (B, T, C), K = x_BTC.shape, w_CK.shape[1]
    if len(w_CK) != C or (before is not None and before.shape != (B, C, K - 1)):
        return None
    taps_KC = w_CK.t().contiguous()
    past_BKC = None if before is None else before.transpose(1, 2).contiguous()
    y = x_BTC.new_empty(B, T, C)
    pointers = (pointer(past_BKC), taps_KC.data_ptr(), pointer(bias))
    lib.asbuilt_convolve(x_BTC.data_ptr(), far, *pointers, B, T, C, K, int(silu), y.data_ptr())
    return y


GATINGS = {"silu": 0, "sigmoid": 1, None: 0}


def gated_norm(
    y: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    *,
    gating: str | None = None,
    offset: bool = False,
) -> Tensor | None:
    """Returns y / sqrt(mean(y^2) + eps) * gain * gating(gate) over the last dimension, None where the library cannot.

    The gain is the weight, 1 + the weight with `offset`, or 1 without one; y (..., heads, width) has `gate` (..., heads
    * width), or none.
    """
    lib, far = ready(y, gate, weight), _rows(y.flatten(-2) if gate is not None else y)
    apart = 0 if gate is None else _rows(gate)
    if lib is None or far is None or apart is None or (weight is not None and not weight.is_contiguous()):
        return None
    width, heads = y.shape[-1], 1 if gate is None else y.shape[-2]
    made = y.new_empty(y.shape)
    rows = made.numel() // (width * heads)
    given = (y.data_ptr(), far, pointer(gate), apart, pointer(weight), float(offset), eps)
    lib.asbuilt_gated_norm(*given, rows, heads, width, GATINGS[gating], made.data_ptr())
    return made


ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor | None:
    """Returns activation(gate) * up, None where the library cannot."""
    if activation not in ACTIVATIONS or (lib := ready(gate, up)) is None:
        return None
    far = _rows(gate)
    if far is None or far != _rows(up):
        return None
    made = gate.new_empty(gate.shape)
    width = gate.shape[-1]
    rows = made.numel() // width
    lib.asbuilt_gated_product(
        gate.data_ptr(), up.data_ptr(), far, rows, width, ACTIVATIONS[activation], made.data_ptr()
    )
    return made


def delta_rule(
    mixed_BTC: Tensor,
    beta: Tensor,
    decay: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    valid_BT: Tensor | None,
    shape: tuple[int, int, int, int],
    eps: float,
    state_GDW: Tensor | None,
    *,
    past: bool,
) -> Tensor | None:
    """Returns what the queries of a gated delta rule read (B, T, value heads * V), None where the library cannot.

    `mixed_BTC` are q, k and v side by side, not yet normalised; `beta` and `decay` are before sigmoid and softplus, the
    decay per value head, or per channel of the keys; `shape` is (key heads, values per key, D, V). The state after the
    last token is written to `state_GDW`, from which it starts with `past`.
    """
    heads, per_key, D, V = shape
    given = (mixed_BTC, beta, decay, rate, dt_bias, state_GDW)
    lib = ready(*given) if V % 8 == 0 else None
    far = [_rows(x) for x in (mixed_BTC, beta, decay)]
    if lib is None or None in far or (state_GDW is not None and not state_GDW.is_contiguous()):
        return None
    B, T, _ = mixed_BTC.shape
    if state_GDW is not None and state_GDW.shape != (B * heads, D, per_key * V):
        return None
    by_channel = decay.shape[-1] != heads * per_key
    state = mixed_BTC.new_empty(B * heads, D, per_key * V) if state_GDW is None else state_GDW
    y = mixed_BTC.new_empty(B, T, heads * per_key * V)
    rate, dt_bias = rate.contiguous(), dt_bias.contiguous()
    valid = None if valid_BT is None else valid_BT.expand(B, T).contiguous()
    q = mixed_BTC.data_ptr()
    job = _DeltaRule(
        *(B, T, heads, per_key, D, V),
        *(q, q + 4 * heads * D, q + 8 * heads * D, far[0]),
        *(beta.data_ptr(), decay.data_ptr(), far[1], far[2]),
        *(rate.data_ptr(), dt_bias.data_ptr(), by_channel, pointer(valid), eps, state.data_ptr(), past, y.data_ptr()),
    )
    lib.asbuilt_delta_rule(byref(job), torch.get_num_threads())
    return y

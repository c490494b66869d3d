"""Packed weights in block formats: dequantised one tile of rows at a time.

A block is a number of consecutive values of a row with their scales: (..., blocks * bytes) as uint8. What its bytes
mean, kernels/blocks.py and kernels/codebooks.py say. This is the reference: a product dequantises what it multiplies,
forward and backward, and saves none of it. The native kernels multiply interleaved blocks as they are
(kernels/native.py).

Shapes: rows N, inputs I, outputs O, bytes of a row of blocks K.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.dtypes import BLOCKS
from asbuilt.kernels import blocks as of_numbers
from asbuilt.kernels import codebooks, native
from asbuilt.kernels import rows as plain
from asbuilt.kernels.blocks import FLOAT32_SCALES, LARGEST_POWER, SCALES, aligned, halves
from asbuilt.kernels.memory.linear import tile_rows
from asbuilt.kernels.native import INTERLEAVED

EXPANDED = of_numbers.EXPANDED | codebooks.EXPANDED


def expand(blocks: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """Returns the values (..., I) of rows of blocks (..., K) in `dtype`, computed in float32.

    An interleaved matrix is expanded as a whole.
    """
    if format.endswith(INTERLEAVED):
        blocks, format = native.as_stored(blocks, format), format.removesuffix(INTERLEAVED)
    size, nbytes = BLOCKS[format]
    numbers = codebooks.expand(blocks, format, dtype)
    return numbers.view(*blocks.shape[:-1], blocks.shape[-1] // nbytes * size)


def look_up(index: Tensor, weight: Tensor, format: str | None, dtype: torch.dtype) -> Tensor:
    """Returns rows of a table, (*index.shape, I); without a format the table is plain."""
    if format is None:
        return F.embedding(index, weight)
    if format.endswith(INTERLEAVED):
        return native.look_up(index, weight, format).to(dtype)
    return expand(weight[index], format, dtype)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, format: str | None = None, out: Tensor | None = None
) -> Tensor:
    """Returns x W^T + b, (..., O) from (..., I), W as blocks (O, K) of the format, or plain without one."""
    if format is None:
        return plain.linear(x, weight, bias, out)
    if format.endswith(INTERLEAVED):
        made = products(x, ((weight, format, bias),))
        if made is not None:
            return made[0] if out is None else out.copy_(made[0])
        weight, format = native.as_stored(weight, format), format.removesuffix(INTERLEAVED)
    made = _Product.apply(x, weight, format, bias)
    return made if out is None else out.copy_(made)


def products(x: Tensor, weights: Sequence[tuple[Tensor, str | None, Tensor | None]]) -> list[Tensor] | None:
    """Returns x W^T + b of interleaved matrices (blocks, format, b); None where the native kernels cannot compute."""
    if x.is_cuda or x.is_meta or (lib := native.ready()) is None:
        return None
    biases = (None if b is None else b.float() for _, _, b in weights)
    given = [(w, format, b) for (w, format, _), b in zip(weights, biases, strict=True)]
    return [y.to(x.dtype) for y in native.products(x.float(), given, lib, x.dtype)]


class _Product(torch.autograd.Function):
    """x W^T + b; W is dequantised again for the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Tensor, format: str, bias: Tensor | None) -> Tensor:  # noqa: ANN401  # torch's own
        """Returns (..., O)."""
        ctx.save_for_backward(blocks)
        ctx.format = format
        made = x.new_empty((*x.shape[:-1], len(blocks)))
        for part, matrix in tiles(blocks, format, x.dtype):
            made[..., part] = plain.linear(x, matrix, None if bias is None else bias[part])
            del matrix  # before the next one is dequantised
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, Tensor | None]:  # noqa: ANN401  # torch's own
        """Returns the gradients of x and b."""
        (blocks,), (grad,) = ctx.saved_tensors, grads
        made = None
        for part, matrix in tiles(blocks, ctx.format, grad.dtype):
            added = grad[..., part] @ matrix
            del matrix
            made = added if made is None else made.add_(added)
        assert made is not None
        return made, None, None, grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None


def tiles(blocks: Tensor, format: str, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yields ranges of rows and their values (n, I)."""
    n = tile_rows(blocks.shape[-1] // BLOCKS[format][1] * BLOCKS[format][0])
    for start in range(0, len(blocks), n):
        part = slice(start, start + n)
        yield part, expand(blocks[part], format, dtype)


def finite(blocks: Tensor, format: str) -> bool:
    """Returns whether all scales are finite, and with them all values of the blocks (..., K).

    A power of two of MXFP4 counts as finite if six times it is.
    """
    raw = blocks.reshape(-1, BLOCKS[format][1])
    if format == "mxfp4":
        return bool((raw[:, 0] <= LARGEST_POWER).all())
    if format == "iq1_m":
        return bool(codebooks.scale_of_iq1_m(raw).isfinite().all())
    if format in FLOAT32_SCALES:
        return bool(aligned(raw[:, :4]).view(torch.float32).isfinite().all())
    return all(bool(halves(raw[:, at : at + 2]).isfinite().all()) for at in SCALES[format])

"""Quantised weights of published checkpoints, expanded to float32: what each format's bits and scales mean.

Every function takes the tensors as stored and returns a matrix (O, I), expanded a tile of rows at a time, so that
little is allocated beside the result. Shapes are checked where the tensors are found (`checkpoint/quantised`).

Shapes: outputs O, inputs I, groups of a row G.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asbuilt.dtypes import FP4
from asbuilt.errors import InputError

TILE = 1 << 20  # numbers that are expanded at once
# The column of each four bits of an int32, lowest first, as AWQ's kernels want them.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def by_rows(shape: tuple[int, int], rows: Callable[[slice], Tensor], step: int = 1) -> Tensor:
    """Returns the matrix of which `rows` gives some, as many as a tile holds, a multiple of `step`."""
    outputs, inputs = shape
    made = torch.empty(shape, dtype=torch.float32)
    n = max(1, TILE // max(1, inputs) // step) * step
    for start in range(0, outputs, n):
        part = slice(start, min(start + n, outputs))
        made[part] = rows(part)
    return made


def powers(scales: Tensor) -> Tensor:
    """Returns scales as float32; bytes, and floats without fraction (E8M0), are exponents biased by 127."""
    if scales.dtype.itemsize > 1 or scales.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return scales.float()
    raw = scales.view(torch.uint8)
    return torch.ones(raw.shape).ldexp(raw.int() - 127)


def nibbles(raw: Tensor) -> Tensor:
    """Returns (..., 2n) of bytes (..., n), the lower half of each first."""
    raw = raw.view(torch.uint8)
    return torch.stack((raw & 15, raw >> 4), -1).flatten(-2)


def fp4(raw: Tensor) -> Tensor:
    """Returns the numbers (..., 2n) of bytes (..., n)."""
    return torch.tensor(FP4).index_select(0, nibbles(raw).int().flatten()).view(*raw.shape[:-1], -1)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Returns `count` numbers of `bits` each from rows of 32-bit words, one after the other, the lowest bits first."""
    raw = words.contiguous().view(torch.uint8)
    if bits == 8:
        return raw[..., :count]
    if bits == 4:
        return nibbles(raw)[..., :count]
    places = torch.arange(8, dtype=torch.uint8)
    single = ((raw[..., None] >> places) & 1).flatten(-2)[..., : count * bits]
    return (single.unflatten(-1, (count, bits)) << places[:bits]).sum(-1, dtype=torch.uint8)


def numbers_of(codes: Tensor) -> Tensor:
    """Returns a new float32 tensor of the same numbers; 8-bit floats are looked up, which is four times as fast."""
    if codes.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return codes.float()
    table = torch.arange(256, dtype=torch.uint8).view(codes.dtype).float()
    return table.index_select(0, codes.reshape(-1).view(torch.uint8).int()).view(codes.shape)


def tiled(codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None = None) -> Tensor:
    """Returns (code - zero) * scale, a scale (ceil(O / b0), ceil(I / b1)) for each block of b0 rows and b1 columns."""
    scale, down, across = powers(scales), *block

    def rows(part: slice) -> Tensor:
        of = torch.arange(part.start, part.stop) // down
        numbers = numbers_of(codes[part])
        if zeros is not None:
            each(numbers, Tensor.sub_, zeros[of].float(), across)
        return each(numbers, Tensor.mul_, scale[of], across)

    return by_rows((codes.shape[0], codes.shape[1]), rows)


def each(
    numbers: Tensor, change: Callable[[Tensor, Tensor], Tensor], values: Tensor, group: int, of: Tensor | None = None
) -> Tensor:
    """Changes numbers (n, I) in place by values (n, G): of the group that `of` tells, or of groups side by side."""
    if of is not None:
        change(numbers, values.index_select(1, of))
    elif numbers.shape[1] == values.shape[1] * group:
        change(numbers.unflatten(1, (-1, group)), values[..., None])
    else:
        change(numbers, values.repeat_interleave(group, 1)[:, : numbers.shape[1]])
    return numbers


def four_bit_floats(raw: Tensor, scales: Tensor, group: int, whole: float = 1.0) -> Tensor:
    """Returns number * scale * whole, of bytes (O, I / 2), with a scale per group of a row.

    NVFP4: groups of 16 with E4M3 scales, and `whole` for the matrix; MXFP4: groups of 32 with powers of two.
    """
    scale = powers(scales) * whole
    return by_rows((len(raw), 2 * raw.shape[1]), lambda part: each(fp4(raw[part]), Tensor.mul_, scale[part], group))


def require_groups(columns: Tensor, groups: int, what: str) -> Tensor:
    """Returns the group of each input; raises InputError, naming `what`, for a group that has no scale."""
    if len(columns) and not (int(columns.min()) >= 0 and int(columns.max()) < groups):
        allowed = f"0 to {groups - 1}"
        raise InputError("groups that are not there", field=what, value=int(columns.max()), allowed=allowed)
    return columns.int()


def looked_up(raw: Tensor, table: Tensor, scales: Tensor, block: int, shape: tuple[int, int]) -> Tensor:
    """Returns table[code] * scale of all numbers one after the other, the upper half of a byte first.

    bitsandbytes' 4-bit formats: a scale per `block` numbers (Dettmers et al. 2023, arXiv 2305.14314).
    """
    flat, size = raw.flatten().view(torch.uint8), shape[0] * shape[1]
    made = torch.empty(size, dtype=torch.float32)
    step = max(1, TILE // block) * block
    for start in range(0, size, step):
        part = slice(start, min(start + step, size))
        pairs = flat[start // 2 : -(-part.stop // 2)]
        codes = torch.stack((pairs >> 4, pairs & 15), -1).flatten()[: part.stop - start]
        scale = scales[start // block : -(-part.stop // block)].repeat_interleave(block)[: len(codes)]
        made[part] = table.float().index_select(0, codes.int()) * scale
    return made.view(shape)


def nested(codes: Tensor, table: Tensor, scales: Tensor, block: int, offset: float) -> Tensor:
    """Returns the float32 scales that were quantised themselves: table[code] * scale + offset, by blocks."""
    found = table.float().index_select(0, codes.flatten().int())
    return found * scales.float().repeat_interleave(block)[: len(found)] + offset

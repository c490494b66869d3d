"""Matrices of 8- and 4-bit floats, and 8-bit integers, with scales per matrix, row, block or group of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asbuilt.checkpoint.quantised.find import HALVES, Finder, Holdable, Module, Read, held_module
from asbuilt.errors import InputError
from asbuilt.families.shared.reader import is_whole
from asbuilt.formats.safetensors import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

EIGHT = ("F8_E4M3", "F8_E5M2", "I8")
POWERS = ("U8", "F8_E8M0")  # scales that are powers of two
SCALES = (*HALVES, *POWERS)
NVFP4, MXFP4 = 16, 32  # numbers of a group
USUAL = ((128, 128), (1, MXFP4))  # blocks that formats have without stating them
Shape = tuple[int, ...]


def scaled(finder: Finder, name: str) -> Module | None:
    """Returns what a scale belongs to: a matrix or stack in 8 or 4 bits; None where it is no scale of a weight."""
    plain = next((one for one in (name, f"{name}.weight", name.removesuffix("_weight")) if one in finder.stored), "")
    found = finder.stored.get(plain)
    if found is None or found.dtype not in (*EIGHT, "U8") or len(found.shape) not in (2, 3):
        return None
    named = (f"{plain}_scale_inv", f"{plain}_scale", f"{name}.scale", f"{plain}_weight_scale")
    beside = next(one for one in named if one in finder.stored)
    scales, packed = finder.stored[beside], finder.take(plain, (*EIGHT, "U8"))
    if packed.dtype == "U8" or (packed.dtype == "I8" and scales.dtype in POWERS):
        return _four_bits(finder, plain, packed, scales)
    return _eight_bits(finder, plain, packed, finder.take(beside, SCALES))


def _eight_bits(finder: Finder, name: str, packed: StoredTensor, scales: StoredTensor) -> Module:
    shape = packed.shape
    block = _block(finder, shape, scales)
    zeros = finder.maybe(f"{name}_zero_point", ("I8", "U8", *HALVES))
    if zeros is not None:
        finder.require(zeros, zeros.shape == scales.shape, "of the shape of the scales")
    grid = tuple(math.ceil(size / of) for size, of in zip(shape[-2:], block, strict=True))

    def one(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        from asbuilt.kernels import dequantise

        return dequantise.tiled(codes, scale.reshape(grid), block, None if zero is None else zero.reshape(grid))

    def expand(read: Read) -> Tensor:
        codes, scale = read(packed.name), read(scales.name)
        zero = None if zeros is None else read(zeros.name)
        if len(shape) == 2:
            return one(codes, scale, zero)
        made = codes.new_empty(shape, dtype=scale.new_empty(0).float().dtype)
        each = scale.numel() == math.prod(grid) * shape[0]
        for e in range(shape[0]):
            made[e] = one(codes[e], scale[e] if each else scale, None if zero is None else zero[e] if each else zero)
        return made

    def rows(read: Read) -> Sequence[Holdable]:
        from asbuilt.kernels import integers

        scale = read(scales.name).reshape(grid)
        zero = None if zeros is None else read(zeros.name).reshape(grid)
        return (integers.of_rows(read(packed.name), scale, zero, block[1]),)

    by_row = packed.dtype == "I8" and len(shape) == 2 and block[0] == 1 and scales.dtype in HALVES
    return Module(name=name, shape=shape, of=packed, expand=expand, held=rows if by_row else None)


def _block(finder: Finder, shape: Shape, scales: StoredTensor) -> tuple[int, int]:
    """Returns the rows and columns that share a scale: of the config's blocks; of equal ones if it states none."""
    outputs, inputs = shape[-2:]
    finder.require(scales, min(shape) > 0, "scales of a matrix")
    grid = _grid(shape, scales.shape)
    if grid is not None:
        own = _blocks(finder)
        for down, across in (*own, *USUAL):
            if grid == (math.ceil(outputs / down), math.ceil(inputs / across)):
                return down, across
        whole = not own or grid in ((1, 1), (outputs, 1))
        if whole and min(grid) > 0 and outputs % grid[0] == 0 and inputs % grid[1] == 0:
            return outputs // grid[0], inputs // grid[1]
    raise finder.error(scales, scales.shape, f"scales of a matrix {shape}: one, one a row, or one a block")


def _grid(shape: Shape, scales: Shape) -> tuple[int, int] | None:
    """Returns the number of blocks down and across a matrix; None where that is not what the scales' shape says."""
    if math.prod(scales) == 1:
        return 1, 1
    if len(shape) == 3:  # of a stack: one scale for each matrix, or as a matrix has them
        if scales[0] != shape[0]:
            return None
        return (1, 1) if math.prod(scales) == shape[0] else _grid(shape[1:], scales[1:])
    if len(scales) == 1:
        return scales[0], 1
    if len(scales) == 4 and scales[1] == scales[3] == 1:  # modelopt's blocks, (down, 1, across, 1)
        return scales[0], scales[2]
    return (scales[0], scales[1]) if len(scales) == 2 else None


def _blocks(finder: Finder) -> list[tuple[int, int]]:
    """Returns the blocks that a config states."""
    said = [finder.said.get("weight_block_size"), *(scheme.get("block_structure") for scheme in finder.schemes)]
    pairs = [one for one in said if isinstance(one, list) and len(one) == 2]
    return [(one[0], one[1]) for one in pairs if all(is_whole(n) and n > 0 for n in one)]


def _four_bits(finder: Finder, name: str, packed: StoredTensor, scales: StoredTensor) -> Module:
    """Returns a matrix of 4-bit floats: NVFP4 where a scale of the whole is beside it, else MXFP4."""
    if scales.dtype == "F8_E4M3":
        return floats4(finder, name, packed, scales, finder.take(f"{name}_scale_2", ("F32",)), divides=False)
    if scales.dtype not in POWERS:
        raise InputError(
            "packed in a way that cannot be loaded",
            field=f"{packed.path}: {name}",
            value=f"{packed.dtype} with scales of {scales.dtype}",
            allowed="8-bit floats or integers, NVFP4 or MXFP4",
        )
    return floats4(finder, name, packed, scales, None)


def compressed(finder: Finder, name: str) -> Module:
    """Returns a matrix of compressed-tensors in NVFP4, whose scale of the whole divides, or MXFP4."""
    packed, scales = finder.take(f"{name}_packed", ("U8",)), finder.take(f"{name}_scale", ("F8_E4M3", *POWERS))
    whole = finder.take(f"{name}_global_scale", ("F32",)) if scales.dtype == "F8_E4M3" else None
    return floats4(finder, name, packed, scales, whole, divides=True)


def floats4(
    finder: Finder,
    name: str,
    packed: StoredTensor,
    scales: StoredTensor,
    whole: StoredTensor | None,
    *,
    divides: bool = False,
) -> Module:
    """Returns a matrix or stack of bytes (..., O, I / 2) with scales (..., O, I / group)."""
    finder.take(scales.name, (scales.dtype,))
    group = MXFP4 if whole is None else NVFP4
    *rows, half = packed.shape
    finder.require(packed, len(rows) in (1, 2), "a matrix or a stack")
    finder.require(
        scales, scales.shape == (*rows, math.ceil(2 * half / group)), f"a scale per {group} numbers of a row"
    )
    if whole is not None:
        each = 1 if len(rows) == 1 else rows[0]
        finder.require(whole, len(whole.shape) < 2 and math.prod(whole.shape) in (1, each), "a scale per matrix")

    def held(read: Read) -> Sequence[Holdable]:
        from asbuilt.kernels.integers import Floats4

        codes, scale = read(packed.name), read(scales.name)
        of = [1.0] if whole is None else read(whole.name).flatten().tolist()
        of = [1 / one if divides else one for one in of]
        if len(rows) == 1:
            return (Floats4(codes, scale, group, of[0]),)
        return [Floats4(codes[e], scale[e], group, of[e % len(of)]) for e in range(rows[0])]

    def expand(read: Read) -> Tensor:
        import torch

        made = torch.empty((*rows, 2 * half))
        for place, one in zip([made] if len(rows) == 1 else made, held(read), strict=True):
            place.copy_(one.expand())
        return made

    return Module(name=name, shape=(*rows, 2 * half), of=packed, expand=expand, held=held)


# mlx's formats without biases: the numbers of a group, and of a word.
WORDS = {"mxfp4": (32, 8), "nvfp4": (16, 8), "mxfp8": (32, 4)}


def in_words(finder: Finder, base: str, words: StoredTensor, mode: str) -> Module:
    """Returns a matrix or stack of mlx in 32-bit words, which hold floats as others hold them in bytes."""
    scales = finder.take(f"{base}.scales", ("U8",))
    if mode not in WORDS:
        raise InputError(field="quantization_config.mode", value=mode, allowed=f"affine, {', '.join(WORDS)}")
    group, each = WORDS[mode]
    rows, inputs = words.shape[:-1], words.shape[-1] * each
    finder.require(scales, scales.shape == (*rows, inputs // group) and inputs % group == 0, f"groups of {group}")

    name, shape = f"{base}.weight", (*rows, inputs)

    def parts(read: Read) -> tuple[Tensor, Tensor]:
        import torch

        raw, scale = (read(part.name).flatten(0, -2).contiguous() for part in (words, scales))
        return raw.view(torch.uint8), scale.view(torch.float8_e4m3fn) if mode == "nvfp4" else scale

    def make(read: Read) -> Holdable:
        from asbuilt.kernels.integers import Floats4

        return Floats4(*parts(read), group)

    def eights(read: Read) -> Tensor:
        import torch

        from asbuilt.kernels import dequantise

        raw, scale = parts(read)
        return dequantise.tiled(raw.view(torch.float8_e4m3fn), scale, (1, group)).view(shape)

    if mode == "mxfp8":
        return Module(name=name, shape=shape, of=words, expand=eights)
    return held_module(name, shape, words, make)

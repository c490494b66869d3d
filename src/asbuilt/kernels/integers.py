"""Matrices of integers with a scale per group of a row, as checkpoint folders have them: expanded, or held as blocks.

value = scale * (code - zero), or scale * code + bias. A block of 32 numbers repeats its group's scale; formats that
would round a scale are not used, so that blocks expand to the same float32 numbers as the stored tensors, bit by bit.

Shapes: outputs O, inputs I, groups of a row G, bytes of a row of blocks K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asbuilt.dtypes import BLOCKS
from asbuilt.kernels.blocks import LARGEST_POWER
from asbuilt.kernels.dequantise import AWQ_ORDER, by_rows, each, four_bit_floats, nibbles, unpack

BLOCK = 32  # numbers
LARGEST_E4M3 = 126  # its bits; beyond are NaN and negative numbers
MIDDLE = {4: 8, 8: 128}  # the zero points of formats that have none
Rows = Callable[[slice], Tensor]


@dataclass(frozen=True)
class Integers:
    """A matrix (O, I): `codes` gives those of some rows, as many as a multiple of `step`; scales and others (O, G).

    `of` are the groups of the inputs, None where they are one after the other. Codes have `bits` and no sign unless
    they are int8.
    """

    shape: tuple[int, int]
    codes: Rows
    scale: Tensor
    group: int
    bits: int
    zero: Tensor | None = None
    bias: Tensor | None = None
    of: Tensor | None = None
    step: int = 1

    def expand(self) -> Tensor:
        """Returns the numbers (O, I) in float32."""
        return by_rows(self.shape, self._rows, self.step)

    def _rows(self, part: slice) -> Tensor:
        numbers = self.codes(part).float()
        if self.zero is not None:
            each(numbers, Tensor.sub_, self.zero[part].float(), self.group, self.of)
        each(numbers, Tensor.mul_, self.scale[part].float(), self.group, self.of)
        return (
            numbers if self.bias is None else each(numbers, Tensor.add_, self.bias[part].float(), self.group, self.of)
        )

    @property
    def formats(self) -> tuple[str, ...]:
        """The block formats that hold the matrix exactly, the smallest first."""
        alone = self.scale.shape[1] == 1  # one group: its size does not matter
        if self.of is not None or self.shape[1] % BLOCK or (self.group % BLOCK and not alone):
            return ()
        narrow = _exact(self.scale)
        if self.bias is not None:
            fits = narrow and _exact(self.bias) and self.bits <= 5
            return (("q4_1",) if self.bits <= 4 else ("q5_1",)) if fits else ()
        if self.bits > 4:
            return self._of_bytes(narrow)
        zero = self._zero
        if not bool(((zero >= 0) & (zero <= 15) & (zero == zero.round())).all()):
            return ()
        found = (("q4_0",) if narrow and bool((zero == MIDDLE[4]).all()) else ()) + (("int4_zero",) if narrow else ())
        return (*found, "int4_wide")

    def _of_bytes(self, narrow: bool) -> tuple[str, ...]:
        """The same where codes less zero points are signed bytes: with 8 bits those around the middle."""
        zero, middle = self._zero, MIDDLE[8] if self._unsigned else 0
        fits = bool((zero == middle).all()) if self.bits == 8 else bool(((zero >= 0) & (zero < 1 << self.bits)).all())
        return () if not fits else ("q8_0", "int8_wide") if narrow else ("int8_wide",)

    @property
    def _unsigned(self) -> bool:
        return self.codes(slice(0, self.step)).dtype == torch.uint8

    @property
    def _zero(self) -> Tensor:
        return torch.zeros(1, 1) if self.zero is None else self.zero.float()

    def blocks(self, format: str) -> Tensor:
        """Returns the rows (O, K) as blocks of one of `formats`."""
        outputs, inputs = self.shape
        size = BLOCKS[format][1]
        made = torch.empty(outputs, inputs // BLOCK, size, dtype=torch.uint8)
        n = max(1, (1 << 20) // inputs // self.step) * self.step
        for start in range(0, outputs, n):
            part = slice(start, min(start + n, outputs))
            self._fill(made[part], part, format)
        return made.flatten(1)

    def _fill(self, made: Tensor, part: slice, format: str) -> None:
        codes, scale = self.codes(part), self._each(self.scale[part].float())
        zero = None if self.zero is None else self._each(self.zero[part].float())
        if format in ("q8_0", "int8_wide"):
            whole = codes.to(torch.int16).unflatten(1, (-1, BLOCK))
            signed = whole if zero is None else whole - zero.to(torch.int16)[..., None]
            made[..., -BLOCK:] = signed.to(torch.int8).view(torch.uint8)
        else:
            low, high = (codes & 15).unflatten(1, (-1, 2, BLOCK // 2)).unbind(2)
            made[..., -BLOCK // 2 :] = low | high << 4
        wide = format.endswith("wide")
        start = 4 if wide else 2
        made[..., :start] = (scale if wide else scale.half())[..., None].contiguous().view(torch.uint8)
        if format.startswith("int4"):
            made[..., start] = 0 if zero is None else zero.to(torch.uint8)
        if self.bias is not None:
            made[..., 2:4] = self._each(self.bias[part].float()).half()[..., None].contiguous().view(torch.uint8)
        if format == "q5_1":
            fifth = (codes >> 4).unflatten(1, (-1, 4, 8)) << torch.arange(8, dtype=torch.uint8)
            made[..., 4:8] = fifth.sum(-1, dtype=torch.uint8)

    def _each(self, values: Tensor) -> Tensor:
        """Returns what groups have (n, G), for each block (n, I / 32)."""
        blocks = self.shape[1] // BLOCK
        if values.shape[1] == 1:
            return values.expand(-1, blocks)
        return values.repeat_interleave(self.group // BLOCK, 1)[:, :blocks]


def _exact(values: Tensor) -> bool:
    """Returns whether all numbers are float16's."""
    return values.dtype == torch.float16 or bool((values.half().float() == values.float()).all())


def gptq(
    words: Tensor, zeros: Tensor, scales: Tensor, of: Tensor | None, group: int, *, bits: int, more: int
) -> Integers:
    """Returns scale * (code - zero - more), words (I bits / 32, O), zeros (G, O bits / 32), scales (G, O).

    Frantar et al. 2022 (arXiv 2210.17323); AutoGPTQ stores zero points less one (`more`).
    """
    outputs, inputs = scales.shape[1], words.shape[0] * 32 // bits
    zero = unpack(zeros, bits, outputs).t().int() + more & ((1 << bits) - 1)

    def codes(part: slice) -> Tensor:
        return unpack(words[:, part].t(), bits, inputs)

    return Integers((outputs, inputs), codes, scales.t(), group, bits, zero=zero, of=of)


def awq(words: Tensor, zeros: Tensor, scales: Tensor, group: int) -> Integers:
    """Returns scale * (code - zero) of four bits, words (I, O / 8), zeros (G, O / 8), scales (G, O).

    Lin et al. 2023 (arXiv 2306.00978), in the layout of AutoAWQ's `gemm`.
    """
    place = torch.tensor(AWQ_ORDER).argsort()

    def columns(packed: Tensor) -> Tensor:
        eights = nibbles(packed.contiguous().view(torch.uint8)).unflatten(-1, (-1, 8)).permute(1, 2, 0)
        return eights.index_select(1, place).flatten(0, 1)

    def codes(part: slice) -> Tensor:
        return columns(words[:, part.start // 8 : -(-part.stop // 8)])

    return Integers((scales.shape[1], words.shape[0]), codes, scales.t(), group, 4, zero=columns(zeros), step=8)


def around_middle(
    words: Tensor, scales: Tensor, zeros: Tensor | None, of: Tensor | None, group: int, *, bits: int, inputs: int
) -> Integers:
    """Returns scale * (code - 2^(bits-1) - zero), words (O, ceil(I bits / 32)), scales and zeros (O, G)."""
    half = torch.full_like(scales, 1 << (bits - 1), dtype=torch.float32)

    def codes(part: slice) -> Tensor:
        return unpack(words[part], bits, inputs)

    zero = half if zeros is None else half + zeros.float()
    return Integers((len(words), inputs), codes, scales, group, bits, zero=zero, of=of)


def affine(words: Tensor, scales: Tensor, biases: Tensor, *, bits: int, group: int) -> Integers:
    """Returns scale * code + bias, words (O, I bits / 32), scales and biases (O, G): mlx's `affine`."""
    inputs = scales.shape[1] * group

    def codes(part: slice) -> Tensor:
        return unpack(words[part], bits, inputs)

    return Integers((len(words), inputs), codes, scales, group, bits, bias=biases)


def of_rows(codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> Integers:
    """Returns scale * (code - zero) of int8 codes (O, I), scales and zeros (O, G)."""
    return Integers((codes.shape[0], codes.shape[1]), lambda part: codes[part], scales, group, 8, zero=zeros)


@dataclass(frozen=True)
class Floats4:
    """A matrix of 4-bit floats: bytes (O, I / 2), scales (O, G) of 32 numbers that are powers of two, or E4M3 of 16.

    The latter are multiplied by `whole`, the scale of the matrix.
    """

    raw: Tensor
    scales: Tensor
    group: int
    whole: float = 1.0

    def expand(self) -> Tensor:
        """Returns the numbers (O, I) in float32."""
        return four_bit_floats(self.raw, self.scales, self.group, self.whole)

    @property
    def formats(self) -> tuple[str, ...]:
        """The block formats that hold the matrix exactly."""
        format, largest = ("nvfp4_wide", LARGEST_E4M3) if self.group == 16 else ("mxfp4", LARGEST_POWER)
        whole = 2 * self.raw.shape[1] % BLOCKS[format][0] == 0
        formats = ("nvfp4", format) if self.group == 16 and self.whole == 1 else (format,)
        return formats if whole and bool((self.scales.view(torch.uint8) <= largest).all()) else ()

    def blocks(self, format: str) -> Tensor:
        """Returns the rows (O, K) as blocks."""
        size, nbytes = BLOCKS[format]
        codes = nibbles(self.raw)
        made = torch.empty(len(codes), codes.shape[1] // size, nbytes, dtype=torch.uint8)
        low, high = codes.unflatten(1, (len(made[0]), -1, 2, self.group // 2)).unbind(3)
        made[..., -(size // 2) :] = (low | high << 4).flatten(2)
        per = size // self.group
        start = nbytes - size // 2 - per
        made[..., start : start + per] = self.scales.view(torch.uint8).unflatten(1, (-1, per))
        if start:
            made[..., :start] = torch.tensor([self.whole], dtype=torch.float32).view(torch.uint8)
        return made.flatten(1)

"""Matrices of a few bits per number in 32-bit words: GPTQ, AWQ, compressed-tensors and mlx."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asbuilt.checkpoint.quantised import floats
from asbuilt.checkpoint.quantised.find import HALVES, LARGEST_GROUP, Finder, Holdable, Module, Read, held_module
from asbuilt.errors import InputError, one_of
from asbuilt.formats.safetensors import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

BITS = (2, 3, 4, 5, 6, 8)
FIELD = "quantization_config"
# What is added to stored zero points: AutoGPTQ's files hold them less one, GPTQModel's second version does not.
MORE = {"gptq": 1, "gptq_v2": 0}
ROUNDED = {"auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq", "auto_round:auto_awq": "awq"}


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """The tensors of a matrix of GPTQ or AWQ, which store it transposed and differ in the order within a word."""

    name: str
    words: StoredTensor
    zeros: StoredTensor
    scales: StoredTensor


def grouped(finder: Finder, base: str) -> Module | None:
    """Returns a matrix of GPTQ or AWQ."""
    layout, more = _layout(finder)
    scales = finder.take(f"{base}.scales", HALVES, 2)
    finder.require(scales, min(scales.shape) > 0, "of groups and outputs")
    words, zeros = (finder.take(f"{base}.{end}", ("I32",), 2) for end in ("qweight", "qzeros"))
    found = Grouped(name=f"{base}.weight", words=words, zeros=zeros, scales=scales)
    columns = finder.maybe(f"{base}.g_idx", ("I32", "I64"), 1)
    finder.biases.add(f"{base}.bias")
    return _awq(finder, found) if layout == "awq" else _gptq(finder, found, columns, more)


def _layout(finder: Finder) -> tuple[str, int]:
    """Returns the layout of words and what is added to zero points; raises InputError for one that is not read."""
    said, layout = finder.said, finder.method
    if layout == "auto-round":
        packing = str(said.get("packing_format", said.get("backend")))
        if packing not in ROUNDED:
            raise InputError(field=f"{FIELD}.packing_format", value=packing, allowed=one_of(ROUNDED))
        layout = ROUNDED[packing]
    if layout == "awq":
        version = str(said.get("version") or said.get("checkpoint_format") or said.get("format") or "gemm").lower()
        if version != "gemm":
            raise InputError(field=f"{FIELD}.version", value=version, allowed="gemm")
        return "awq", 0
    form = str(said.get("checkpoint_format", said.get("format")) or "gptq")
    if layout != "gptq" or form not in MORE:
        raise InputError(field=f"{FIELD}.checkpoint_format", value=f"{layout} {form}", allowed=one_of(MORE))
    return "gptq", MORE[form]


def _gptq(finder: Finder, found: Grouped, columns: StoredTensor | None, more: int) -> Module:
    """Returns a matrix of words of inputs, for each output."""
    words, zeros, scales = found.words, found.zeros, found.scales
    groups, outputs = scales.shape
    bits = zeros.shape[1] * 32 // outputs
    finder.require(zeros, bits in BITS and zeros.shape == (groups, outputs * bits // 32), "zero points of the scales")
    inputs = words.shape[0] * 32 // bits
    finder.require(words, words.shape[1] == outputs and inputs * bits == words.shape[0] * 32, "words of whole numbers")
    if columns is not None:
        finder.require(columns, columns.shape == (inputs,), f"the groups of {inputs} inputs")
    size = finder.usual_group(inputs, groups) if columns is not None else finder.group(scales, inputs, groups)

    def make(read: Read) -> Holdable:
        from asbuilt.kernels import integers

        of = None if columns is None else _of(read(columns.name), size, groups, columns.name)
        parts = read(words.name), read(zeros.name), read(scales.name)
        return integers.gptq(*parts, of, size, bits=bits, more=more)

    return held_module(found.name, (outputs, inputs), words, make)


def _awq(finder: Finder, found: Grouped) -> Module:
    """Returns a matrix of words of eight outputs, for each input."""
    words, zeros, scales = found.words, found.zeros, found.scales
    groups, outputs = scales.shape
    inputs = words.shape[0]
    finder.require(words, words.shape[1] * 8 == outputs, f"words of eight numbers of {outputs} outputs")
    finder.require(zeros, zeros.shape == (groups, words.shape[1]), "zero points of the scales")
    size = finder.group(scales, inputs, groups)

    def make(read: Read) -> Holdable:
        from asbuilt.kernels import integers

        return integers.awq(read(words.name), read(zeros.name), read(scales.name), size)

    return held_module(found.name, (outputs, inputs), words, make)


def compressed(finder: Finder, name: str) -> Module | None:
    """Returns a matrix of compressed-tensors in words, whose shape is a tensor beside it; or one of 4-bit floats."""
    if finder.stored[f"{name}_packed"].dtype == "U8":
        return floats.compressed(finder, name)
    words = finder.take(f"{name}_packed", ("I32",), 2)
    scales = finder.take(f"{name}_scale", HALVES, 2)
    shape = finder.take(f"{name}_shape", ("I64", "I32"), 1)
    zeros = finder.maybe(f"{name}_zero_point", ("I32", "I8"), 2)
    columns = finder.maybe(f"{name}_g_idx", ("I32", "I64"), 1)
    finder.require(shape, shape.shape == (2,), "two numbers")
    outputs, inputs = (int(n) for n in finder.read(shape.name))
    finder.require(words, outputs == words.shape[0] and inputs > 0, f"of {outputs} rows")
    bits = _bits(finder, words, inputs)
    groups = scales.shape[1]
    finder.require(scales, scales.shape[0] == outputs and groups > 0, f"of {outputs} rows")
    if zeros is not None:
        packed = (math.ceil(outputs * bits / 32), groups)
        finder.require(zeros, zeros.shape == (packed if zeros.dtype == "I32" else scales.shape), "of the scales")
    if columns is not None:
        finder.require(columns, columns.shape == (inputs,), f"the groups of {inputs} inputs")
    size = finder.usual_group(inputs, groups) if columns is not None else finder.group(scales, inputs, groups)

    def make(read: Read) -> Holdable:
        from asbuilt.kernels import dequantise, integers

        zero = None if zeros is None else read(zeros.name)
        if zeros is not None and zeros.dtype == "I32":  # packed as the numbers are, along the rows
            assert zero is not None
            zero = dequantise.unpack(zero.t(), bits, outputs).t().float() - (1 << (bits - 1))
        of = None if columns is None else _of(read(columns.name), size, groups, columns.name)
        return integers.around_middle(read(words.name), read(scales.name), zero, of, size, bits=bits, inputs=inputs)

    return held_module(name, (outputs, inputs), words, make)


def _of(columns: Tensor, size: int, groups: int, what: str) -> Tensor | None:
    """Returns the groups of the inputs; None where they are one after the other, which is faster."""
    import torch

    from asbuilt.kernels import dequantise

    of = dequantise.require_groups(columns, groups, what)
    return None if torch.equal(of, torch.arange(len(of), dtype=of.dtype) // size) else of


def _bits(finder: Finder, words: StoredTensor, inputs: int) -> int:
    """Returns the bits of a number: one of the config's of which rows are as long."""
    for said in finder.schemes:
        bits = said.get("num_bits")
        if bits in BITS and math.ceil(inputs * bits / 32) == words.shape[1]:
            return bits
    raise finder.error(words, words.shape, f"rows of {inputs} numbers of the bits that config_groups has")


def affine(finder: Finder, base: str) -> Module | None:
    """Returns a matrix, table or stack of mlx: words (..., O, I bits / 32) with scales, and biases if `affine`."""
    words = finder.stored.get(f"{base}.weight")
    if words is None or words.dtype != "U32" or f"{base}.qweight" in finder.stored:
        return None
    words = finder.take(f"{base}.weight", ("U32",))
    finder.require(words, len(words.shape) in (2, 3), "a matrix or a stack")
    own = finder.said.get(base)
    said = {**finder.said, **(own if isinstance(own, dict) else {})}
    mode = said.get("mode") or "affine"
    if mode != "affine":
        return floats.in_words(finder, base, words, str(mode))
    bits, group = said.get("bits"), said.get("group_size")
    if bits not in BITS or type(group) is not int or not 0 < group <= LARGEST_GROUP:
        raise InputError(field=f"{FIELD}.bits", value=(bits, group), allowed=f"{one_of(BITS)}, in groups")
    scales = finder.take(f"{base}.scales", HALVES, len(words.shape))
    biases = finder.take(f"{base}.biases", HALVES, len(words.shape))
    *rows, columns = words.shape
    inputs = scales.shape[-1] * group
    finder.require(scales, scales.shape == (*rows, inputs // group) and inputs * bits == columns * 32, "of the groups")
    finder.require(biases, biases.shape == scales.shape, "of the shape of the scales")

    def make(read: Read) -> Holdable:
        from asbuilt.kernels import integers

        parts = (read(part.name).flatten(0, -2) for part in (words, scales, biases))
        return integers.affine(*parts, bits=bits, group=group)

    return held_module(f"{base}.weight", (*rows, inputs), words, make)

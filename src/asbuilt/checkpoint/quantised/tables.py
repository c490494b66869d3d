"""bitsandbytes' matrices: four bits that are looked up in a table, or eight with a scale per row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from asbuilt.checkpoint.quantised.find import LARGEST_GROUP, Finder, Holdable, Module, Read, held_module
from asbuilt.errors import InputError
from asbuilt.families.shared.reader import is_number, is_whole
from asbuilt.files import decoded, parse_json
from asbuilt.formats.safetensors import StoredTensor
from asbuilt.spec.part import LARGEST_SIZE

if TYPE_CHECKING:
    from torch import Tensor

STATES = tuple(f"quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
STORAGE = ("U8", "F16", "BF16", "F32")  # dtypes that the bytes may be stored as, so that they can be sharded
LONGEST_STATE = 4096


def four_bits(finder: Finder, base: str) -> Module | None:
    """Returns a matrix of NF4 or FP4: bytes, scales of blocks of it, and a JSON text with its shape."""
    name = f"{base}.weight"
    packed = finder.take(name, STORAGE)
    scales = finder.take(f"{name}.absmax", ("F32", "U8"))
    table = finder.take(f"{name}.quant_map", ("F32",), 1)
    finder.require(table, table.shape == (16,), "sixteen numbers")
    state, where = _state(finder, name)
    shape, block = _shape(state, where), _size(state, "blocksize", where)
    n = math.prod(shape)
    finder.require(packed, packed.nbytes == math.ceil(n / 2), f"{math.ceil(n / 2)} bytes, of a matrix {shape}")
    finder.require(scales, math.prod(scales.shape) == math.ceil(n / block), f"{math.ceil(n / block)} scales")
    again = _nested(finder, name, state, where, scales) if scales.dtype == "U8" else None

    def expand(read: Read) -> Tensor:
        import torch

        from asbuilt.kernels import dequantise

        scale = read(scales.name).flatten()
        if again is not None:
            codes, of, size, offset = again
            scale = dequantise.nested(scale, read(codes), read(of).flatten(), size, offset)
        raw = read(packed.name).contiguous().flatten().view(torch.uint8)
        return dequantise.looked_up(raw, read(table.name), scale, block, shape)

    return Module(name=name, shape=shape, of=packed, expand=expand)


def _state(finder: Finder, name: str) -> tuple[dict[str, Any], str]:
    """Returns the JSON object beside a matrix, and what names it in messages."""
    end = next((end for end in STATES if f"{name}.{end}" in finder.stored), STATES[0])
    found = finder.take(f"{name}.{end}", ("U8",), 1)
    finder.require(found, found.nbytes <= LONGEST_STATE, f"at most {LONGEST_STATE} bytes")
    where = f"{found.path}: {found.name}"
    state = parse_json(decoded(bytes(finder.read(found.name).tolist()), where), where)
    if not isinstance(state, dict):
        raise InputError(field=where, value=state, allowed="a JSON object")
    return state, where


def _shape(state: dict[str, Any], where: str) -> tuple[int, int]:
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(is_whole(n) and 0 < n <= LARGEST_SIZE for n in shape):
        raise InputError(field=f"{where}: shape", value=shape, allowed="two whole numbers")
    return shape[0], shape[1]


def _size(state: dict[str, Any], key: str, where: str) -> int:
    value = state.get(key, 0)
    if not is_whole(value) or not 1 < value <= LARGEST_GROUP or value % 2:
        raise InputError(field=f"{where}: {key}", value=value, allowed=f"an even number up to {LARGEST_GROUP}")
    return value


def _nested(
    finder: Finder, name: str, state: dict[str, Any], where: str, scales: StoredTensor
) -> tuple[str, str, int, float]:
    """Returns what scales that are quantised themselves are looked up in, their own scales, blocks and mean."""
    table, of = finder.take(f"{name}.nested_quant_map", ("F32",), 1), finder.take(f"{name}.nested_absmax", ("F32",))
    size, offset = _size(state, "nested_blocksize", where), state.get("nested_offset", "")
    finder.require(table, table.shape == (256,), "256 numbers")
    wanted = math.ceil(math.prod(scales.shape) / size)
    finder.require(of, math.prod(of.shape) == wanted, f"{wanted} scales")
    if not is_number(offset):
        raise InputError(field=f"{where}: nested_offset", value=offset, allowed="a number")
    return table.name, of.name, size, float(offset)


def eight_bits(finder: Finder, base: str) -> Module | None:
    """Returns a matrix of 8-bit integers, 127 of which are a row's scale (Dettmers et al. 2022, arXiv 2208.07339)."""
    packed, scales = finder.take(f"{base}.weight", ("I8",), 2), finder.take(f"{base}.SCB", ("F32",), 1)
    finder.require(scales, scales.shape == packed.shape[:1], f"{packed.shape[0]} scales")
    shape = (packed.shape[0], packed.shape[1])
    finder.require(packed, min(shape) > 0, "a matrix")

    def make(read: Read) -> Holdable:
        from asbuilt.kernels import integers

        return integers.of_rows(read(packed.name), read(scales.name)[:, None] / 127, None, shape[1])

    return held_module(f"{base}.weight", shape, packed, make)

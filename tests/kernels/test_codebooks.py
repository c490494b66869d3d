"""Blocks whose codes are looked up, beside the gguf library and the C of llama.cpp, and what their tables are."""

from __future__ import annotations

import ctypes
from importlib import import_module

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from asbuilt.dtypes import BLOCKS, GGUF_LOOKED_UP, GGUF_PACKABLE, OWN_BLOCKS
from asbuilt.kernels import codebooks, packed
from asbuilt.kernels.codebooks import GRIDS
from asbuilt.kernels.dequantise import TILE

FORMATS = tuple(name.lower() for name in GGUF_PACKABLE)


def drawn(format: str, n: int) -> np.ndarray:
    """Blocks of random bytes: every code, scales infinite and NaN among them."""
    return np.random.default_rng().integers(0, 256, (n, BLOCKS[format][1]), dtype=np.uint8)


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    """All bits, but for those of a NaN."""
    assert ours.shape == theirs.shape
    same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    assert same.all(), np.argwhere(~same)[:5]


def test_every_format_that_is_read_is_expanded() -> None:
    assert {name.lower() for name in GGUF_LOOKED_UP} == codebooks.EXPANDED.keys() - OWN_BLOCKS.keys()
    assert {name.lower() for name in GGUF_PACKABLE} | OWN_BLOCKS.keys() == packed.EXPANDED.keys()


@pytest.mark.parametrize("format", FORMATS)
def test_bit_for_bit_as_the_gguf_library(format: str) -> None:
    raw = drawn(format, 300)
    with np.errstate(all="ignore"):
        theirs = quants.dequantize(raw, gguf.GGMLQuantizationType[format.upper()]).reshape(-1)
    assert_same(codebooks.expand(torch.from_numpy(raw), format).numpy(), theirs)


@pytest.mark.parametrize("format", FORMATS)
def test_bit_for_bit_as_llama_cpp(format: str) -> None:
    pytest.importorskip("xllamacpp")
    lib = ctypes.CDLL(import_module("xllamacpp.xllamacpp").__file__)
    function = getattr(lib, "dequantize_row_" + format.replace("_k", "_K"))
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    raw = drawn(format, 300)
    theirs = np.empty(300 * BLOCKS[format][0], dtype=np.float32)
    function(raw.ctypes.data, theirs.ctypes.data, theirs.size)
    assert_same(codebooks.expand(torch.from_numpy(raw), format).numpy(), theirs)


@pytest.mark.parametrize("format", FORMATS)
def test_tiles_do_not_show(format: str) -> None:
    n = TILE // BLOCKS[format][0] + 3
    raw = torch.from_numpy(drawn(format, n))
    whole = codebooks.expand(raw, format)
    first, last = codebooks.expand(raw[: n - 4], format), codebooks.expand(raw[n - 4 :], format)
    assert_same(whole.numpy(), torch.cat((first, last)).numpy())
    assert codebooks.expand(raw[:0], format).shape == (0,)


@pytest.mark.parametrize(("format", "n"), [("iq1_s", 2048), ("iq2_xxs", 256), ("iq2_xs", 512), ("iq2_s", 1024)])
def test_grids_of_eight_dimensions(format: str, n: int) -> None:
    """No point twice; at two bits the places of the levels have an even sum, so that points are two steps apart."""
    grid = GRIDS[format]
    points = grid.points()
    assert points.shape == (n, 8)
    assert len(points.unique(dim=0)) == n
    assert set(points.unique().tolist()) == set(grid.levels)
    if format != "iq1_s":
        places = (points[..., None] == torch.tensor(grid.levels)).int().argmax(-1)
        assert not bool((places.sum(1) % 2).any())


@pytest.mark.parametrize(("format", "n"), [("iq3_xxs", 256), ("iq3_s", 512)])
def test_grids_of_four_dimensions(format: str, n: int) -> None:
    points = GRIDS[format].points()
    assert points.shape == (n, 4)
    assert len(points.unique(dim=0)) == n
    assert set(points.unique().tolist()) == set(GRIDS[format].levels)

"""Blocks that are written: beside the gguf library and llama.cpp's own quantiser, and against their own steps."""

from __future__ import annotations

import ctypes
import math
from importlib import import_module

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asbuilt.dtypes import BLOCKS, OWN_BLOCKS
from asbuilt.errors import InputError
from asbuilt.kernels import codebooks
from asbuilt.kernels.packed import EXPANDED, expand
from asbuilt.kernels.quantise import ENCODED, TILE, WEIGHED, quantise

REFERENCE = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4")
K_FORMATS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
# By format: (levels above 0, the largest code of a scale, numbers of a group, whether codes are around 0).
GRIDS = {
    "q2_k": (3, 15, 16, False),
    "q3_k": (7, 32, 16, True),
    "q4_k": (15, 63, 32, False),
    "q5_k": (31, 63, 32, False),
    "q6_k": (63, 128, 16, True),
}


def drawn(seed: int, rows: int, columns: int) -> Tensor:
    """Normal numbers of very different sizes from row to row, some blocks of zeros or of one number alone."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-4, 4, (rows, 1))
    for row, what in enumerate(rng.integers(0, 6, rows)):
        block = slice(32 * int(rng.integers(columns // 32)), None)
        x[row, block] = {0: 0.0, 1: x[row, 0], 2: -np.abs(x[row, block]), 3: np.abs(x[row, block])}.get(
            int(what), x[row, block]
        )
    return torch.tensor(x, dtype=torch.float32)


def test_every_format_that_is_expanded_is_encoded() -> None:
    """But those of codebooks, and the blocks of our own, for weights of quantised folders."""
    assert ENCODED.keys() == EXPANDED.keys() - codebooks.EXPANDED.keys() - OWN_BLOCKS.keys()


@given(st.sampled_from(REFERENCE), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_as_the_gguf_library_makes_them(format: str, rows: int, per_row: int, seed: int) -> None:
    x = drawn(seed, rows, 32 * per_row)
    want = quants.quantize(x.numpy(), gguf.GGMLQuantizationType[format.upper()])
    np.testing.assert_array_equal(quantise(x, format).numpy(), want)


def test_tiles_do_not_show() -> None:
    x = drawn(3, 3, TILE)
    for format in ENCODED:
        apart = torch.cat([quantise(row[None], format) for row in x])
        assert torch.equal(quantise(x, format), apart)
        assert torch.equal(quantise(x.unflatten(1, (2, -1)), format).flatten(1), apart)


def llama_cpp(x: Tensor, format: str, importance: Tensor | None = None) -> Tensor:
    """Returns the blocks that llama.cpp's quantiser makes, which its wheel exports."""
    encode = ctypes.CDLL(import_module("xllamacpp.xllamacpp").__file__).ggml_quantize_chunk
    encode.restype = ctypes.c_size_t
    encode.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    size, nbytes = BLOCKS[format]
    made = torch.empty((len(x), x.shape[1] // size * nbytes), dtype=torch.uint8)
    number = int(gguf.GGMLQuantizationType[format.upper()])
    weighs = None if importance is None else importance.data_ptr()
    assert encode(number, x.data_ptr(), made.data_ptr(), 0, len(x), x.shape[1], weighs) == made.numel()
    return made


def rms(x: Tensor, blocks: Tensor, format: str) -> float:
    return float((expand(blocks, format, torch.float32) - x).double().square().mean().sqrt())


@pytest.mark.parametrize("format", ENCODED)
def test_no_worse_than_llama_cpp(format: str) -> None:
    pytest.importorskip("xllamacpp")
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(5))
    x *= torch.rand(64, 1024 // 256, generator=torch.Generator().manual_seed(6)).repeat_interleave(256, 1)
    theirs = llama_cpp(x, format)
    if format in REFERENCE:
        assert torch.equal(quantise(x, format), theirs)
    assert rms(x, quantise(x, format), format) <= 1.01 * rms(x, theirs, format)


@given(st.sampled_from(["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]), st.integers(0, 2**32 - 1))
def test_within_half_a_step(format: str, seed: int) -> None:
    """A step rounded to half precision moves the farthest number by that much more; the end that Q4_0 cuts by one."""
    x = torch.tensor(np.random.default_rng(seed).standard_normal((4, 32)) * 3, dtype=torch.float32)
    found = expand(quantise(x, format), format, torch.float32)
    bits, least = int(format[1]), format.endswith("_1")
    span = x.amax(1) - x.amin(1) if least else x.abs().amax(1)
    step = span / {True: 2**bits - 1, False: 127 if bits == 8 else 2 ** (bits - 1)}[least]
    rounding = 2.0**-10 * x.abs().amax(1) * (2 if least else 1)
    error = (found - x).abs()
    if not least and bits < 8:
        cut = x * -x.gather(1, x.abs().argmax(1, keepdim=True)).sign() > (2 ** (bits - 1) - 1.5) * step[:, None]
        assert bool((error <= step[:, None] + rounding[:, None])[cut].all())
        error = error.masked_fill(cut, 0.0)
    assert bool((error <= 0.5 * step[:, None] + rounding[:, None]).all())


@pytest.mark.parametrize("format", K_FORMATS)
@given(st.integers(0, 2**32 - 1))
def test_k_formats_err_less_than_a_step_of_the_whole_block(format: str, seed: int) -> None:
    x = torch.tensor(np.random.default_rng(seed).standard_normal((2, 512)), dtype=torch.float32)
    error = (expand(quantise(x, format), format, torch.float32) - x).abs().unflatten(1, (-1, 256)).amax(-1)
    blocks = x.unflatten(1, (-1, 256))
    assert bool((error <= (blocks.amax(-1) - blocks.amin(-1)) / GRIDS[format][0]).all())


@pytest.mark.parametrize("format", REFERENCE)
def test_what_was_rounded_once_stays(format: str) -> None:
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(7))
    once = expand(quantise(x, format), format, torch.float32)
    assert torch.equal(expand(quantise(once, format), format, torch.float32), once)


@pytest.mark.parametrize("format", K_FORMATS)
def test_representable_numbers_come_back(format: str) -> None:
    most, scale, width, around = GRIDS[format]
    codes = torch.arange(256 // width * width).reshape(-1, width) % (most + 1)
    if width <= most:  # a group has fewer numbers than codes: both ends and what lies between
        codes = torch.stack([torch.linspace(0, most, width).round().long().roll(i) for i in range(256 // width)])
    x = (scale / 256 * (codes - (most // 2 + 1))).float().flatten()
    assert torch.equal(expand(quantise(x, format), format, torch.float32), x)
    assert around or float(x.min()) < 0


@pytest.mark.parametrize("format", ENCODED)
def test_zeros_and_tiny_numbers(format: str) -> None:
    for value in (0.0, 1e-30, 1e-45):
        found = expand(quantise(torch.full((2, 256), value), format), format, torch.float32)
        assert float((found - value).abs().max()) <= max(2 * value, 0.0)


@pytest.mark.parametrize("format", ENCODED)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(format: str, value: float) -> None:
    x = torch.zeros(4, 256)
    x[2, 17] = value
    with pytest.raises(InputError, match=r"blk\.0\.ffn_up\.weight: holds NaN or infinite numbers"):
        quantise(x, format, "blk.0.ffn_up.weight")


@pytest.mark.parametrize("format", [format for format in ENCODED if format != "mxfp4"])
def test_numbers_beyond_the_scales_are_refused(format: str) -> None:
    with pytest.raises(InputError, match=f"too large for {format} scales"):
        quantise(torch.linspace(-1e12, 1e12, 256), format)


@pytest.mark.parametrize("format", ENCODED)
def test_rows_that_do_not_divide_are_refused(format: str) -> None:
    with pytest.raises(InputError, match=f"rows of 40 numbers do not divide into {format} blocks"):
        quantise(torch.zeros(2, 40), format)


def test_other_formats_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"format: .*iq4_nl.*q4_0"):
        quantise(torch.zeros(32), "iq4_nl")


def inputs(columns: int, seed: int) -> Tensor:
    """Mean squares of inputs as a model has them: most alike, one in fifty a hundred times as large."""
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.standard_normal(columns)) * np.where(rng.random(columns) < 0.02, 100.0, 1.0)
    return torch.tensor(spread, dtype=torch.float32)


def weighed(x: Tensor, blocks: Tensor, format: str, importance: Tensor) -> float:
    return float(((expand(blocks, format, torch.float32) - x).double().square() * importance).sum())


@pytest.mark.parametrize("format", WEIGHED)
def test_weighed_errors_are_less_than_plain_ones_and_than_llama_cpps(format: str) -> None:
    pytest.importorskip("xllamacpp")
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(7))
    importance = inputs(1024, 8)
    ours = weighed(x, quantise(x, format, importance=importance), format, importance)
    assert ours < 0.6 * weighed(x, quantise(x, format), format, importance)
    assert ours < 1.005 * weighed(x, llama_cpp(x, format, importance), format, importance)


@pytest.mark.parametrize("format", WEIGHED)
def test_only_the_proportions_of_an_importance_count(format: str) -> None:
    x, importance = drawn(11, 6, 512), inputs(512, 12)
    once = quantise(x, format, importance=importance)
    assert torch.equal(once, quantise(x, format, importance=4 * importance))
    assert torch.equal(once, quantise(x, format, importance=importance.expand(6, 512)))
    rows = torch.stack([importance, *(inputs(512, seed) for seed in range(5))])
    apart = torch.cat([quantise(x[i : i + 1], format, importance=rows[i]) for i in range(6)])
    assert torch.equal(quantise(x, format, importance=rows), apart)
    for none in (torch.zeros(512), torch.nn.functional.one_hot(torch.tensor(3), 512).float()):
        found = expand(quantise(x, format, importance=none), format, torch.float32)
        assert bool(found.isfinite().all())
        assert float((found - x).norm()) < 0.6 * float(x.norm())


@pytest.mark.parametrize("format", sorted(ENCODED.keys() - WEIGHED.keys()))
def test_formats_without_a_search_take_no_notice(format: str) -> None:
    x = drawn(13, 2, 256)
    assert torch.equal(quantise(x, format, importance=inputs(256, 1)), quantise(x, format))


@pytest.mark.parametrize(
    ("importance", "said"),
    [
        (torch.ones(255), "x: importance of another shape"),
        (torch.full((256,), math.nan), "x: has an importance that is NaN"),
        (torch.full((256,), -1.0), "x: importance: must be numbers from 0|x: must be numbers from 0"),
    ],
)
def test_what_is_no_importance_is_refused(importance: Tensor, said: str) -> None:
    with pytest.raises(InputError) as raised:
        quantise(torch.zeros(2, 256), "q4_k", "x", importance)
    assert raised.value.field == "x", said

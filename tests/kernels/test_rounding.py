"""Formats of quantised folders: within their steps, what is stored means what is said, whatever the numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asbuilt.dtypes import FP4
from asbuilt.kernels import dequantise, integers, rounding


def drawn(seed: int, rows: int, columns: int) -> Tensor:
    """Normal numbers of very different sizes from row to row, some rows of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-6, 6, (rows, 1)) * rng.integers(0, 4, (rows, 1))
    return torch.tensor(x, dtype=torch.float32)


seeds = st.integers(0, 2**32 - 1)
HALVES = st.sampled_from([torch.float32, torch.bfloat16])


@given(seeds, st.integers(1, 9), st.integers(1, 40), HALVES)
def test_int8_rows(seed: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    x = drawn(seed, rows, columns)
    made, now = rounding.int8(x, dtype)
    assert (made["weight"].dtype, made["weight_scale"].dtype) == (torch.int8, dtype)
    assert made["weight_scale"].shape == (rows, 1)
    torch.testing.assert_close(dequantise.tiled(made["weight"], made["weight_scale"], (1, columns)), now)
    step = x.abs().amax(1, keepdim=True) / 127
    assert bool(((now - x).abs() <= step * (0.51 if dtype == torch.float32 else 1.0)).all())


@given(seeds, st.integers(1, 9), st.integers(1, 4), st.sampled_from([32, 64, 128]), HALVES)
def test_int4_groups(seed: int, rows: int, groups: int, group: int, dtype: torch.dtype) -> None:
    x = drawn(seed, rows, groups * group)
    importance = torch.tensor(np.random.default_rng(seed).random(groups * group) ** 4, dtype=torch.float32)
    for weighs in (None, importance):
        made, now = rounding.int4(x, group, dtype, weighs)
        parts = made["weight_packed"], made["weight_scale"], None, None, group
        again = integers.around_middle(*parts, bits=4, inputs=x.shape[1]).expand()
        torch.testing.assert_close(again, now, rtol=0, atol=0)
        assert made["weight_shape"].tolist() == list(x.shape)
        assert made["weight_packed"].shape == (rows, x.shape[1] // 8)
        step = x.abs().unflatten(1, (-1, group)).amax(-1) / 7.5
        error = (now - x).abs().unflatten(1, (-1, group)).amax(-1)
        assert bool((error <= step * (0.55 if weighs is None else 3.5)).all())
    plain = rounding.int4(x, group, dtype)[1]
    weighed = [float(((one - x).double().square() * importance).sum()) for one in (now, plain)]
    assert weighed[0] <= 1.02 * weighed[1] + 1e-30


@given(seeds, st.integers(1, 300), st.integers(1, 300))
def test_fp8_blocks(seed: int, rows: int, columns: int) -> None:
    x = drawn(seed, rows, columns)
    made, now = rounding.fp8(x, (128, 128))
    scale = made["weight_scale_inv"]
    assert scale.shape == (-(-rows // 128), -(-columns // 128))
    for down in range(scale.shape[0]):
        for across in range(scale.shape[1]):
            part = (slice(128 * down, 128 * (down + 1)), slice(128 * across, 128 * (across + 1)))
            largest = float(x[part].abs().max())
            assert float(scale[down, across]) == pytest.approx(largest / 448 if largest else 1.0, rel=1e-6)
            relative = (now[part] - x[part]).abs() - 2**-4 * x[part].abs()
            assert float(relative.max()) <= 2**-10 * float(scale[down, across]) * 1.001


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@given(seeds, st.integers(1, 9), st.integers(1, 5))
def test_four_bit_floats_are_the_nearest(name: str, seed: int, rows: int, groups: int) -> None:
    x = drawn(seed, rows, 32 * groups)
    made, now = getattr(rounding, name)(x)
    size = 16 if name == "nvfp4" else 32
    whole = 1 / float(made["weight_global_scale"]) if name == "nvfp4" else 1.0
    scale = dequantise.powers(made["weight_scale"]).double() * whole
    assert scale.shape == (rows, x.shape[1] // size)
    numbers = torch.tensor(FP4, dtype=torch.float64)
    grouped = x.double().unflatten(1, (-1, size))
    best = (grouped[..., None] - numbers * scale[..., None, None]).abs().amin(-1)
    error = (now.double().unflatten(1, (-1, size)) - grouped).abs()
    assert bool((error <= best * (1 + 1e-5) + 1e-6 * scale[..., None] + 1e-44).all())


def test_four_bit_floats_as_near_take_the_even_code() -> None:
    x = torch.tensor([[6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]])
    _, now = rounding.mxfp4(x.repeat(1, 2))
    evens = [6.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 0.0, -0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, -6.0]
    assert now[0, :16].tolist() == evens


@pytest.mark.parametrize("largest", [1e-38, 1e-30, 1.0, 1e30, 1.7e38])
def test_sizes_at_the_ends_of_float32_stay_finite(largest: float) -> None:
    x = torch.linspace(-largest, largest, 128).repeat(2, 1)
    found = (rounding.int8(x), rounding.int4(x, 32), rounding.fp8(x, (128, 128)), rounding.nvfp4(x), rounding.mxfp4(x))
    for made, now in found:
        assert bool(now.isfinite().all())
        assert all(bool(one.float().isfinite().all()) for one in made.values())

"""Codes of a cache, and attention that reads them: against NumPy, bit by bit, and float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from codes_by_hand import CODES, by_hand
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import asbuilt.kernels.coded_attention as kernel
from asbuilt.dtypes import CACHE_SCALES
from asbuilt.errors import InputError
from asbuilt.kernels.attention import attend, reference
from asbuilt.kernels.codes import Code, Coded, code
from asbuilt.measure.run import peak_bytes

WIDTHS = st.sampled_from((1, 2, 3, 5, 8, 17, 64))


def drawn(shape: tuple[int, ...], seed: int, size: float) -> Tensor:
    """Vectors with an outlier, an offset, zeros and constants among them, as numbers that are exact in float32."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    x[..., 0] *= 9
    flat = x.view(-1, shape[-1])
    flat[::5] += 3 * size
    flat[::7] = 0
    flat[::11] = size
    return x.double()


@given(st.sampled_from(CODES), WIDTHS, st.integers(0, 2**32), st.sampled_from((1e-12, 1e-3, 1.0, 300.0, 1e9)))
def test_numbers_come_back_as_reckoned_by_hand(name: str, width: int, seed: int, size: float) -> None:
    assume(name != "fp16" or size < 1e3)
    x, held = drawn((2, 3, 23, width), seed, size), Code(name)
    rows = held.pack(x)
    assert rows.shape == (2, 3, 23, held.row_size(width))
    got = Coded(rows, held, width, torch.float64).expanded()
    np.testing.assert_array_equal(got.numpy(), by_hand(x.numpy(), name))


@given(st.sampled_from(tuple(CACHE_SCALES)), WIDTHS, st.integers(0, 2**32))
def test_no_number_is_further_off_than_half_a_step(name: str, width: int, seed: int) -> None:
    """Of the scale as it is stored; an e4m3 float has three bits after its first, or steps of 2^-9 scales."""
    x, held = drawn((1, 2, 23, width), seed, 1.0), Code(name)
    block = Coded(held.pack(x), held, width, torch.float64).block(0, 23, torch.float64)
    assert block.scale is not None
    off = (block.numbers() - x).abs()
    steps = torch.full_like(x, 0.5) if name != "fp8:head" else (x / block.scale.clamp(min=1e-30)).abs() * 2**-4 + 2**-10
    slack = x.abs().amax(-1, keepdim=True) * 2**-8 if name == "int8:head" else 1e-12
    assert bool((off <= steps * block.scale * (1 + 1e-9) + (slack if name == "int4:head" else 1e-12)).all())


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_noticed(name: str, bad: float) -> None:
    """Infinities are clipped only where there is no scale to tell them by."""
    x = torch.ones(1, 1, 2, 8)
    x[0, 0, 1, 3] = bad
    held = Code(name)
    got = Coded(held.pack(x), held, 8, torch.float32).expanded()
    assert bool(got[0, 0, 0].isfinite().all())
    assert bool(got[0, 0, 1].isfinite().all()) == (name == "fp8" and math.isinf(bad))


def masks(B: int, H: int, T: int, S: int, kind: str, generator: torch.Generator) -> Any:  # noqa: ANN401
    if kind in ("none", "causal"):
        return None if kind == "none" else "causal"
    seen = torch.rand(B, 1, T, S, generator=generator) > 0.4
    seen[..., -1] = True
    if kind == "bool":
        return seen if B > 1 else seen[:, :, :1]
    added = torch.randn(1, H, T, S, generator=generator, dtype=torch.float64)
    return torch.where(seen, added, -torch.inf)


@given(st.data())
def test_attention_to_codes_equals_dense_attention_to_what_they_stand_for(data: st.DataObject) -> None:
    """In float64 to 1e-12, in float32 within its rounding, for tiles of any size."""
    draw = data.draw
    B, K, group, T, S = (draw(st.integers(1, n)) for n in (2, 3, 3, 9, 40))
    D, V, H, name = draw(WIDTHS), draw(WIDTHS), K * group, draw(st.sampled_from(CODES))
    kind = draw(st.sampled_from(("none", "causal", "bool", "float")))
    S = T if kind == "causal" else S
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    dtype, close = draw(st.sampled_from(((torch.float64, 1e-12), (torch.float32, 2e-5))))
    held = Code(name)
    q = torch.randn(B, H, T, D, generator=generator).double()
    k, v = drawn((B, K, S, D), seed, 1.0), drawn((B, K, S, V), seed + 1, 1.0)
    mask = masks(B, H, T, S, kind, generator)
    options: dict[str, Any] = {
        "softcap": draw(st.sampled_from((None, 2.0))),
        "sinks": draw(st.sampled_from((None, torch.randn(H, generator=generator).double()))),
        "sum_capped": kind == "float" and draw(st.booleans()),
    }
    dense = [torch.from_numpy(by_hand(x.numpy(), name)) for x in (k, v)]
    want = reference(q, dense[0], dense[1], mask, 0.3, *options.values())
    coded = [Coded(held.pack(x), held, x.shape[-1], dtype) for x in (k, v)]
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    options["sinks"] = None if options["sinks"] is None else options["sinks"].to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "SCRATCH", draw(st.sampled_from((1, 200, 2**20))))
        patch.setattr(kernel, "FEWEST", draw(st.integers(1, 5)))
        patch.setattr(kernel, "SCORES_BESIDE", draw(st.sampled_from((1, 4))))
        got = attend(q.to(dtype), coded[0], coded[1], mask, scale=0.3, kernel="fused", **options)
    scale = max(1.0, float(want.abs().max()))
    torch.testing.assert_close(got.double(), want, rtol=0, atol=close * scale)


def test_the_tests_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A code off by one, a scale of the wrong key and a lost minimum all change attention far beyond its rounding."""
    held, x = Code("int4:head"), drawn((1, 2, 20, 8), 3, 1.0)
    q, rows = torch.randn(1, 4, 3, 8, dtype=torch.float64), held.pack(x)
    plain = Coded(rows, held, 8, torch.float64)
    want = attend(q, plain, plain, None, scale=0.3, kernel="fused")
    wrong = rows.clone()
    wrong[0, 0, 4, 4] ^= 1
    shifted = torch.cat((rows[..., :2].roll(1, 2), rows[..., 2:]), -1)
    lost = rows.clone()
    lost[..., 2:4] = 0
    for bad in (wrong, shifted, lost):
        coded = Coded(bad, held, 8, torch.float64)
        assert float((attend(q, coded, coded, None, scale=0.3, kernel="fused") - want).abs().max()) > 1e-4
    monkeypatch.setattr(kernel, "_mixed", lambda weights, v: weights @ v.numbers().repeat_interleave(2, 1) * 1.0001)
    assert float((attend(q, plain, plain, None, scale=0.3, kernel="fused") - want).abs().max()) > 1e-5


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("tokens", [1, 600])
def test_memory_does_not_grow_with_the_cache(name: str, tokens: int) -> None:
    """Beside inputs and result a few times SCRATCH numbers, where the cache expanded would be a hundred MB."""
    held, K, H, D, peaks = Code(name), 2, 8, 64, []
    for keys in (20_000, 100_000):
        rows = torch.zeros(1, K, keys, held.row_size(D), dtype=held.dtype)
        coded, q = Coded(rows, held, D, torch.float32), torch.randn(1, H, tokens, D)
        result = q.nbytes
        with torch.inference_mode():
            peaks.append(peak_bytes(lambda: attend(q, coded, coded, None, scale=1.0, kernel="fused")) - result)  # noqa: B023
    assert peaks[1] <= 4 * 4 * kernel.SCRATCH < 100_000 * K * 2 * D * 4 / 6
    assert peaks[1] <= peaks[0] * 1.2


def test_the_bytes_of_rows() -> None:
    """A vector of 64: 64 codes and a scale, or 32 bytes, a scale and a minimum; of 5 in 4 bits three bytes and both."""
    sizes = {name: Code(name).row_size(64) * Code(name).dtype.itemsize for name in CODES}
    assert sizes == {"bf16": 128, "fp16": 128, "fp8": 64, "int8:head": 66, "fp8:head": 66, "int4:head": 36}
    assert Code("int4:head").row_size(5) == 7


def test_names() -> None:
    assert code("bfloat16", torch.bfloat16) is None
    assert code("torch.float16", torch.float32) == Code("fp16")
    assert code("INT8:head", torch.float32) == Code("int8:head")
    for name, near in (("int8", "int8:head"), ("int4", "int4:head"), ("q8_0", "int8:head"), ("q4_0", "int4:head")):
        with pytest.raises(InputError, match=f"not a format of our caches.*{near} has a scale for each token and head"):
            code(name, torch.float32)
    with pytest.raises(InputError, match="kv-dtype: not a format of our caches"):
        code("elsewhere", torch.float32)

"""Integers in groups: held as blocks only of formats that expand to the same float32 numbers, the smallest of them."""

from __future__ import annotations

import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asbuilt.kernels.integers import Floats4, Integers, of_rows
from asbuilt.kernels.packed import expand


def drawn(
    seed: int, bits: int, inputs: int, group: int, zeros: str, dtype: torch.dtype
) -> tuple[Integers, Tensor, Tensor, Tensor]:
    """A matrix of 5 rows, its numbers in float32, and their scales and zero points in each group."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group)
    codes = torch.randint(1 << bits, (5, inputs), generator=generator, dtype=torch.uint8)
    scale = (torch.rand(5, groups, generator=generator) * 0.1 + 0.001).to(dtype)
    middle = torch.full((5, groups), 1 << (bits - 1))
    zero = middle if zeros == "middle" else torch.randint(1 << bits, (5, groups), generator=generator)
    made = Integers((5, inputs), lambda part: codes[part], scale, group, bits, zero=zero)
    of = torch.arange(inputs) // group
    return made, (codes.int() - zero[:, of]).float() * scale.float()[:, of], scale, zero


@given(
    strategies.SEEDS,
    st.sampled_from((2, 3, 4, 5, 6, 8)),
    st.sampled_from((32, 96, 256)),
    st.sampled_from((32, 64, 256)),
    st.sampled_from(("middle", "any")),
    st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
)
def test_blocks_are_the_same_numbers(
    seed: int, bits: int, inputs: int, group: int, zeros: str, dtype: torch.dtype
) -> None:
    made, want, scale, zero = drawn(seed, bits, inputs, group, zeros, dtype)
    assert torch.equal(made.expand(), want)
    narrow = torch.equal(scale.half().float(), scale.float())
    symmetric = bool((zero == 1 << (bits - 1)).all())
    if bits <= 4:
        formats = ["q4_0"] if narrow and symmetric and bits == 4 else []
        formats += ["int4_zero"] if narrow else []
        formats.append("int4_wide")
    else:
        formats = (["q8_0"] if narrow else []) + ["int8_wide"] if bits < 8 or symmetric else []
    assert list(made.formats) == formats
    for format in formats:
        assert torch.equal(expand(made.blocks(format), format, torch.float32), want), format


@given(strategies.SEEDS, st.sampled_from((2, 3, 4, 5, 6, 8)), st.sampled_from((torch.float16, torch.bfloat16)))
def test_biases_are_those_of_blocks_with_a_minimum(seed: int, bits: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << bits, (3, 128), generator=generator, dtype=torch.uint8)
    scale, bias = ((torch.rand(3, 2, generator=generator) + 0.01).to(dtype) for _ in range(2))
    made = Integers((3, 128), lambda part: codes[part], scale, 64, bits, bias=bias)
    want = codes.float() * scale.float().repeat_interleave(64, 1) + bias.float().repeat_interleave(64, 1)
    assert torch.equal(made.expand(), want)
    assert made.formats == ((("q4_1",) if bits <= 4 else ("q5_1",)) if bits <= 5 else ())
    for format in made.formats:
        assert torch.equal(expand(made.blocks(format), format, torch.float32), want)
    tiny = Integers((3, 128), lambda part: codes[part], torch.full((3, 2), 1e-7).bfloat16(), 64, bits, bias=bias)
    assert tiny.formats == ()  # float16 would round the scale


@given(strategies.SEEDS, st.booleans())
def test_signed_bytes(seed: int, narrow: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (4, 96), generator=generator, dtype=torch.int8)
    scale = torch.full((4, 1), 0.25 if narrow else 0.1)
    made = of_rows(codes, scale, None, 96)
    assert made.formats == (("q8_0", "int8_wide") if narrow else ("int8_wide",))
    for format in made.formats:
        assert torch.equal(expand(made.blocks(format), format, torch.float32), codes.float() * scale)
    assert of_rows(codes, scale, torch.ones(4, 1), 96).formats == ()


@pytest.mark.parametrize(
    ("inputs", "group", "of"), [(48, 48, None), (96, 16, None), (64, 32, torch.arange(64).flip(0) // 32)]
)
def test_rows_or_groups_that_blocks_do_not_divide_stay_expanded(inputs: int, group: int, of: Tensor | None) -> None:
    made, *_ = drawn(0, 4, inputs, group, "any", torch.float16)
    assert Integers(made.shape, made.codes, made.scale, group, 4, zero=made.zero, of=of).formats == ()


def test_zero_points_beyond_four_bits_stay_expanded() -> None:
    made, *_ = drawn(0, 4, 64, 32, "any", torch.float16)
    for wrong in (16, -1, 0.5):
        assert Integers(made.shape, made.codes, made.scale, 32, 4, zero=torch.full((5, 2), wrong)).formats == ()


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@given(strategies.SEEDS, st.booleans(), st.sampled_from((1.0, 0.3)))
def test_four_bit_floats(seed: int, powers: bool, whole: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (3, 128), generator=generator, dtype=torch.uint8)
    raw = codes[:, ::2] | codes[:, 1::2] << 4
    numbers = torch.tensor((*FP4, *(-one for one in FP4)))[codes.int()]
    if powers:
        scales = torch.randint(90, 160, (3, 4), generator=generator, dtype=torch.uint8)
        made, formats = Floats4(raw, scales, 32), ("mxfp4",)
        want = numbers * (2.0 ** (scales.float() - 127)).repeat_interleave(32, 1)
    else:
        scales = (torch.rand(3, 8, generator=generator) * 448).to(torch.float8_e4m3fn)
        made = Floats4(raw, scales, 16, whole)
        formats = ("nvfp4", "nvfp4_wide") if whole == 1 else ("nvfp4_wide",)
        want = numbers * (scales.float() * whole).repeat_interleave(16, 1)
    assert made.formats == formats
    for format in formats:
        assert torch.equal(expand(made.blocks(format), format, torch.float32), want)
    beyond = torch.full_like(scales.view(torch.uint8), 255)
    assert Floats4(raw, beyond if powers else beyond.view(torch.float8_e4m3fn), made.group, whole).formats == ()
    assert Floats4(raw[:, :20], scales[:, : 40 // made.group], made.group, whole).formats == ()

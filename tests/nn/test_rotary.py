"""Rotary tables beside angles worked out with Python's own floats, in every dtype and far into a text."""

from __future__ import annotations

import math

import pytest
import torch

from asbuilt.kernels.rotary import rotate, tables
from asbuilt.nn.positions import rope_tables
from asbuilt.nn.registry import module
from asbuilt.nn.step import Step
from asbuilt.spec import LongRope, Rotary, TokenEmbedding, YaRN

FAR = (0, 1, 5000, 131_071)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
def test_tables_are_those_of_float64_rounded_once(dtype: torch.dtype, pairing: str) -> None:
    """cos(t theta^(-2i/d)) as the standard library has it: angles in the model's dtype or in float32 are far off."""
    d, theta = 8, 10_000.0
    rotary = Rotary(d_rotary=d, theta=theta, pairing=pairing)  # type: ignore[arg-type]
    cos, sin = tables(rotary, torch.tensor([FAR]), (FAR[-1] + 1,), dtype)
    angles = [[t * theta ** (-2 * i / d) for i in range(d // 2)] for t in FAR]
    places = [[i, i + d // 2] if pairing == "halves" else [2 * i, 2 * i + 1] for i in range(d // 2)]
    for t, row in enumerate(angles):
        for i, angle in enumerate(row):
            want = torch.tensor([math.cos(angle)] * 2 + [-math.sin(angle), math.sin(angle)], dtype=torch.float64)
            have = torch.cat((cos[0, t, 0, places[i]], sin[0, t, 0, places[i]]))
            assert have.dtype == dtype
            # PyTorch's and the C library's last bit may differ, so a rounding may fall on the other side
            torch.testing.assert_close(have.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-9)


def test_queries_of_a_narrow_model_are_turned_by_wide_angles() -> None:
    """At position 5000 in bf16: (1, 0) turned by 5000 and by 50 radians, each number rounded once."""
    rotary, position = Rotary(d_rotary=4), 5000
    step = Step((1, 1), torch.device("cpu"), past=(position,))
    turned = rotate(
        torch.tensor([[[[1.0, 1.0, 0.0, 0.0]]]], dtype=torch.bfloat16),
        rope_tables(step, rotary, torch.bfloat16),
        "halves",
    )
    # cos and sin of 5000 rad (4.8677 beyond 795 whole turns) and of 50 rad, by a pocket calculator
    want = torch.tensor([0.154667, 0.964966, -0.987967, -0.262375], dtype=torch.bfloat16)
    assert torch.equal(turned.flatten(), want)


def test_the_ramp_of_yarn_is_the_released_codes() -> None:
    """By hand, d = 8, theta = 10, original 64, factor 4, turns from 0.5 to 2: the last pair, f = 10^-0.75 = 0.1778279.

    The pair that turns n times is 4 log10(64 / (2 pi n)): 2.82788 for 2 turns, 5.23612 for a half. Rounded outwards to
    2 and 6 pair 3 is a quarter of the way, f (0.25/4 + 0.75) = 0.1444852; as they are, (3 - 2.82788) / 2.40824 =
    0.0714713 of it, f (1 - 0.75 * 0.0714713) = 0.1682958. The paper's ramp is linear in the turns: 64 f / (2 pi) =
    1.811341, so f (1 - 0.75 (2 - 1.811341) / 1.5) = 0.1610535, which neither is.
    """
    for truncate, want in ((True, 0.1444852), (False, 0.1682958)):
        yarn = YaRN(factor=4.0, original_context=64, beta_fast=2.0, beta_slow=0.5, truncate=truncate)
        frequencies = Rotary(d_rotary=8, theta=10.0, scaling=yarn).inverse_frequencies()
        assert frequencies[:3] == tuple(10 ** (-i / 4) for i in range(3))
        assert frequencies[3] == pytest.approx(want, rel=1e-6)


def test_an_embedding_is_scaled_by_a_factor_rounded_to_its_dtype() -> None:
    """sqrt(48) = 6.9282 is 6.9375 in bf16: 1.1015625 times that is 7.642, which rounds to 7.65625 and not to 7.625."""
    embedding = module(TokenEmbedding(n_vocab=1, d_model=48, scale=48**0.5), "embedding").to(torch.bfloat16)
    with torch.no_grad():
        embedding.get_parameter("weight").fill_(1.1015625)
    x = embedding(torch.zeros(1, 1, dtype=torch.long), Step((1, 1), torch.device("cpu")))
    assert x.dtype == torch.bfloat16
    assert x.unique().tolist() == [7.65625]


def test_the_attention_factor_is_on_cos_and_on_sin() -> None:
    yarn = YaRN(factor=4.0, original_context=64, attention_factor=1.3)
    plain = YaRN(factor=4.0, original_context=64, attention_factor=1.0)
    made, bare = (
        tables(Rotary(d_rotary=4, scaling=s), torch.tensor([[3, 9]]), (10,), torch.float64) for s in (yarn, plain)
    )
    torch.testing.assert_close(made.cos, 1.3 * bare.cos)
    torch.testing.assert_close(made.sin, 1.3 * bare.sin)


def test_a_long_text_has_a_factor_of_its_own_on_cos_and_on_sin() -> None:
    """By hand: 1.5 up to 5 tokens and 0.5 beyond, in one batch and alone."""
    scaling = LongRope(
        short_factors=(1.0,),
        long_factors=(1.0,),
        original_context=5,
        attention_factor=1.5,
        long_attention_factor=0.5,
    )
    rotary = Rotary(d_rotary=2, scaling=scaling)
    assert [rotary.factor_at(length) for length in (0, 5, 6)] == [1.5, 1.5, 0.5]
    assert rotary.stretches
    made = tables(rotary, torch.tensor([[2]]), (5, 6), torch.float64)
    for found, plain in ((made.cos, math.cos(2)), (made.sin[..., 1:], math.sin(2))):
        torch.testing.assert_close(found[:, 0, 0, 0], torch.tensor([1.5 * plain, 0.5 * plain], dtype=torch.float64))
    alone = tables(rotary, torch.tensor([[2]]), (6,), torch.float64)
    torch.testing.assert_close(alone.cos, made.cos[1:])


def test_two_rows_of_two_lengths_have_tables_of_their_own() -> None:
    """By hand: pair 0 turns by 1 / 1.0 a token in the short text, by 1 / 4.0 in the long one."""
    scaling = LongRope(short_factors=(1.0, 2.0), long_factors=(4.0, 8.0), original_context=5, attention_factor=1.0)
    rotary = Rotary(d_rotary=4, theta=100.0, scaling=scaling)
    cos = tables(rotary, torch.tensor([[3]]), (5, 6), torch.float64).cos
    assert cos.shape[0] == 2
    wants = [[math.cos(3 / 1.0), math.cos(3 * 0.1 / 2.0)], [math.cos(3 / 4.0), math.cos(3 * 0.1 / 8.0)]]
    torch.testing.assert_close(cos[:, 0, 0, :2], torch.tensor(wants, dtype=torch.float64))

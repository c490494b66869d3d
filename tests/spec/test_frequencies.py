"""Frequencies of positions, and which lengths share them: worked out by hand or from each method's own definition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from small_parts import ATTENTION, CROSS, LATENT, MODEL
from test_bounds import LLAMA3, LONG, stack

from asbuilt.spec import (
    Alibi,
    DynamicNTK,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    Proportional,
    RelativeBuckets,
    Rotary,
    Scaling,
    Sinusoids,
    YaRN,
)
from asbuilt.spec.positions import read_again, rotaries_by_length

TWO = Rotary(d_rotary=4, theta=100.0)  # a pair that turns a radian a token, and one that turns a tenth
NTK = DynamicNTK(factor=3.0, original_context=10)


def scaled(scaling: Scaling, length: int = 0) -> tuple[float, ...]:
    return replace(TWO, scaling=scaling).inverse_frequencies(length)


def test_plain_pairs_are_powers_of_the_base() -> None:
    assert TWO.inverse_frequencies() == pytest.approx((1, 0.1))
    assert Rotary(d_rotary=6, theta=1000.0).inverse_frequencies(5) == pytest.approx((1, 0.1, 0.01))
    assert Rotary(d_rotary=2).inverse_frequencies() == (1,)
    # columns and rows of a grid turn alike, each by every other frequency
    assert Rotary(d_rotary=8, theta=100.0, grid=3).inverse_frequencies() == pytest.approx((1, 0.1, 1, 0.1))


def test_sinusoids_are_powers_of_the_base() -> None:
    assert Sinusoids(n_positions=4, d_model=4, theta=100.0).frequencies == pytest.approx((1, 0.1))
    assert Sinusoids(n_positions=4, d_model=5, theta=1e5).frequencies == pytest.approx((1, 1e-2, 1e-4))


def test_pairs_divided() -> None:
    assert scaled(LinearScaling(factor=4.0)) == pytest.approx((0.25, 0.025))
    assert scaled(FrequencyFactors(factors=(2.0, 5.0))) == pytest.approx((0.5, 0.02))
    assert scaled(Proportional(n_pairs=1)) == (1, 0)
    assert scaled(Proportional(n_pairs=2, factor=4.0)) == pytest.approx((0.25, 0.025))
    for length, factors in ((0, (1, 1)), (63, (1, 1)), (64, (1, 1)), (65, (2, 3)), (999, (2, 3))):
        assert scaled(LONG, length) == pytest.approx((1 / factors[0], 0.1 / factors[1]))


def test_dynamic_ntk_stretches_the_base() -> None:
    """Of 20 tokens where 10 were trained: 100 x (3 x 2 - 2)^(4 / 2) = 1,600, whose root is 40; of 10 or fewer 100."""
    for length in (0, 5, 10):
        assert scaled(NTK, length) == pytest.approx((1, 0.1))
    assert scaled(NTK, 11) == pytest.approx((1, 0.1 / (3 * 1.1 - 2)))
    assert scaled(NTK, 20) == pytest.approx((1, 1 / 40))
    six = Rotary(d_rotary=6, theta=1000.0, scaling=NTK)  # 1,000 x 4^(6 / 4) = 8,000, whose cube root is 20
    assert six.inverse_frequencies(20) == pytest.approx((1, 1 / 20, 1 / 400))


def test_which_lengths_share_their_frequencies() -> None:
    assert [replace(TWO, scaling=scaling).depends_on_length for scaling in (NTK, LONG, LLAMA3, None)] == [
        True,
        True,
        False,
        False,
    ]
    ntk, long = replace(TWO, scaling=NTK), replace(TWO, scaling=LONG)
    assert [ntk.length_class(length) for length in (0, 9, 10, 11, 20)] == [10, 10, 10, 11, 20]
    assert [long.length_class(length) for length in (0, 63, 64, 65, 99)] == [64, 64, 64, 65, 65]
    assert replace(TWO, scaling=LLAMA3).length_class(99) == TWO.length_class(99) == 0
    assert read_again((ntk,), 8, 10) == read_again((), 8, 99) == 0
    assert read_again((ntk,), 8, 11) == 8
    assert read_again((TWO, ntk, long), 11, 12) == 11
    assert read_again((long,), 64, 65) == 64
    assert read_again((long,), 65, 66) == read_again((TWO,), 8, 99) == 0


def test_rotary_positions_of_what_remembers_a_sequence() -> None:
    ntk, long = replace(TWO, scaling=NTK), replace(TWO, scaling=LONG)
    turned = [replace(ATTENTION, positions=rotary) for rotary in (ntk, TWO, long, ntk)]
    latent = replace(LATENT, d_model=11, d_rope=4, positions=replace(ntk, theta=50.0))
    model = replace(MODEL, blocks=stack(*turned, latent))
    assert rotaries_by_length(model) == (ntk, long, replace(ntk, theta=50.0))
    ahead = replace(turned[0], causal=False)  # remembers nothing
    assert rotaries_by_length(replace(MODEL, blocks=stack(ahead))) == ()
    encoder = MODEL.changed(head=None, blocks=stack(ahead))
    crossing = MODEL.changed(encoder=encoder, blocks=stack(replace(CROSS, d_source=11)))
    assert rotaries_by_length(crossing) == ()


def test_what_cos_and_sin_are_multiplied_by() -> None:
    yarn = YaRN(factor=4.0, original_context=64)
    for scaling, factor in (
        (None, 1),
        (LLAMA3, 1),
        (LONG, 1),
        (replace(LONG, attention_factor=1.3), 1.3),
        (yarn, 0.1 * math.log(4) + 1),
        (replace(yarn, factor=1.0), 1),
        (replace(yarn, factor=0.5), 1),
        (replace(yarn, factor=1.5), 0.1 * math.log(1.5) + 1),
        (replace(yarn, attention_factor=0.7), 0.7),
    ):
        assert replace(TWO, scaling=scaling).attention_factor == pytest.approx(factor)


# (beta_fast, beta_slow, context): at both ends within the pairs, before them, after them, and all on one pair
YARNS = [(8.0, 1.0, 200), (32.0, 1.0, 64), (2.0, 0.001, 64), (3.0, 2.0, 64), (1.0, 1.0, 64), (9.0, 5.0, 2000)]


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("fast", "slow", "context"), YARNS)
def test_yarn_by_its_definition(fast: float, slow: float, context: int, truncate: bool) -> None:
    """Pair i turns context theta^(-2i/d) / 2 pi times; between those that turn `fast` and `slow` times is a ramp."""
    d, theta, factor = 16, 50.0, 3.0
    yarn = YaRN(factor=factor, original_context=context, beta_fast=fast, beta_slow=slow, truncate=truncate)

    def pair(turns: float) -> float:
        return d / 2 * math.log(context / (2 * math.pi * turns), theta)

    ends = [pair(fast), pair(slow)]
    if truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(0, ends[0]), min(d - 1, ends[1])
    wanted = []
    for i in range(d // 2):
        way = min(1, max(0, (i - first) / (last - first if last != first else 1e-3)))
        plain = theta ** (-i * 2 / d)
        wanted.append(plain * (1 - way) + plain / factor * way)
    found = Rotary(d_rotary=d, theta=theta, scaling=yarn).inverse_frequencies()
    assert found == pytest.approx(wanted)


def test_llama_3s_three_ranges_by_hand() -> None:
    """Of 40 pi tokens the pairs turn 20, 2 and 0.2 times: kept, between 4 and 1 a third of the way, and divided."""
    six = Rotary(d_rotary=6, theta=1000.0)
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=126)
    turns = 126 * 0.1 / (2 * math.pi)
    way = (turns - 1) / 3
    found = replace(six, scaling=scaling).inverse_frequencies()
    assert found == pytest.approx((1, 0.1 * way + 0.1 / 8 * (1 - way), 0.01 / 8))
    assert 0 < way < 1
    both = replace(scaling, low_freq_factor=2.0, high_freq_factor=2.0)  # nothing between
    assert replace(six, scaling=both).inverse_frequencies() == pytest.approx((1, 0.1, 0.01 / 8))
    just = 126 / (2 * math.pi)  # what turns just as often is kept
    at_it = replace(scaling, low_freq_factor=just, high_freq_factor=just)
    assert replace(six, scaling=at_it).inverse_frequencies() == pytest.approx((1, 0.1 / 8, 0.01 / 8))


def test_slopes_of_alibi_by_hand() -> None:
    assert Alibi(n_heads=1).slopes == (2**-8,)
    assert Alibi(n_heads=2).slopes == (2**-4, 2**-8)
    assert Alibi(n_heads=3).slopes == (2**-4, 2**-8, 2**-2)
    assert Alibi(n_heads=4, bias_max=4.0).slopes == (2**-1, 2**-2, 2**-3, 2**-4)
    assert Alibi(n_heads=5, bias_max=4.0).slopes == (2**-1, 2**-2, 2**-3, 2**-4, 2**-0.5)
    assert Alibi(n_heads=7, bias_max=4.0).slopes == (2**-1, 2**-2, 2**-3, 2**-4, 2**-0.5, 2**-1.5, 2**-2.5)


def test_buckets_of_each_direction() -> None:
    for buckets, both_ways, one_way, exact in ((8, False, 8, 4), (8, True, 4, 2), (2, False, 2, 1), (12, True, 6, 3)):
        part = RelativeBuckets(n_buckets=buckets, max_distance=99, both_ways=both_ways)
        assert (part.one_way, part.exact) == (one_way, exact)


def test_scores_of_latents_under_yarn_by_hand() -> None:
    """Heads of 2 + 4: 6^-0.5, times (0.1 m ln 4 + 1) twice under YaRN with m, where it stretches."""
    yarn = YaRN(factor=4.0, original_context=64)
    plain = replace(LATENT, d_rope=4)
    turned = replace(plain, positions=Rotary(d_rotary=4))
    stretched = replace(plain, positions=Rotary(d_rotary=4, scaling=yarn))
    shrunk = replace(plain, positions=Rotary(d_rotary=4, scaling=replace(yarn, factor=0.5)), mscale=0.7)
    little = replace(plain, positions=Rotary(d_rotary=4, scaling=replace(yarn, factor=1.5)), mscale=0.7)
    for part in (plain, turned, stretched, shrunk):
        assert part.scale == pytest.approx(6**-0.5)
    assert replace(stretched, mscale=0.7).scale == pytest.approx(6**-0.5 * (0.1 * 0.7 * math.log(4) + 1) ** 2)
    assert little.scale == pytest.approx(6**-0.5 * (0.07 * math.log(1.5) + 1) ** 2)

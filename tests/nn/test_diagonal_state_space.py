"""Diagonal state spaces: convolution by transforms is the recurrence, in pieces, with padding; and what they cost."""

from __future__ import annotations

from typing import Any

import one_mixer
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asbuilt import cost
from asbuilt.kernels import diagonal_state_space as kernels
from asbuilt.kernels.memory import memory
from asbuilt.measure import run as measured
from asbuilt.nn.registry import module
from asbuilt.nn.step import Step
from asbuilt.spec import DiagonalStateSpace, Model, Pass

STACKS = one_mixer.stacks(strategies.diagonal_state_spaces(5))
LENGTHS = st.sampled_from((1, 2, 3, 8, 9, 10, 45))


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def drawn_system(channels: int, states: int, seed: int) -> kernels.System:
    a_log, a_im, c_re, c_im = (drawn(channels, states, seed=seed + i) for i in range(4))
    return kernels.system(a_log, a_im, c_re, c_im, drawn(channels, seed=seed + 5) - 2)


def exponential(matrix: torch.Tensor) -> torch.Tensor:
    """e^M, by 20 terms of its series for M / 2^8, squared 8 times; torch's own is off by 2e-10 where norms are 0.05."""
    small, term = matrix / 2**8, torch.eye(len(matrix), dtype=matrix.dtype)
    total = term.clone()
    for i in range(1, 20):
        term = term @ small / i
        total += term
    for _ in range(8):
        total = total @ total
    return total


@given(st.integers(1, 4), st.integers(1, 5), LENGTHS, strategies.SEEDS)
def test_the_convolution_is_the_recurrence(channels: int, states: int, tokens: int, seed: int) -> None:
    of, x = drawn_system(channels, states, seed), drawn(2, tokens, channels, seed=seed + 9)
    pieces = DiagonalStateSpace(d_model=channels, d_state=states).pieces(tokens)
    wanted, state = kernels.by_tokens(x, of, None, None)
    one_mixer.near(kernels.by_transforms(x, of, pieces), wanted, 1e-10)
    one_mixer.near(torch.view_as_real(kernels.at_end(x, of, pieces)), torch.view_as_real(state), 1e-10)
    log_a, b, c = (one.to(torch.complex64) for one in of)
    narrow = kernels.System(log_a, b, c)
    one_mixer.near(kernels.by_transforms(x.float(), narrow, pieces), wanted.float(), 1e-5)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 12), strategies.SEEDS)
def test_it_is_the_papers(channels: int, states: int, tokens: int, seed: int) -> None:
    """The continuous system held constant over each step: s' = A s + x, whose matrix exponential has both factors."""
    a_log, a_im, c_re, c_im = (drawn(channels, states, seed=seed + i) for i in range(4))
    log_dt, x = drawn(channels, seed=seed + 5) - 2, drawn(1, tokens, channels, seed=seed + 9)
    y, _ = kernels.by_tokens(x, kernels.system(a_log, a_im, c_re, c_im, log_dt), None, None)
    for channel in range(channels):
        total = torch.zeros(tokens, dtype=torch.float64)
        for n in range(states):
            a = complex(-float(a_log[channel, n].exp()), float(a_im[channel, n]))
            grown = torch.tensor([[a, 1.0], [0.0, 0.0]], dtype=torch.complex128) * log_dt[channel].exp()
            both = exponential(grown)  # [[e^(dt A), (e^(dt A) - 1) / A], [0, 1]]
            s = torch.zeros((), dtype=torch.complex128)
            for t in range(tokens):
                s = both[0, 0] * s + both[0, 1] * x[0, t, channel]
                total[t] += 2 * (torch.complex(c_re[channel, n], c_im[channel, n]) * s).real
        one_mixer.near(y[0, :, channel], total, 1e-10)


@given(STACKS, LENGTHS, st.integers(1, 44), strategies.SEEDS)
def test_pieces_are_the_whole(spec: Model, tokens: int, cut: int, seed: int) -> None:
    one_mixer.check_pieces(spec, tokens, (cut,), seed)


@given(STACKS, st.tuples(st.integers(1, 9), st.integers(1, 9)), st.booleans(), strategies.SEEDS)
def test_padding_changes_nothing(spec: Model, lengths: tuple[int, int], left: bool, seed: int) -> None:
    one_mixer.check_ragged(spec, lengths, left, seed)


@given(strategies.diagonal_state_spaces(4), strategies.SEEDS)
@settings(max_examples=20)
@torch.no_grad()
def test_padding_between_tokens(part: DiagonalStateSpace, seed: int) -> None:
    made: Any = strategies.randomised(one_mixer.alone(part), seed).get_submodule("blocks.0.mixer.body")
    x, valid = drawn(1, 6, 4, seed=seed), torch.tensor([[True, False, True, True, False, True]])
    have = made(x, Step((1, 6), x.device, valid_BT=valid))[:, valid[0]]
    one_mixer.near(have, made(x[:, valid[0]], Step((1, 4), x.device)), 1e-10)


@given(STACKS, st.integers(1, 3), st.integers(1, 15), st.sampled_from((torch.float32, torch.bfloat16)))
@settings(max_examples=50)
def test_what_is_kept(spec: Model, batch: int, tokens: int, dtype: torch.dtype) -> None:
    one_mixer.check_saved(spec, batch, tokens, dtype)


@pytest.mark.parametrize("tokens", [1, 64, 512])
def test_peak_is_the_allocators(tokens: int) -> None:
    part = DiagonalStateSpace(d_model=64, d_state=16)
    made, x = module(part, "x"), torch.zeros(2, tokens, 64)
    with torch.inference_mode():
        for parameter in made.parameters():
            parameter.zero_()
        made(x, Step((2, tokens), x.device))
        seen = measured.peak_bytes(lambda: made(x, Step((2, tokens), x.device)))
    assert 0.6 * seen <= memory(part).peak_bytes(Pass(tokens=tokens, batch=2, width=4)) <= 1.7 * seen


def test_a_hundred_thousand_tokens_are_finite() -> None:
    one_mixer.check_long(DiagonalStateSpace(d_model=2, d_state=2))


def test_the_state_is_of_one_size() -> None:
    spec = one_mixer.alone(DiagonalStateSpace(d_model=4, d_state=10))
    assert cost.cache(spec, 999, "bf16").at_seq == cost.cache(spec, 1, "bf16").at_seq == 2 * 4 * 10 * 4

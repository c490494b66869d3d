"""Lightning attention: the paper's recurrence, in chunks and steps, with padding, and what it costs in many chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import one_mixer
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asbuilt import cost
from asbuilt.nn.step import Step
from asbuilt.spec import LightningAttention, Model, RMSNorm, mamba2

CHUNK = 4
LENGTHS = st.sampled_from((1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK))
STACKS = one_mixer.stacks(strategies.lightnings(5))


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    """Chunks of a few tokens, so that short texts have several."""
    usual, mamba2.CHUNK = mamba2.CHUNK, CHUNK
    yield
    mamba2.CHUNK = usual


@given(strategies.lightnings(5), LENGTHS, strategies.SEEDS)
@torch.no_grad()
def test_it_is_the_recurrence(part: LightningAttention, tokens: int, seed: int) -> None:
    """Equations 2 and 4 of the paper, token by token, with the slopes of its published code."""
    made: Any = strategies.randomised(one_mixer.alone(part), seed).get_submodule("blocks.0.mixer.body")
    x = torch.randn(2, tokens, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    act = made.activation
    q, k, v = (act(one(x)).unflatten(-1, (part.n_heads, -1)) for one in (made.q, made.k, made.v))
    base = 1 / 2 ** (8 / part.n_heads)
    slopes = torch.tensor([base ** (h + 1) * part.decay for h in range(part.n_heads)], dtype=torch.float64)
    state, read = torch.zeros(2, part.n_heads, part.d_head, part.d_head, dtype=torch.float64), []
    for t in range(tokens):
        state = state * (-slopes).exp()[:, None, None] + k[:, t, :, :, None] * v[:, t, :, None, :]
        read.append(torch.einsum("bhd,bhde->bhe", q[:, t], state).flatten(1))
    y = made.norm(torch.stack(read, 1)) * torch.sigmoid(made.gate(x))
    one_mixer.near(made(x, Step((2, tokens), x.device)), made.o(y), 1e-10)


@given(STACKS, LENGTHS, st.integers(1, 19), strategies.SEEDS)
def test_pieces_are_the_whole(spec: Model, tokens: int, cut: int, seed: int) -> None:
    one_mixer.check_pieces(spec, tokens, (cut,), seed)


@given(STACKS, st.tuples(st.integers(1, 9), st.integers(1, 9)), st.booleans(), strategies.SEEDS)
def test_padding_changes_nothing(spec: Model, lengths: tuple[int, int], left: bool, seed: int) -> None:
    one_mixer.check_ragged(spec, lengths, left, seed)


@given(STACKS, st.integers(1, 3), st.integers(1, 15), st.integers(0, 9))
@settings(max_examples=50)
def test_several_chunks_multiply_what_is_declared(spec: Model, batch: int, tokens: int, past: int) -> None:
    one_mixer.check_products(spec, batch, tokens, past)


@given(STACKS, st.integers(1, 3), st.integers(1, 15), st.sampled_from((torch.float32, torch.bfloat16)))
@settings(max_examples=30)
def test_several_chunks_keep_what_is_declared(spec: Model, batch: int, tokens: int, dtype: torch.dtype) -> None:
    one_mixer.check_saved(spec, batch, tokens, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [64, 512])
def test_peak_is_the_allocators(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba2, "CHUNK", 64)
    part = LightningAttention(d_model=64, n_heads=8, d_head=32, decay=0.5, norm=RMSNorm(d=256))
    one_mixer.check_peak(part, tokens, dtype)


def test_a_hundred_thousand_tokens_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba2, "CHUNK", 64)
    one_mixer.check_long(LightningAttention(d_model=4, n_heads=2, d_head=2, decay=1e-5, norm=RMSNorm(d=4)))


def test_the_state_is_one_matrix_for_each_head() -> None:
    """64 heads of 128 x 128 numbers in float32, whatever the cache's dtype: 4 MiB for each layer of MiniMax-Text-01."""
    part = LightningAttention(d_model=64, n_heads=64, d_head=128, decay=0.5, norm=RMSNorm(d=64 * 128))
    bill = cost.cache(one_mixer.alone(part), 4096, "bf16")
    assert (bill.fixed, bill.per_token, bill.at_seq) == (4 * 2**20, 0, 4 * 2**20)

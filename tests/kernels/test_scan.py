"""The diagonal recurrence: by blocks as token by token, with its gradients, and over texts of any length."""

from __future__ import annotations

import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asbuilt.kernels import rg_lru
from asbuilt.kernels.scan import by_blocks, by_tokens, gradients


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 4), st.booleans(), strategies.SEEDS)
def test_blocks_are_the_recurrence(batch: int, tokens: int, channels: int, past: bool, seed: int) -> None:
    a, b = drawn(batch, tokens, channels, seed=seed).sigmoid(), drawn(batch, tokens, channels, seed=seed + 1)
    state = drawn(batch, channels, seed=seed + 2) if past else None
    kept = b.clone()
    torch.testing.assert_close(by_blocks(a, b, state), by_tokens(a, b, state), rtol=1e-12, atol=1e-12)
    assert torch.equal(b, kept)
    a32, b32, s32 = a.float(), b.float(), None if state is None else state.float()
    torch.testing.assert_close(by_blocks(a32, b32, s32), by_tokens(a32, b32, s32), rtol=1e-5, atol=1e-5)


@given(st.integers(1, 2), st.integers(1, 20), st.integers(1, 3), st.booleans(), strategies.SEEDS)
def test_gradients_are_those_of_the_definition(batch: int, tokens: int, channels: int, past: bool, seed: int) -> None:
    a, b = (drawn(batch, tokens, channels, seed=seed + i).sigmoid().requires_grad_() for i in range(2))
    state = drawn(batch, channels, seed=seed + 2) if past else None
    h, dh = by_tokens(a, b, state), drawn(batch, tokens, channels, seed=seed + 3)
    wanted = torch.autograd.grad(h, (a, b), dh)
    got = gradients(a.detach(), h.detach(), state, dh)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@given(st.integers(1, 2), st.integers(1, 12), st.integers(1, 3), strategies.SEEDS)
def test_the_gated_recurrence_has_the_gradients_of_its_equations(
    batch: int, tokens: int, channels: int, seed: int
) -> None:
    u = drawn(batch, tokens, channels, seed=seed).requires_grad_()
    r, i = (drawn(batch, tokens, channels, seed=seed + n).sigmoid().requires_grad_() for n in (1, 2))
    decay, dh = drawn(channels, seed=seed + 4).requires_grad_(), drawn(batch, tokens, channels, seed=seed + 5)
    first = torch.arange(tokens)[None] == 0
    # section 2.4 of the paper, written out
    a = torch.exp(-8 * torch.nn.functional.softplus(decay) * r)
    b = torch.where(first[..., None], torch.ones_like(a), torch.sqrt(1 - a**2)) * i * u
    wanted, got = by_tokens(a, b, None), rg_lru.recur(u, r, i, decay, first, None)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    inputs = (u, r, i, decay)
    for ours, its in zip(torch.autograd.grad(got, inputs, dh), torch.autograd.grad(wanted, inputs, dh), strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-7, atol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(rg_lru.recur(u, r, i, decay, first, None), wanted, rtol=1e-10, atol=1e-10)


def test_nothing_overflows_in_a_hundred_thousand_tokens() -> None:
    """Decays from 1 to the smallest there are: their product leaves float32 after a few tokens."""
    tokens = 100_000
    u = torch.randn(1, tokens, 4, generator=torch.Generator().manual_seed(0))
    r, i = torch.full_like(u, 0.99), torch.full_like(u, 0.5)
    decay, first = torch.tensor([-30.0, 0.0, 5.0, 80.0]), torch.arange(tokens)[None] == 0
    h = rg_lru.recur(u, r, i, decay, first, None)
    assert h.isfinite().all()
    assert h[:, -1].abs().max() < 100

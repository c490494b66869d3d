"""RWKV-4's recurrence: by blocks and pieces as token by token, with its gradients, whatever the text's length."""

from __future__ import annotations

import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asbuilt.kernels import wkv
from asbuilt.spec.time_mixing import PIECE


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def arguments(tokens: int, past: bool, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, wkv.State | None]:
    k, v = 5 * drawn(2, tokens, 3, seed=seed), drawn(2, tokens, 3, seed=seed + 1)
    w, u = -drawn(3, seed=seed + 2).exp(), drawn(3, seed=seed + 3)
    state = drawn(2, 3, seed=seed + 4), drawn(2, 3, seed=seed + 5).exp(), drawn(2, 3, seed=seed + 6)
    return k, v, w, u, state if past else None


@given(st.integers(1, 40), st.booleans(), strategies.SEEDS)
def test_blocks_are_the_recurrence(tokens: int, past: bool, seed: int) -> None:
    given = arguments(tokens, past, seed)
    wanted, after = wkv.by_tokens(*given)
    for got, state in (wkv.by_blocks(*given), wkv.wkv(*given)):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state, after, rtol=1e-10, atol=1e-10)


@settings(max_examples=5)
@given(st.sampled_from((PIECE - 1, PIECE, PIECE + 1, 5 * PIECE)), strategies.SEEDS)
def test_pieces_are_the_recurrence(tokens: int, seed: int) -> None:
    given = arguments(tokens, True, seed)
    wanted, after = wkv.by_tokens(*given)
    got, state = wkv.wkv(*given)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state, after, rtol=1e-10, atol=1e-10)
    narrow, _ = wkv.wkv(*(x.float() for x in given[:4]), None)  # type: ignore[arg-type]
    torch.testing.assert_close(narrow, wkv.by_tokens(*given[:4], None)[0].float(), rtol=1e-4, atol=1e-5)


@given(st.integers(1, 12), strategies.SEEDS)
def test_it_is_the_papers_average(tokens: int, seed: int) -> None:
    """Equation 16: past values weighted by exp(k) that has decayed, and the token's own by exp(u + k)."""
    k, v, w, u, _ = arguments(tokens, False, seed)
    y, _ = wkv.wkv(k, v, w, u, None)
    for t in range(tokens):
        decays = torch.tensor([t - 1 - s for s in range(t)], dtype=torch.float64)
        weights = torch.cat((torch.exp(decays[:, None] * w + k[:, :t]), torch.exp(u + k[:, t : t + 1])), 1)
        wanted = (weights * v[:, : t + 1]).sum(1) / weights.sum(1)
        torch.testing.assert_close(y[:, t], wanted, rtol=1e-9, atol=1e-9)


@given(st.integers(1, 20), st.booleans(), strategies.SEEDS)
def test_gradients_are_those_of_the_definition(tokens: int, past: bool, seed: int) -> None:
    *given, state = arguments(tokens, past, seed)
    inputs = [x.requires_grad_() for x in given]
    dy = drawn(2, tokens, 3, seed=seed + 9)
    got = torch.autograd.grad(
        wkv.wkv(inputs[0], inputs[1], inputs[2], inputs[3], state)[0], inputs, dy, materialize_grads=True
    )
    wanted = torch.autograd.grad(
        wkv.by_tokens(inputs[0], inputs[1], inputs[2], inputs[3], state)[0], inputs, dy, materialize_grads=True
    )
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


def test_nothing_overflows_in_a_hundred_thousand_tokens() -> None:
    k, v = 40 * torch.randn(1, 100_000, 2), torch.randn(1, 100_000, 2)
    y, state = wkv.wkv(k, v, torch.tensor([-1e-4, -20.0]), torch.tensor([3.0, -3.0]), None)
    assert y.isfinite().all()
    assert all(x.isfinite().all() for x in state)
    assert y.abs().max() <= v.abs().max()

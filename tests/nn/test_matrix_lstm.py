"""The mLSTM: the paper's recurrence, in chunks and steps, with padding, extreme gates, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import one_mixer
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asbuilt import cost
from asbuilt.kernels.matrix_lstm import State, Tokens, by_chunks, by_tokens
from asbuilt.nn.cache import Cache
from asbuilt.nn.step import Step
from asbuilt.spec import HeadNorm, MatrixLSTM, Model, mamba2

CHUNK = 4
LENGTHS = st.sampled_from((1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK))
STACKS = one_mixer.stacks(strategies.matrix_lstms(5))


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    """Chunks of a few tokens, so that short texts have several."""
    usual, mamba2.CHUNK = mamba2.CHUNK, CHUNK
    yield
    mamba2.CHUNK = usual


def paper(q: Tensor, k: Tensor, v: Tensor, write: Tensor, forget: Tensor, eps: float) -> Tensor:
    """Equations 19 to 27 for each head (B, T, H, D), gates (B, T, H), without a stabiliser.

    As in the published model `eps` is added to what is divided by e^m; so here it is times e^m, m in closed form.
    """
    B, T, H, K = q.shape
    C, n = torch.zeros(B, H, K, v.shape[-1], dtype=q.dtype), torch.zeros(B, H, K, dtype=q.dtype)
    fs, read = torch.sigmoid(forget), []
    for t in range(T):
        f, i = fs[:, t], write[:, t].exp()
        C = f[..., None, None] * C + i[..., None, None] * v[:, t, :, None, :] * k[:, t, :, :, None]
        n = f[..., None] * n + i[..., None] * k[:, t]
        weights = [write[:, s] + fs[:, s + 1 : t + 1].log().sum(1) for s in range(t + 1)]
        m = torch.stack([fs[:, : t + 1].log().sum(1), *weights]).amax(0)
        query = q[:, t] / K**0.5
        length = (n * query).sum(-1).abs().clamp(min=1) + eps * m.exp()
        read.append((C * query[..., None]).sum(-2) / length[..., None])
    return torch.stack(read, 1)


@given(strategies.matrix_lstms(5), LENGTHS, strategies.SEEDS)
@torch.no_grad()
def test_it_is_the_recurrence(part: MatrixLSTM, tokens: int, seed: int) -> None:
    made: Any = strategies.randomised(one_mixer.alone(part), seed).get_submodule("blocks.0.mixer.body")
    x = 2 * torch.randn(2, tokens, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    q, k, v = (one(x).unflatten(-1, (part.n_heads, -1)) for one in (made.q, made.k, made.v))
    write, forget = (part.cap * torch.tanh(one(x) / part.cap) for one in (made.input_gate, made.forget_gate))
    h = paper(q, k, v, write, forget, part.eps)
    centred = h - h.mean(-1, keepdim=True)
    normed = centred / (h.var(-1, correction=0, keepdim=True) + part.norm.eps).sqrt() * made.norm.weight
    normed = normed if made.norm.bias is None else normed + made.norm.bias
    y = made.o(normed.flatten(2) * torch.sigmoid(made.gate(x)))
    one_mixer.near(made(x, Step((2, tokens), x.device)), y, 1e-10)


@given(st.integers(1, 3), LENGTHS, st.booleans(), st.sampled_from((1.0, 30.0)), strategies.SEEDS)
def test_chunks_are_tokens(heads: int, tokens: int, later: bool, spread: float, seed: int) -> None:
    """Outputs, states and gradients, of gates that are moderate or far apart; some tokens write nothing."""
    torch.manual_seed(seed)
    sizes = ((3,), (3,), (5,), (), ())
    q, k, v, write, forget = (torch.randn(heads, tokens, *size, dtype=torch.float64) for size in sizes)
    write, forget = spread * write, torch.nn.functional.logsigmoid(spread * forget)
    write[:, 1::3], forget[:, 1::3] = -torch.inf, 0.0
    given_ = [one.requires_grad_() for one in (q, k, v, write, forget)]
    before = State(torch.randn(heads, 3, 5, dtype=torch.float64), torch.randn(heads).double()) if later else None
    found = [by_chunks(Tokens(*given_), before, 0.1, CHUNK, keep=True), by_tokens(Tokens(*given_), before, 0.1)]
    for have, want in zip(*((y, *state) for y, state in found), strict=True):
        one_mixer.near(have.detach(), want.detach(), 1e-10)
    gradients = [torch.autograd.grad(y.square().sum() + state.memory.sum(), given_) for y, state in found]
    for have, want in zip(*gradients, strict=True):
        one_mixer.near(have, want, 1e-9)


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
@pytest.mark.parametrize("tokens", [16, 64, 80, 512])
def test_peak_is_the_allocators(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba2, "CHUNK", 64)
    part = MatrixLSTM(d_model=64, n_heads=4, d_key=24, d_value=48, norm=HeadNorm(d=48, n_heads=4))
    one_mixer.check_peak(part, tokens, dtype)


@pytest.mark.parametrize("cap", [15.0, 80.0])
@pytest.mark.parametrize("bias", [-1e3, 1e3])
def test_a_hundred_thousand_tokens_are_finite(cap: float, bias: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates are random, and then as far as their caps let them go: all is forgotten at once, or nothing ever."""
    monkeypatch.setattr(mamba2, "CHUNK", 64)
    part = MatrixLSTM(d_model=4, n_heads=2, d_key=2, d_value=2, norm=HeadNorm(d=2, n_heads=2), cap=cap)
    one_mixer.check_long(part)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 1000, 3), torch.randn(2, 1000, 3), torch.randn(2, 1000, 4)
    forget = torch.nn.functional.logsigmoid(torch.full((2, 1000), max(-cap, min(cap, bias))))
    for write in (-cap, cap):
        y, state = by_chunks(Tokens(q, k, v, torch.full((2, 1000), write), forget), None, 1e-6, 64, keep=True)
        assert all(one.isfinite().all() for one in (y, *state))


def test_the_state_is_a_matrix_a_vector_and_a_number_for_each_head() -> None:
    """8 heads of 256 x 512 + 256 + 1 numbers in float32, whatever the cache's dtype, as in a layer of xLSTM-7B."""
    part = MatrixLSTM(d_model=64, n_heads=8, d_key=256, d_value=512, norm=HeadNorm(d=512, n_heads=8))
    spec = one_mixer.alone(part)
    bill = cost.cache(spec, 4096, "bf16")
    assert (bill.fixed, bill.per_token) == (8 * (256 * 512 + 256 + 1) * 4, 0)
    assert Cache(spec, batch=1, capacity=9, dtype=torch.bfloat16).nbytes == bill.fixed

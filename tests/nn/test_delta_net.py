"""The gated delta rule: chunks equal the recurrence, far out and under strong decays too.

What the part holds, multiplies, remembers, saves and needs is proven with that of all mixers in
tests/cost/test_declarations.py, and that prefill, steps and ragged batches equal the whole in
tests/generate/test_identities.py, in one chunk; here in several.
"""

from __future__ import annotations

from collections.abc import Iterator

import one_mixer
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asbuilt import cost
from asbuilt.kernels import native
from asbuilt.kernels.delta_rule import Tokens, by_chunks, by_tokens, one_token
from asbuilt.kernels.memory import memory
from asbuilt.measure import run as measured
from asbuilt.nn.cache import Cache
from asbuilt.nn.registry import module
from asbuilt.nn.step import Step
from asbuilt.spec import (
    Block,
    Branch,
    GatedDeltaNet,
    Head,
    Model,
    Pass,
    RMSNorm,
    ShortConvolution,
    TokenEmbedding,
    delta_net,
)

CHUNK = 4


@pytest.fixture
def short_chunks() -> Iterator[None]:
    """Chunks of a few tokens, so that short texts have several."""
    usual, delta_net.CHUNK = delta_net.CHUNK, CHUNK
    yield
    delta_net.CHUNK = usual


def drawn(tokens: int, heads: tuple[int, int, int, int], by_channel: bool, seed: int, strength: float = 1.0) -> Tokens:
    """Queries and keys of length 1, and decays exp(-strength |normal|), for two rows."""
    K, R, D, V = heads
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, tokens, *shape, dtype=torch.float64, generator=generator)

    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (normal(K, D), normal(K, D)))
    g = -strength * (normal(K, 1, D) if by_channel else normal(K, R)).abs()
    return Tokens(q, k, normal(K, R, V), g, normal(K, R).sigmoid())


def near(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * max(1.0, float(wanted.abs().max())))


HEADS = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))


@given(
    HEADS, st.booleans(), st.sampled_from((1, 2, 3, 4, 5, 20, 37)), st.booleans(), st.floats(0, 50), strategies.SEEDS
)
def test_chunks_are_the_recurrence(
    heads: tuple[int, int, int, int], by_channel: bool, tokens: int, past: bool, strength: float, seed: int
) -> None:
    K, R, D, V = heads = (heads[0], 1, *heads[2:]) if by_channel else heads
    text = drawn(tokens, heads, by_channel, seed, strength)
    state = torch.randn(2 * K, D, R * V, dtype=torch.float64) if past else None
    (y, after), (wanted, at_end) = by_chunks(text, state, CHUNK, keep=True), by_tokens(text, state)
    near(y, wanted, 1e-10)
    assert after is not None
    near(after, at_end, 1e-10)
    if tokens == 1:
        into = torch.full_like(at_end, torch.nan) if state is None else state
        near(one_token(text, state, into=into), wanted, 1e-10)
        near(into, at_end, 1e-10)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 320])
def test_in_float32_too(by_channel: bool, tokens: int) -> None:
    text = drawn(tokens, (2, 1 if by_channel else 2, 16, 8), by_channel, 3)
    wanted, _ = by_tokens(text, None)
    got, _ = by_chunks(Tokens(*(x.float() for x in text)), None, 64, keep=False)
    near(got.double(), wanted, 1e-5)


@pytest.mark.parametrize("by_channel", [False, True])
def test_equal_keys_without_decay_are_exact(by_channel: bool) -> None:
    """The worst case of the triangular system: its powers grow as binomials, its inverse does not."""
    text = drawn(64, (1, 1, 4, 4), by_channel, 0, strength=0.0)
    same = text._replace(k=text.k[:, :1].expand_as(text.k), b=torch.ones_like(text.b))
    wanted, _ = by_tokens(same, None)
    got, _ = by_chunks(Tokens(*(x.float() for x in same)), None, 64, keep=False)
    near(got.double(), wanted, 1e-5)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("strength", [1e-6, 1e4])
def test_nothing_overflows_in_100k_tokens(by_channel: bool, strength: float) -> None:
    """The first tokens equal the recurrence; with strong decays the last ones too, which have forgotten all else.

    Log decays are summed in float32 within a chunk: their rounding is seen where they are far beyond any model's.
    """
    tokens, last = 100_000, 200
    text = Tokens(*(x.float() for x in drawn(last, (1, 1, 4, 4), by_channel, 1, strength)))
    long = Tokens(*(x[:1].repeat(1, tokens // last, *[1] * (x.ndim - 2)) for x in text))
    y, state = by_chunks(long, None, 64, keep=True)
    assert state is not None
    assert y.isfinite().all()
    assert state.isfinite().all()
    wanted, _ = by_tokens(Tokens(*(x[:1].double() for x in text)), None)
    tolerance = 1e-4 if strength <= 1 else 1e-2
    if strength >= 1:
        near(y[:, -100:].double(), wanted[:, -100:], tolerance)
    near(y[:, :last].double(), wanted, tolerance)


def model_of(mixer: GatedDeltaNet) -> Model:
    return Model(
        embedding=TokenEmbedding(n_vocab=7, d_model=mixer.d_model),
        blocks=(Block(branches=(Branch(name="mixer", body=mixer, norm=RMSNorm(d=mixer.d_model)),)),),
        head=Head(d_model=mixer.d_model, n_vocab=7),
        max_positions=64,
    )


MODELS = st.integers(2, 7).flatmap(strategies.delta_nets).map(model_of)


def ids(batch: int, tokens: int, seed: int) -> Tensor:
    return torch.randint(7, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("short_chunks")
@given(MODELS, st.integers(2, 15), st.integers(1, 14), strategies.SEEDS)
@settings(max_examples=20)
@torch.no_grad()
def test_prefill_and_steps_are_the_whole(spec: Model, tokens: int, first: int, seed: int) -> None:
    model, text = strategies.randomised(spec, seed), ids(2, tokens, seed)
    first = min(first, tokens - 1)
    cache = Cache(spec, batch=2, capacity=tokens, dtype=torch.float64)
    pieces = [
        model(text[:, :first], cache=cache),
        *(model(text[:, i : i + 1], cache=cache) for i in range(first, tokens)),
    ]
    near(torch.cat(pieces, 1), model(text), 1e-8)


@pytest.mark.usefixtures("short_chunks")
@given(MODELS, st.integers(1, 3), st.integers(1, 10), st.integers(0, 9))
@settings(max_examples=15)
def test_several_chunks_multiply_what_is_declared(spec: Model, batch: int, tokens: int, past: int) -> None:
    one_mixer.check_products(spec, batch, tokens, past)


@given(MODELS, st.integers(1, 3), st.integers(1, 10))
@settings(max_examples=30)
def test_what_is_saved_is_what_is_declared(spec: Model, batch: int, tokens: int) -> None:
    """Maps of one product keep their results together: a gate by a sigmoid, which no product reads, too."""
    one_mixer.check_saved(spec, batch, tokens, torch.float32)


@pytest.mark.usefixtures("short_chunks")
@given(MODELS, st.integers(1, 9), strategies.SEEDS)
@settings(max_examples=15)
def test_gradients_are_those_of_the_recurrence(spec: Model, tokens: int, seed: int) -> None:
    """Autograd through the recurrence, of the same parameters."""
    model, text = strategies.randomised(spec, seed), ids(2, tokens, seed)
    model(text).square().sum().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("asbuilt.nn.delta_net.recomputed", lambda function, *tensors: function(*tensors))
        patched.setattr("asbuilt.nn.delta_net.by_chunks", lambda text, state, size, keep: by_tokens(text, state))
        patched.setattr("asbuilt.nn.delta_net.one_token", lambda text, state, into: by_tokens(text, state)[0])
        model(text).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        near(got[name], p.grad, 1e-8)


@pytest.mark.parametrize("tokens", [1, 40, 64, 100, 512, 600, 1000])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(("batch", "d_key", "d_value"), [(2, 32, 32), (1, 32, 128), (1, 128, 64), (2, 64, 128)])
def test_the_peak_is_the_allocators(tokens: int, by_channel: bool, batch: int, d_key: int, d_value: int) -> None:
    n_value_heads = 2 if by_channel else 4
    part = GatedDeltaNet(
        d_model=64,
        n_key_heads=2,
        n_value_heads=n_value_heads,
        d_key=d_key,
        d_value=d_value,
        conv=ShortConvolution(channels=4 * d_key + n_value_heads * d_value, kernel=4),
        norm=RMSNorm(d=d_value),
        decays="channel" if by_channel else "head",
    )
    built = module(part, "")
    for parameter in built.parameters():
        parameter.data.normal_(0.0, 0.05)
    x, cache = torch.randn(batch, tokens, 64), Cache(part, batch=batch, capacity=tokens, dtype=torch.float32)

    def run() -> None:
        built(x, Step((batch, tokens), x.device, cache=cache))

    with torch.inference_mode(), native.switched_off():
        run()
        peak = measured.peak_bytes(run)
    declared = memory(part).peak_bytes(Pass(tokens=tokens, batch=batch, width=4))
    assert 0.95 * peak <= declared <= 1.1 * peak or tokens == 1
    assert 0.8 * peak <= declared <= 1.25 * peak


def test_the_state_is_as_large_as_published() -> None:
    """Qwen3-Next's: 32 x 128 x 128 numbers in float32 whatever the cache's dtype, and 3 inputs of 8,192 channels."""
    mixer = GatedDeltaNet(
        d_model=24,
        n_key_heads=16,
        n_value_heads=32,
        d_key=128,
        d_value=128,
        conv=ShortConvolution(channels=8192, kernel=4),
        norm=RMSNorm(d=128),
    )
    spec = model_of(mixer)
    for dtype, width in (("fp8", 1), ("bf16", 2), ("fp32", 4)):
        bill = cost.cache(spec, 4096, dtype)
        assert bill.fixed == bill.at_seq == 32 * 128 * 128 * 4 + 8192 * 3 * width
    assert Cache(spec, batch=3, capacity=9, dtype=torch.bfloat16).nbytes == 3 * cost.cache(spec, 9, "bf16").fixed

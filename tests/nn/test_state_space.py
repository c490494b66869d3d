"""State spaces: chunks equal the recurrence and the matrix form, prefill and steps the whole, and rows do not meet.

What they hold, multiply, remember, save and need is proven with that of all mixers in tests/cost/test_declarations.py,
in one chunk; here in several.
"""

from __future__ import annotations

from collections.abc import Iterator

import one_mixer
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asbuilt import cost
from asbuilt.kernels import mamba as kernel1
from asbuilt.kernels import mamba2 as kernel2
from asbuilt.kernels.memory import memory
from asbuilt.measure import run as measured
from asbuilt.nn.cache import Cache
from asbuilt.spec import (
    Block,
    Branch,
    Head,
    LanguageModel,
    Mamba,
    Mamba2,
    Mixer,
    Pass,
    RMSNorm,
    ShortConvolution,
    TokenEmbedding,
    mamba2,
)

CHUNK = 4
SIZE = 8
LENGTHS = (1, SIZE - 1, SIZE, SIZE + 1, 5 * SIZE)
NEAR = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    """Chunks of a few tokens, so that short texts have several."""
    usual, mamba2.CHUNK = mamba2.CHUNK, CHUNK
    yield
    mamba2.CHUNK = usual


def model(mixers: list[Mixer], n_vocab: int = 7, width: int = 5) -> LanguageModel:
    """Layers of mixers alone."""
    norm = RMSNorm(d=width)
    return LanguageModel(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=width),
        blocks=tuple(Block(branches=(Branch(name="mixer", body=mixer, norm=norm),)) for mixer in mixers),
        head=Head(d_model=width, n_vocab=n_vocab),
        max_positions=4096,
    )


MODELS = st.lists(strategies.state_spaces(5), min_size=1, max_size=2).map(model)


def ids(batch: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(7, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def drawn(T: int, dtype: torch.dtype, seed: int, state: bool) -> tuple[torch.Tensor, ...]:
    """x, decays, b, c and a state of 2 groups of 3 heads, 5 wide, with states of 4 rows."""
    generator = torch.Generator().manual_seed(seed)
    x, b, c, before = (
        torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)
        for shape in ((2, 3, T, 5), (2, T, 4), (2, T, 4), (2, 4, 15))
    )
    decays = -torch.rand(2, 3, T, dtype=torch.float64, generator=generator).to(dtype) * 2
    return x, decays, b, c, *((before,) if state else ())


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("state", [False, True])
def test_chunks_are_the_recurrence_and_the_matrix(tokens: int, dtype: torch.dtype, state: bool) -> None:
    given, near = drawn(tokens, dtype, tokens, state), NEAR[dtype]
    x, decays, b, c = given[:4]
    before = given[4] if state else None
    made, after = kernel2.by_chunks(x, decays, b, c, before, SIZE, keep=True)
    wanted, at_end = kernel2.by_tokens(x, decays, b, c, before)
    torch.testing.assert_close(made, wanted, rtol=near, atol=near)
    torch.testing.assert_close(after, at_end, rtol=near, atol=near)
    if not state:
        torch.testing.assert_close(made, kernel2.as_matrix(x, decays, b, c), rtol=near, atol=near)


@pytest.mark.parametrize("keep", [False, True])
def test_sums_of_many_decays_cost_their_neighbours_no_precision(keep: bool) -> None:
    """In float32 a chunk that forgets by hundreds is as near to float64 as one that forgets little."""
    x, decays, b, c = drawn(256, torch.float32, int(keep), False)
    decays = 4 * decays
    have = kernel2.by_chunks(x, decays, b, c, None, 256, keep=keep)
    want = kernel2.by_chunks(x.double(), decays.double(), b.double(), c.double(), None, 256, keep=keep)
    assert decays.sum(-1).max() < -700
    for made, exact in zip(have, want, strict=True):
        if exact is not None:
            assert made is not None
            assert (made.double() - exact).abs().max() < 2e-6 * exact.abs().max()


def channels(T: int, dtype: torch.dtype, seed: int, state: bool) -> tuple[torch.Tensor | None, ...]:
    """x, steps, A, b, c and a state of 5 channels with 3 numbers each."""
    generator = torch.Generator().manual_seed(seed)
    x, b, c, before = (
        torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)
        for shape in ((2, T, 5), (2, T, 3), (2, T, 3), (2, 5, 3))
    )
    steps, a = (torch.rand(*shape, dtype=torch.float64, generator=generator).to(dtype) for shape in ((2, T, 5), (5, 3)))
    return x, steps, -a, b, c, before if state else None


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("tokens", [*LENGTHS, 2, 300])
@pytest.mark.parametrize("state", [False, True])
def test_blocks_are_the_recurrence(tokens: int, dtype: torch.dtype, state: bool) -> None:
    given, near = channels(tokens, dtype, tokens, state), NEAR[dtype]
    for made, wanted in zip(kernel1.by_blocks(*given), kernel1.by_tokens(*given), strict=True):  # type: ignore[arg-type]  # pyright: ignore
        torch.testing.assert_close(made, wanted, rtol=near, atol=near)


@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("state", [False, True])
def test_gradients_of_the_scan_are_its_definitions(tokens: int, state: bool) -> None:
    """300 tokens are two segments of the backward pass."""
    x, steps, a, b, c, before = channels(tokens, torch.float64, tokens, state)
    leaves = [one.requires_grad_() for one in (x, steps, a, b, c, torch.rand(5).double()) if one is not None]
    found = []
    for scanned in (kernel1.scan, kernel1.whole):
        y, after = scanned(*leaves, before)  # type: ignore[call-arg]  # pyright: ignore
        found.append(torch.autograd.grad(y.sin().sum() + after.cos().sum(), leaves, materialize_grads=True))
    for have, want in zip(*found, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("groups", [None, 1, 3])
def test_the_gated_norm_is_its_definition(groups: int | None, first: bool) -> None:
    y, z, gain = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 4, 6), (2, 4, 6), (6,))
    )
    given = (y, z, None if groups is None else gain, 0.1, groups or 1)
    wanted = kernel2.gated(*given, first)
    made = kernel2.gated_norm(*given, first=first)
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        alone = kernel2.gated_norm(y.clone(), *given[1:], first=first)
    torch.testing.assert_close(alone, wanted, rtol=1e-12, atol=1e-12)
    leaves = [one for one in given[:3] if one is not None]
    for a, b in zip(*(torch.autograd.grad(one.sin().sum(), leaves) for one in (made, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rate", [0.0, 1e4])
def test_long_texts_do_not_overflow_channels(rate: float) -> None:
    """100,000 tokens: each is added to all before it, or forgotten at once."""
    T = 100_000
    x, ones, a = torch.full((1, T, 1), 1e-3), torch.ones(1, T, 1), torch.full((1, 1), -rate)
    y, after = kernel1.by_blocks(x, ones, a, ones, ones, None)
    wanted = torch.arange(1, T + 1).double() * 1e-3 if rate == 0 else torch.full((T,), 1e-3).double()
    torch.testing.assert_close(y[0, :, 0].double(), wanted, rtol=1e-3, atol=0.0)
    torch.testing.assert_close(after[0, 0, 0].double(), wanted[-1], rtol=1e-3, atol=0.0)


def test_long_texts_do_not_overflow() -> None:
    """100,000 tokens with decays so slow that nothing is forgotten, and so fast that nothing is kept."""
    T = 100_000
    x, b = torch.full((1, 1, T, 1), 1e-3), torch.ones(1, T, 1)
    slow, after = kernel2.by_chunks(x, torch.zeros(1, 1, T), b, b, None, 64, keep=True)
    torch.testing.assert_close(slow[0, 0, :, 0].double(), torch.arange(1, T + 1).double() * 1e-3, rtol=1e-3, atol=0.0)
    assert after is not None
    fast, after = kernel2.by_chunks(x, torch.full((1, 1, T), -1e4), b, b, None, 64, keep=True)
    assert torch.equal(fast, x)
    assert after is not None
    assert after.isfinite().all()


@given(MODELS, st.integers(1, 3), st.integers(2, 15), st.integers(1, 14), strategies.SEEDS)
@torch.no_grad()
def test_prefill_and_steps_are_the_whole(spec: LanguageModel, batch: int, tokens: int, first: int, seed: int) -> None:
    model, text = strategies.randomised(spec, seed), ids(batch, tokens, seed)
    wanted, first = model(text), min(first, tokens - 1)
    cache = Cache(spec, batch=batch, capacity=tokens, dtype=torch.float64)
    pieces = [model(text[:, :first], cache=cache)]
    pieces += [model(text[:, i : i + 1], cache=cache) for i in range(first, tokens - 1)]
    pieces.append(model(text[:, tokens - 1 :], cache=cache))
    torch.testing.assert_close(torch.cat(pieces, 1), wanted, rtol=1e-8, atol=1e-8 * max(1.0, float(wanted.abs().max())))


@given(MODELS, st.integers(1, 9), st.integers(1, 9), st.booleans(), strategies.SEEDS)
@torch.no_grad()
def test_padding_and_neighbours_change_nothing(
    spec: LanguageModel, long: int, short: int, left: bool, seed: int
) -> None:
    """Two texts of unlike lengths in one batch, and one more token after: each as if it were alone."""
    model, text = strategies.randomised(spec, seed), ids(2, 20, seed)
    lengths = (max(long, short), min(long, short))
    width = lengths[0]
    batch, valid = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.bool)
    for row, n in enumerate(lengths):
        place = slice(width - n, None) if left else slice(n)
        batch[row, place], valid[row, place] = text[row, :n], True
    cache = Cache(spec, batch=2, capacity=20, dtype=torch.float64)
    together = model(batch, cache=cache, valid_BT=valid)
    after = model(torch.stack([text[row, n : n + 1] for row, n in enumerate(lengths)]), cache=cache)
    for row, n in enumerate(lengths):
        alone = model(text[row : row + 1, : n + 1])
        near = 1e-8 * max(1.0, float(alone.abs().max()))
        torch.testing.assert_close(together[row][valid[row]], alone[0, :n], rtol=1e-8, atol=near)
        torch.testing.assert_close(after[row], alone[0, n:], rtol=1e-8, atol=near)


@given(MODELS, st.integers(1, 3), st.integers(1, 15), st.integers(0, 9))
def test_several_chunks_multiply_what_is_declared(spec: LanguageModel, batch: int, tokens: int, past: int) -> None:
    one_mixer.check_products(spec, batch, tokens, past)


@given(MODELS, st.integers(1, 3), st.integers(1, 15), st.sampled_from((torch.float32, torch.bfloat16)))
@settings(max_examples=50)
def test_several_chunks_keep_what_is_declared(spec: LanguageModel, batch: int, tokens: int, dtype: torch.dtype) -> None:
    one_mixer.check_saved(spec, batch, tokens, dtype)


def heads(n_heads: int = 8, n_groups: int = 2, d_model: int = 64) -> Mamba2:
    """Mamba-2 of wide heads."""
    conv = ShortConvolution(channels=n_heads * 64 + 2 * n_groups * 16, kernel=4, bias=True)
    return Mamba2(d_model=d_model, n_heads=n_heads, d_head=64, d_state=16, n_groups=n_groups, conv=conv)


def selective() -> Mamba:
    """Mamba of many channels."""
    conv = ShortConvolution(channels=256, kernel=4, bias=True)
    return Mamba(d_model=64, d_inner=256, d_state=16, dt_rank=4, conv=conv)


@pytest.mark.parametrize("mixer", [heads(), selective()], ids=["heads", "selective"])
@pytest.mark.parametrize("tokens", [4, 30, 200])
def test_it_needs_what_is_declared(tokens: int, mixer: Mixer) -> None:
    spec = model([mixer], width=64)
    built, text = strategies.randomised(spec, 0, torch.float32), ids(2, tokens, 0)

    def forward() -> None:
        built(text, last=True)

    with torch.inference_mode():
        forward()
        peak = measured.peak_bytes(forward)
    run = Pass(tokens=tokens, batch=2, width=4, logits="last")
    assert memory(spec).peak_bytes(run) == pytest.approx(peak, rel=0.06)


def test_states_are_float32_however_narrow_the_cache() -> None:
    """64 x 16 numbers of each of 8 heads in float32, and 3 inputs of 576 channels in the cache's dtype."""
    spec = model([heads(), heads()], width=64)
    bill = cost.cache(spec, 4096, "bf16")
    assert bill.fixed == 2 * (8 * 64 * 16 * 4 + 576 * 3 * 2)
    assert (bill.per_token, bill.at_seq) == (0, bill.fixed)
    assert Cache(spec, batch=5, capacity=4096, dtype=torch.bfloat16).nbytes == 5 * bill.fixed


def test_devices_share_heads_and_their_groups() -> None:
    part = heads(n_heads=16, n_groups=4)
    half = part.shard(2)
    assert (half.n_heads, half.n_groups, half.conv.channels) == (8, 2, 8 * 64 + 2 * 2 * 16)
    eighth = part.shard(8)
    assert (eighth.n_heads, eighth.n_groups, eighth.conv.channels) == (2, 1, 2 * 64 + 2 * 16)

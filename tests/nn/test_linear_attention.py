"""Linear attention: chunks equal the recurrence, prefill and steps the whole, and a batch's rows do not meet.

What it holds, multiplies, remembers, saves and needs is proven with that of all mixers in
tests/cost/test_declarations.py, in one chunk; here in several.
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
from asbuilt.kernels.linear_attention import by_chunks, by_tokens
from asbuilt.nn.cache import Cache
from asbuilt.spec import Block, Branch, Head, LinearAttention, Model, Pass, RMSNorm, TokenEmbedding, linear_attention

CHUNK = 4


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    """Chunks of a few tokens, so that short texts have several."""
    usual, linear_attention.CHUNK = linear_attention.CHUNK, CHUNK
    yield
    linear_attention.CHUNK = usual


@st.composite
def models(draw: st.DrawFn) -> Model:
    """One to three layers of it alone."""
    d_model, n_vocab = draw(st.integers(2, 7)), draw(st.integers(2, 9))
    mixers = draw(st.lists(strategies.linear_attentions(d_model), min_size=1, max_size=3))
    norm = RMSNorm(d=d_model)
    return Model(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        blocks=tuple(Block(branches=(Branch(name="mixer", body=mixer, norm=norm),)) for mixer in mixers),
        head=Head(d_model=d_model, n_vocab=n_vocab),
        max_positions=64,
    )


def ids(spec: Model, batch: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(spec.n_vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 4), st.integers(1, 20), st.integers(1, 6), st.integers(1, 7), st.booleans(), strategies.SEEDS)
def test_chunks_are_the_recurrence(heads: int, tokens: int, width: int, size: int, past: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.rand(2, heads, tokens, width, dtype=torch.float64, generator=generator)
    v = torch.randn(heads, tokens, width + 1, dtype=torch.float64, generator=generator)
    state = torch.randn(heads, width, width + 1, dtype=torch.float64, generator=generator) if past else None
    y, after = by_chunks(q, k, v, state, size, keep=True)
    wanted, at_end = by_tokens(q, k, v, state)
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(after, at_end, rtol=1e-10, atol=1e-10)
    # equation 4 of the paper, all pairs at once
    if not past:
        torch.testing.assert_close(y, torch.einsum("gtd,gsd->gts", q, k).tril() @ v, rtol=1e-10, atol=1e-10)


@given(models(), st.integers(1, 3), st.integers(2, 15), st.integers(1, 14), strategies.SEEDS)
@torch.no_grad()
def test_prefill_and_steps_are_the_whole(spec: Model, batch: int, tokens: int, first: int, seed: int) -> None:
    model, text = strategies.randomised(spec, seed), ids(spec, batch, tokens, seed)
    wanted, first = model(text), min(first, tokens - 1)
    cache = Cache(spec, batch=batch, capacity=tokens, dtype=torch.float64)
    pieces = [model(text[:, :first], cache=cache)]
    pieces += [model(text[:, i : i + 1], cache=cache) for i in range(first, tokens - 1)]
    pieces.append(model(text[:, tokens - 1 :], cache=cache))
    torch.testing.assert_close(torch.cat(pieces, 1), wanted, rtol=1e-8, atol=1e-8 * max(1.0, float(wanted.abs().max())))


@given(models(), st.integers(1, 9), st.integers(1, 9), st.booleans(), strategies.SEEDS)
@torch.no_grad()
def test_padding_and_neighbours_change_nothing(spec: Model, long: int, short: int, left: bool, seed: int) -> None:
    """Two texts of unlike lengths in one batch, and one more token after: each as if it were alone."""
    model, text = strategies.randomised(spec, seed), ids(spec, 2, 20, seed)
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


@given(models(), st.integers(1, 3), st.integers(1, 15), st.integers(0, 9))
def test_several_chunks_multiply_what_is_declared(spec: Model, batch: int, tokens: int, past: int) -> None:
    one_mixer.check_products(spec, batch, tokens, past)


@given(models(), st.integers(1, 3), st.integers(1, 15), st.sampled_from((torch.float32, torch.bfloat16)))
@settings(max_examples=50)
def test_several_chunks_keep_what_is_declared(spec: Model, batch: int, tokens: int, dtype: torch.dtype) -> None:
    one_mixer.check_saved(spec, batch, tokens, dtype)


def test_the_state_is_as_large_as_the_paper_says() -> None:
    """d x d numbers for each head and d more for the weights' sum, however long the sequence is."""
    mixer = LinearAttention(d_model=24, n_heads=3, d_head=8)
    spec = Model(
        embedding=TokenEmbedding(n_vocab=5, d_model=24),
        blocks=(Block(branches=(Branch(name="mixer", body=mixer),)),) * 2,
        head=Head(d_model=24, n_vocab=5),
        max_positions=4096,
    )
    bill = cost.cache(spec, 4096, "bf16")
    assert bill.fixed == 2 * 2 * 3 * (8 * 8 + 8)
    assert (bill.per_token, bill.unbounded, bill.window, bill.at_seq) == (0, 0, 0, bill.fixed)
    assert Cache(spec, batch=5, capacity=4096, dtype=torch.bfloat16).nbytes == 5 * bill.fixed
    # work grows with the tokens, not with their square
    few, many = (cost.flops(spec, Pass(tokens=n)).forward for n in (1024, 4096))
    assert many < 4.02 * few

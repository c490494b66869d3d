"""Sparse Transformer's patterns: attention under the same mask, whole, in pieces and padded, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import one_mixer
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from asbuilt import cost
from asbuilt.kernels.attention import reference
from asbuilt.measure import run as measured
from asbuilt.nn.cache import Cache
from asbuilt.nn.step import Step
from asbuilt.spec import Alibi, Attention, Model, Pass

TOKENS = 23


@st.composite
def sparse(draw: DrawFn) -> Attention:
    """Attention with a stride, beside a window or alone, or with summaries of chunks."""
    part = draw(strategies.attentions(5).filter(lambda one: one.window is None and one.chunk is None))
    part = replace(part, differential=None, caches_input=False)
    if draw(st.booleans()) and part.stride is None:
        chunk = draw(st.integers(2, 7))
        part = replace(part, positions=None, rotate_first=False, chunk=chunk, summary=draw(st.integers(1, chunk - 1)))
    elif part.stride is None:
        part = replace(part, positions=None, rotate_first=False, stride=draw(st.integers(2, 5)))
    return part if part.stride is None else replace(part, window=draw(st.none() | st.integers(1, 9)))


def equation(part: Attention, i: int) -> set[int]:
    """The positions that position i attends to, as in section 4.3 of the paper: A1 and A2 of one merged head."""
    if part.stride is not None:
        near = set(range(max(0, i - part.window + 1), i + 1)) if part.window else {i}
        return near | {j for j in range(i + 1) if (i - j) % part.stride == 0}
    assert part.chunk is not None
    assert part.summary is not None
    own = {j for j in range(i + 1) if j // part.chunk == i // part.chunk}
    return own | {j for j in range(i + 1) if j % part.chunk in range(part.chunk - part.summary, part.chunk)}


@given(sparse(), strategies.SEEDS, st.sampled_from(("reference", "fused")))
@settings(max_examples=40)
@torch.no_grad()
def test_it_is_attention_under_the_papers_mask(part: Attention, seed: int, kernel: Any) -> None:  # noqa: ANN401
    """The same layer with no pattern, its mask put in by hand."""
    made: Any = strategies.randomised(one_mixer.alone(part), seed).get_submodule("blocks.0.mixer.body")
    x = torch.randn(2, TOKENS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    step = Step((2, TOKENS), x.device, dtype=torch.float64, kernel=kernel)
    q, (k, v, _) = made.heads(x, step, None)
    seen = torch.tensor([[j in equation(part, i) for j in range(TOKENS)] for i in range(TOKENS)])
    mask: Any = seen
    if isinstance(part.positions, Alibi):
        distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
        mask = -torch.tensor(part.positions.slopes)[:, None, None] * distance.abs()
        mask = mask.masked_fill(~seen, -torch.inf)
    mixed = reference(q.transpose(1, 2), k, v, mask, made.scale, part.softcap, made.sinks)
    wanted = made.o(made.gated(mixed.transpose(1, 2).reshape(2, TOKENS, part.d_mixed), x))
    one_mixer.near(made(x, step), wanted, 1e-6)
    pairs = sum(len(equation(part, i)) for i in range(TOKENS))
    assert part.pairs(Pass(tokens=TOKENS)) == pairs
    assert part.pairs(Pass(tokens=TOKENS - 9, past=9)) == pairs - sum(len(equation(part, i)) for i in range(9))


# RoPE that depends on the text's length gives keys of pieces as of pieces
STACKS = one_mixer.stacks(sparse().filter(lambda one: getattr(one.positions, "scaling", None) is None))


@given(STACKS, st.integers(1, 20), st.integers(1, 19), strategies.SEEDS)
@settings(max_examples=30)
def test_pieces_are_the_whole(spec: Model, tokens: int, cut: int, seed: int) -> None:
    one_mixer.check_pieces(spec, tokens, (cut,), seed)


@given(STACKS, st.tuples(st.integers(1, 9), st.integers(1, 9)), st.booleans(), strategies.SEEDS)
@settings(max_examples=30)
def test_padding_changes_nothing(spec: Model, lengths: tuple[int, int], left: bool, seed: int) -> None:
    one_mixer.check_ragged(spec, lengths, left, seed)


@given(STACKS, st.integers(1, 3), st.integers(1, 15), st.sampled_from(("reference", "fused")))
@settings(max_examples=30)
def test_it_keeps_what_is_declared(spec: Model, batch: int, tokens: int, kernel: Any) -> None:  # noqa: ANN401
    model = strategies.randomised(spec, 0, torch.float32)
    run = Pass(tokens=tokens, batch=batch, width=4, kernel=kernel)
    assert cost.saved(spec, run).all == measured.saved_bytes(model, tokens, batch, kernel)[0]


@pytest.mark.parametrize(("window", "kept"), [(None, 100), (8, 8)])
def test_local_layers_cache_their_window_and_sparse_ones_all(window: int | None, kept: int) -> None:
    """A window or a chunk alone is the paper's local head; every key is one that some later token reads by a stride."""
    plain = Attention(d_model=4, n_heads=2, n_kv_heads=2, d_head=2, window=window)
    local = one_mixer.alone(plain)
    each = 2 * 2 * 2 * 2
    assert cost.cache(local, 100, "bf16").at_seq == kept * each
    strided = one_mixer.alone(replace(plain, stride=5))
    assert cost.cache(strided, 100, "bf16").at_seq == 100 * each
    fixed = one_mixer.alone(replace(plain, window=None, chunk=8, summary=2))
    assert cost.cache(fixed, 100, "bf16").at_seq == 100 * each
    for spec in (local, strided, fixed):
        cache = Cache(spec, batch=1, capacity=100, dtype=torch.bfloat16)
        assert cache.nbytes == cost.cache(spec, 100, "bf16").at_seq


def test_skipping_what_is_masked_costs_n_to_the_one_and_a_half() -> None:
    """Section 4: of n tokens with a stride near sqrt(n) each attends to about 2 sqrt(n); half where the text begins."""
    n, s = 4096, 64
    part = Attention(d_model=4, n_heads=1, n_kv_heads=1, d_head=4, window=s, stride=s)
    assert part.pairs(Pass(tokens=n)) == n * s - s * (s - 1) // 2 + (n // s) * (n // s - 1) // 2 * s
    (scores,) = (one for one in part.multiplies(Pass(tokens=n)) if one.name == "scores")
    assert (scores.flops, scores.causal_flops) == (2 * 4 * n * n, 2 * 4 * part.pairs(Pass(tokens=n)))

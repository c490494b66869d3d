"""Transforms equal transformers' processors; draws have the right shares and are their own row's affair."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from asbuilt.errors import InputError
from asbuilt.generate import sampling
from asbuilt.generate.sampling import CANDIDATES, Sampler, Sampling

# few distinct values, so that ties are common, and some that softmax takes to 0 or 1
VALUES = st.sampled_from((-1e4, -30.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 30.0, 1e4)) | st.floats(-20, 20, width=32)
SHARES = st.sampled_from((0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)) | st.floats(0, 1)
NONE = torch.zeros(1, 0, dtype=torch.long)


@st.composite
def logits(draw: DrawFn) -> Tensor:
    rows, n_vocab = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    row = st.lists(VALUES, min_size=n_vocab, max_size=n_vocab)
    return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))


def equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def run(processor: LogitsProcessor, ids: Tensor, scores: Tensor) -> Tensor:
    return processor(ids, scores.clone())  # type: ignore[arg-type]  # typed by the dtype of a default tensor


@given(logits(), st.floats(1e-3, 100))
def test_temperature(scores: Tensor, temperature: float) -> None:
    equal(sampling.divide_by_temperature(scores, temperature), run(TemperatureLogitsWarper(temperature), NONE, scores))


@given(logits(), st.integers(1, 14))
def test_top_k(scores: Tensor, k: int) -> None:
    equal(sampling.keep_top_k(scores, k), run(TopKLogitsWarper(k), NONE, scores))


@given(logits(), SHARES)
def test_top_p(scores: Tensor, p: float) -> None:
    equal(sampling.keep_top_p(scores, p), run(TopPLogitsWarper(p), NONE, scores))


@given(logits(), SHARES)
def test_min_p(scores: Tensor, p: float) -> None:
    equal(sampling.keep_min_p(scores, p), run(MinPLogitsWarper(p), NONE, scores))


@given(logits(), st.sampled_from((0.5, 1.0, 1.3, 2.0)), st.lists(st.integers(0, 11), max_size=20))
def test_repetition_penalty(scores: Tensor, penalty: float, history: list[int]) -> None:
    ids = torch.tensor([[token % scores.shape[1] for token in history]] * len(scores), dtype=torch.long)
    seen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids, True)
    theirs = run(RepetitionPenaltyLogitsProcessor(penalty), ids, scores[:, None])[:, 0]
    equal(sampling.penalise_repetition(scores, seen, penalty), theirs)


@given(logits(), st.floats(0.1, 10), st.integers(1, 14), SHARES, SHARES)
def test_the_order_of_the_transforms(scores: Tensor, temperature: float, k: int, p: float, least: float) -> None:
    asked = Sampling(temperature=temperature, top_k=k, top_p=p, min_p=least)
    theirs = scores
    for processor in (TemperatureLogitsWarper(temperature), TopKLogitsWarper(k), TopPLogitsWarper(p)):
        theirs = run(processor, NONE, theirs)
    theirs = run(MinPLogitsWarper(least), NONE, theirs)
    ours = sampling.transform(scores, asked)
    if p == 1:  # transformers then drops what has no probability; to the draw it is the same
        ours = ours.masked_fill(ours.softmax(-1) == 0, -math.inf)
        theirs = theirs.masked_fill(theirs.softmax(-1) == 0, -math.inf)
    equal(ours, theirs)


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 0.99), st.sampled_from((0.1, 1.0, 4.0, 8.0)))
def test_top_p_over_a_vocabulary_that_is_not_sorted_whole(seed: int, p: float, spread: float) -> None:
    """What float64 says is kept, but for tokens so near the limit that float32 sums cannot tell."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 8 * CANDIDATES, generator=generator) * spread
    ours = sampling.keep_top_p(scores, p)
    descending, order = scores.double().sort(-1, descending=True)
    share = descending.softmax(-1)
    before = torch.empty_like(scores, dtype=torch.float64).scatter(-1, order, share.cumsum(-1) - share)
    sure = (before - p).abs() > 1e-5
    equal(ours.isfinite()[sure], (before < p)[sure])
    equal(ours[ours.isfinite()], scores[ours.isfinite()])
    assert ours.isfinite().any(-1).all()


def chosen(requests: list[Sampling], scores: Tensor, steps: int = 1, prompts: list[list[int]] | None = None) -> Tensor:
    sampler = Sampler(requests, prompts or [[0]] * len(requests), scores.shape[1])
    return torch.stack([sampler(scores) for _ in range(steps)], 1)


@given(logits())
def test_temperature_0_takes_the_first_of_the_largest(scores: Tensor) -> None:
    assert chosen([Sampling()] * len(scores), scores)[:, 0].tolist() == [row.index(max(row)) for row in scores.tolist()]


@pytest.mark.parametrize(
    "asked", [Sampling(temperature=1), Sampling(temperature=2, top_k=3), Sampling(temperature=1, top_p=0.8, min_p=0.1)]
)
def test_tokens_come_as_often_as_they_are_likely(asked: Sampling) -> None:
    scores = torch.tensor([[0.5, -1.0, 2.0, 1.0, -math.inf, 0.0]])
    expected = sampling.transform(scores, asked).softmax(-1)[0].double()
    draws = 4000
    counts = chosen([asked], scores, draws)[0].bincount(minlength=scores.shape[1])
    spread = (expected * (1 - expected) / draws).sqrt()
    assert ((counts / draws - expected).abs() <= 4.5 * spread).all()
    assert counts[expected == 0].sum() == 0


def test_a_token_of_no_probability_is_never_drawn() -> None:
    """Not even by a random number that falls on its place: 0 in front, and the largest below 1 behind."""
    scores = torch.tensor([[-math.inf, 0.0, -math.inf]] * 2)
    edges = torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert sampling.draw(scores, edges).tolist() == [1, 1]


REQUESTS = st.builds(
    Sampling,
    temperature=st.sampled_from((0.0, 0.5, 1.0, 3.0)),
    top_k=st.none() | st.integers(1, 5),
    top_p=st.none() | st.sampled_from((0.3, 0.9, 1.0)),
    min_p=st.none() | st.just(0.1),
    repetition_penalty=st.sampled_from((1.0, 1.5)),
    seed=st.integers(0, 2**63 - 1),
)


@given(st.lists(REQUESTS, min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_a_row_chooses_as_it_would_alone(requests: list[Sampling], steps: int, seed: int) -> None:
    scores = torch.randn(len(requests), 9, generator=torch.Generator().manual_seed(seed))
    prompts = [[i, i + 1] for i in range(len(requests))]
    together = chosen(requests, scores, steps, prompts)
    for i, request in enumerate(requests):
        equal(together[i : i + 1], chosen([request], scores[i : i + 1], steps, prompts[i : i + 1]))


@given(st.lists(REQUESTS, min_size=2, max_size=4), st.integers(0, 2**32 - 1), st.data())
def test_rows_that_stay_choose_as_before(requests: list[Sampling], seed: int, data: st.DataObject) -> None:
    scores = torch.randn(len(requests), 9, generator=torch.Generator().manual_seed(seed))
    prompts = [[i] for i in range(len(requests))]
    stay = data.draw(st.lists(st.integers(0, len(requests) - 1), min_size=1, unique=True))
    sampler = Sampler(requests, prompts, 9)
    first = sampler(scores)
    sampler.keep(stay)
    equal(torch.stack((first[stay], sampler(scores[stay])), 1), chosen(requests, scores, 2, prompts)[stay])


def test_what_was_generated_is_penalised_too() -> None:
    scores = torch.tensor([[2.0, 1.5, 1.4, 1.3]])
    asked = Sampling(repetition_penalty=1.7)  # each token falls below the next when it is seen
    assert chosen([asked], scores, 4, [[1]]).tolist() == [[0, 2, 3, 0]]


def test_equal_seeds_draw_equally_and_others_do_not() -> None:
    scores = torch.zeros(3, 1000)
    warm = Sampling(temperature=1.0)
    rows = chosen([warm, warm, replace(warm, seed=1)], scores, 8)
    equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_give_no_probabilities_are_refused(bad: float) -> None:
    scores = torch.zeros(2, 5)
    scores[1] = bad
    with pytest.raises(InputError, match="logits: not finite"):
        chosen([Sampling(temperature=1.0)] * 2, scores)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("asked", [Sampling(temperature=1e-6), Sampling(temperature=10**6), Sampling(temperature=1.0)])
def test_extreme_logits_can_be_drawn_from(dtype: torch.dtype, asked: Sampling) -> None:
    scores = torch.tensor([[6e4, -6e4, 0.0, 5e4]], dtype=dtype)
    assert chosen([asked], scores).item() in ((0,) if asked.temperature <= 1 else range(4))


BAD: list[tuple[str, Callable[[], Sampling]]] = [
    ("temperature", lambda: Sampling(temperature=-1)),
    ("temperature", lambda: Sampling(temperature=math.nan)),
    ("temperature", lambda: Sampling(temperature=math.inf)),
    ("temperature", lambda: Sampling(temperature="1")),  # type: ignore[arg-type]
    ("top_k", lambda: Sampling(top_k=0)),
    ("top_k", lambda: Sampling(top_k=2.5)),  # type: ignore[arg-type]
    ("top_p", lambda: Sampling(top_p=1.01)),
    ("min_p", lambda: Sampling(min_p=-0.1)),
    ("repetition_penalty", lambda: Sampling(repetition_penalty=0)),
    ("seed", lambda: Sampling(seed=-1)),
    ("seed", lambda: Sampling(seed=True)),
]


@pytest.mark.parametrize(("field", "make"), BAD)
def test_what_is_out_of_range_is_named(field: str, make: Callable[[], Sampling]) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert caught.value.field == field
    assert caught.value.allowed


@pytest.mark.parametrize("many", [4, 8 * CANDIDATES])
def test_the_likeliest_always_stays(many: int) -> None:
    """Of a share so small that 1 - p is 1 in float32, whichever way the sums are taken."""
    scores = torch.zeros(2, many)
    scores[:, 3] = 50.0
    kept = sampling.keep_top_p(scores, 1e-9)
    assert kept.argmax(-1).tolist() == [3, 3]
    assert (kept > sampling.NEVER).sum(-1).tolist() == [1, 1]


def test_a_share_that_is_met_exactly() -> None:
    """Of four equally likely tokens two are half: no third one is needed."""
    assert int((sampling.keep_top_p(torch.zeros(1, 4), 0.5) > sampling.NEVER).sum()) == 2
    assert int((sampling.keep_top_p(torch.zeros(1, 4), 0.501) > sampling.NEVER).sum()) == 3


@given(logits(), st.sets(st.integers(0, 12), max_size=3), st.sets(st.integers(0, 12), max_size=3))
def test_suppressed_tokens_are_dropped_as_by_transformers(scores: Tensor, always: set[int], first: set[int]) -> None:
    """Those beyond the vocabulary say nothing."""
    rows, n_vocab = scores.shape
    ids = torch.zeros(rows, 1, dtype=torch.long)
    asked = Sampling(suppress=tuple(always), suppress_first=tuple(first))
    want = run(SuppressTokensLogitsProcessor([*always]), ids, scores) if always else scores
    equal(sampling.suppressed(scores, asked, first=False), want)
    want = run(SuppressTokensAtBeginLogitsProcessor([*first], 1), ids, want) if first else want
    equal(sampling.suppressed(scores, asked, first=True), want)
    if {*range(n_vocab)} - always - first and not bool((want == -math.inf).all(-1).any()):
        both = chosen([asked] * rows, scores, 2)
        assert not {*both.flatten().tolist()} & always
        assert not {*both[:, 0].tolist()} & first


@pytest.mark.parametrize("value", [[1], (1, -1), (1.0,), (True,), 3])
@pytest.mark.parametrize("field", ["suppress", "suppress_first"])
def test_suppressed_tokens_are_ids(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        Sampling(**{field: value})  # type: ignore[arg-type]  # pyright: ignore

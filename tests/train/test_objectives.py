"""Objectives: exactly what can be said exactly, and shares of many draws within bounds that are stated."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, Tensor

from asbuilt.errors import InputError
from asbuilt.train.batch import IGNORED
from asbuilt.train.objectives import (
    PADDING,
    Masked,
    NextToken,
    Objective,
    Prefix,
    SequenceToSequence,
    SpanCorruption,
    composition,
)

N_VOCAB, MASK, END, START, PAD = 50, 50, 51, 52, 53
SENTINELS = tuple(range(100, 200))
# A share of n independent draws is further than this from its probability once in 10^9 tests (Hoeffding's inequality).
RARE = 1e-9


def bound(n: int) -> float:
    return math.sqrt(math.log(2 / RARE) / (2 * n))


def drawn() -> Generator:
    return Generator().manual_seed(random.randrange(2**40))


def rows(n: int, length: int) -> Tensor:
    return torch.randint(N_VOCAB, (n, length))


def span_corruption(length: int, density: float = 0.15, mean: float = 3.0) -> SpanCorruption:
    return SpanCorruption(
        length=length, sentinels=SENTINELS, end_id=END, start_id=START, density=density, mean_span=mean
    )


OBJECTIVES: list[Objective] = [
    NextToken(context=20),
    Masked(context=20, mask_id=MASK, n_vocab=N_VOCAB, rate=0.5),
    span_corruption(40, 0.3),
    Prefix(context=20),
    Prefix(context=20, start_id=START, pad_id=PAD),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: type(objective).__name__)
def test_a_pure_function_of_tokens_and_generator(objective: Objective) -> None:
    ids, seed = rows(4, objective.length), random.randrange(2**40)
    before = ids.clone()
    made = [objective(ids, Generator().manual_seed(seed)) for _ in range(2)]
    torch.manual_seed(0)
    made.append(objective(ids, Generator().manual_seed(seed)))
    assert torch.equal(ids, before)
    for other in made[1:]:
        for name, value in vars(made[0]).items():
            assert value is None or torch.equal(value, getattr(other, name)), name
    assert made[0].ids.dtype == made[0].targets.dtype == torch.int64
    assert made[0].ids.shape == made[0].targets.shape
    assert made[0].counted > 0


def test_the_next_token() -> None:
    ids = rows(3, 9)
    made = NextToken(context=8)(ids, drawn())
    assert torch.equal(made.ids, ids[:, :-1])
    assert torch.equal(made.targets, ids[:, 1:])
    assert made.valid is None
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, PADDING, PADDING]]).expand(3, -1)
    padded = NextToken(context=8)(ids, drawn(), documents)
    assert padded.valid is not None
    assert padded.valid[0].tolist() == [True] * 7 + [False]
    assert (padded.targets[0] != IGNORED).tolist() == [True] * 6 + [False] * 2
    apart = NextToken(context=8, separate=True)(ids, drawn(), documents)
    assert (apart.targets[1] != IGNORED).tolist() == [True, True, False, True, False, True, False, False]
    assert torch.equal(apart.targets[apart.targets != IGNORED], ids[:, 1:][apart.targets != IGNORED])


@pytest.mark.parametrize("rate", [0.15, 0.5, 1.0])
def test_masked_shares(rate: float) -> None:
    """The share of targets, and of what the model is shown in their place; a random token may be the hidden one."""
    n, length, never = 400, 500, (3, 7)
    ids = rows(n, length)
    made = Masked(context=length, mask_id=MASK, n_vocab=N_VOCAB, rate=rate, never=never)(ids, drawn())
    chosen = made.targets != IGNORED
    assert torch.equal(made.targets[chosen], ids[chosen])
    assert torch.equal(made.ids[~chosen], ids[~chosen])
    allowed = ~torch.isin(ids, torch.tensor(never))
    assert not (chosen & ~allowed).any()
    count, targets = int(allowed.sum()), int(chosen.sum())
    assert abs(targets / count - rate) <= bound(count)
    shown, hidden = made.ids[chosen], ids[chosen]
    shares = {
        0.8: shown == MASK,
        0.1 + 0.1 / N_VOCAB: shown == hidden,
        0.1 - 0.1 / N_VOCAB: (shown != MASK) & (shown != hidden),
    }
    for wanted, found in shares.items():
        assert abs(float(found.double().mean()) - wanted) <= bound(targets)
    other = shown[shares[0.1 - 0.1 / N_VOCAB]]
    for id_, times in Counter(other.tolist()).items():
        assert 0 <= id_ < N_VOCAB
        assert abs(times / len(other) - 1 / N_VOCAB) <= bound(len(other)) + 1 / N_VOCAB**2


def test_masked_tokens_are_drawn_independently() -> None:
    """Neighbours, and the two rows of a batch, are both targets as often as the product says."""
    made = Masked(context=100_000, mask_id=MASK, n_vocab=N_VOCAB, rate=0.3)(rows(2, 100_000), drawn())
    chosen = made.targets != IGNORED
    for both in (chosen[:, ::2] & chosen[:, 1::2], chosen[0] & chosen[1]):
        assert abs(float(both.double().mean()) - 0.09) <= bound(both.numel())


def test_padding_is_never_masked() -> None:
    ids = rows(2, 10)
    documents = torch.tensor([[0] * 6 + [PADDING] * 4, [1] * 10])
    made = Masked(context=10, mask_id=MASK, n_vocab=N_VOCAB, rate=1.0)(ids, drawn(), documents)
    assert made.valid is not None
    assert torch.equal(made.valid, documents != PADDING)
    assert torch.equal(made.targets != IGNORED, documents != PADDING)


@given(st.integers(2, 300), st.floats(0.01, 0.99), st.floats(1, 10))
def test_a_span_corruption_is_undone(length: int, density: float, mean: float) -> None:
    wanted_spans = max(1, round(length * density)) / mean
    if wanted_spans > len(SENTINELS) - 2:
        return
    objective, ids = span_corruption(length, density, mean), rows(2, length)
    made = objective(ids, drawn())
    assert made.source is not None
    assert made.source.shape == (2, objective.source_length)
    assert made.targets.shape == (2, objective.target_length)
    for row in range(2):
        assert torch.equal(objective.undo(made.source[row], made.targets[row]), ids[row])
    assert torch.equal(made.ids[:, 1:], made.targets[:, :-1])
    assert (made.ids[:, 0] == START).all()
    assert (made.source[:, -1] == END).all()
    assert (made.targets[:, -1] == END).all()
    for held in (made.source, made.targets):
        for row in held:
            assert [id_ for id_ in row.tolist() if id_ >= 100] == list(SENTINELS[: objective.n_spans])
    cut = (made.targets < N_VOCAB).sum(1)
    assert cut.tolist() == [min(max(round(length * density), 1), length - 1)] * 2


def test_the_example_of_the_docstring() -> None:
    """Seven tokens of which four are cut in two spans: every result is a composition, and undone."""
    objective = span_corruption(7, 4 / 7, 2.0)
    seen = set()
    for _ in range(200):
        made = objective(torch.arange(7)[None], drawn())
        assert made.source is not None
        seen.add((tuple(made.source[0].tolist()), tuple(made.targets[0].tolist())))
    assert ((0, 100, 3, 4, 101, END), (100, 1, 2, 101, 5, 6, END)) in seen
    assert len(seen) == 2 * 3  # of 3 kept tokens in 2 parts, and of 4 cut ones


def test_t5s_own_lengths() -> None:
    """512 tokens of the encoder: 568 of the text, 114 written, as its published preprocessing states."""
    made = SpanCorruption.reading(512, sentinels=SENTINELS, end_id=END, start_id=START)
    assert (made.length, made.source_length, made.target_length) == (568, 512, 114)


@given(st.integers(3, 400), st.integers(3, 200), st.floats(0.05, 0.6), st.floats(1, 8))
def test_the_longest_row_that_is_read(source: int, target: int, density: float, mean: float) -> None:
    many = tuple(range(1000, 3000))
    made = SpanCorruption.reading(
        source, target, sentinels=many, end_id=END, start_id=START, density=density, mean_span=mean
    )
    longer = SpanCorruption(
        length=made.length + 1, sentinels=many, end_id=END, start_id=START, density=density, mean_span=mean
    )
    assert made.source_length <= source
    assert made.target_length <= target
    assert longer.source_length > source or longer.target_length > target


def test_compositions_are_all_alike() -> None:
    whole, parts, n = random.randint(5, 7), random.randint(2, 4), 4000
    every = [one for one in product(range(1, whole), repeat=parts) if sum(one) == whole]
    generator = drawn()
    counts = Counter(tuple(composition(whole, parts, generator).tolist()) for _ in range(n))
    assert set(counts) == set(every)
    for times in counts.values():
        assert abs(times / n - 1 / len(every)) <= bound(n)
    assert composition(5, 1, drawn()).tolist() == [5]
    assert composition(5, 5, drawn()).tolist() == [1] * 5


def test_a_prefix_has_no_loss() -> None:
    n, length, least = 3000, 9, 2
    ids = rows(n, length)
    made = Prefix(context=length - 1, shortest=least)(ids, drawn())
    assert torch.equal(made.ids, ids[:, :-1])
    learned = made.targets != IGNORED
    assert torch.equal(made.targets[learned], ids[:, 1:][learned])
    assert (learned[:, 1:] >= learned[:, :-1]).all()  # once begun, it does not stop
    places = length - learned.sum(1)
    assert set(places.tolist()) == set(range(least, length - least + 1))
    for times in Counter(places.tolist()).values():
        assert abs(times / n - 1 / (length - 2 * least + 1)) <= bound(n)


def test_a_prefix_for_an_encoder_and_a_decoder() -> None:
    """What is read and what is written are the text, with the same draws as a decoder's."""
    ids, seed = rows(200, 12), random.randrange(2**40)
    alone = Prefix(context=11, shortest=3)(ids, Generator().manual_seed(seed))
    made = Prefix(context=11, shortest=3, start_id=START, pad_id=PAD)(ids, Generator().manual_seed(seed))
    assert made.source is not None
    assert made.source_valid is not None
    for row in range(200):
        read = made.source[row][made.source_valid[row]]
        written = made.targets[row][made.targets[row] != IGNORED]
        assert torch.equal(torch.cat([read, written]), ids[row])
        assert len(written) == int((alone.targets[row] != IGNORED).sum())
        assert made.ids[row, : len(written)].tolist() == [START, *written.tolist()[:-1]]
        assert (made.ids[row, len(written) :] == PAD).all()
    assert (made.source[~made.source_valid] == PAD).all()
    assert made.valid is not None
    assert torch.equal(made.valid, made.targets != IGNORED)


def test_pairs() -> None:
    objective = SequenceToSequence(source_length=5, target_length=4, end_id=END, start_id=START, pad_id=PAD)
    made = objective([([1, 2], [3]), ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10])])
    assert made.source is not None
    assert made.source.tolist() == [[1, 2, END, PAD, PAD], [1, 2, 3, 4, END]]
    assert made.ids.tolist() == [[START, 3, PAD, PAD], [START, 7, 8, 9]]
    assert made.targets.tolist() == [[3, END, IGNORED, IGNORED], [7, 8, 9, END]]
    assert made.source_valid is not None
    assert made.source_valid.sum(1).tolist() == [3, 5]
    assert made.valid is not None
    assert made.valid.sum(1).tolist() == [2, 4]
    full = objective([([1, 2, 3, 4], [5, 6, 7])])
    assert (full.valid, full.source_valid, full.counted) == (None, None, 4)


def test_refused() -> None:
    with pytest.raises(InputError, match="context: must be at least 1, got 0"):
        NextToken(context=0)
    with pytest.raises(InputError, match="rate: must be above 0"):
        Masked(context=4, mask_id=1, n_vocab=2, rate=0.0)
    with pytest.raises(InputError, match=r"sentinels: too few .got 100; must be 150.*--sentinels"):
        span_corruption(1000, 0.15, 1.0)
    with pytest.raises(InputError, match="density: must be between"):
        span_corruption(10, 1.0)
    with pytest.raises(InputError, match="mean_span: must be at least 1"):
        span_corruption(10, 0.5, 0.5)
    with pytest.raises(InputError, match="source, target: too short"):
        SpanCorruption.reading(2, sentinels=SENTINELS, end_id=END, start_id=START)
    with pytest.raises(InputError, match="context: must be at least 9, got 8"):
        Prefix(context=8, shortest=5)
    padded = torch.full((1, 40), PADDING)
    for objective in (span_corruption(40), Prefix(context=39, start_id=START)):
        with pytest.raises(InputError, match="packing: rows are cut from one text"):
            objective(rows(1, 40), drawn(), padded)

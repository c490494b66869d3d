"""Which rows a step reads: a function of seed and step, every row once an epoch, the same for any number of ranks."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asbuilt.errors import InputError
from asbuilt.text.sources import Piece
from asbuilt.text.train import train
from asbuilt.train.batch import IGNORED, Batch
from asbuilt.train.data import PairData, ShardData, divided, pack, permuted, shard_data
from asbuilt.train.objectives import PADDING, Masked, NextToken, Objective, SequenceToSequence, SpanCorruption
from asbuilt.train.shards import Shards, write_shards

PAD, END = 300, 256


@pytest.fixture(scope="module")
def lengths() -> list[int]:
    return [random.Random(9).randint(1, 25) for _ in range(60)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> Shards:
    """Documents of random letters, each with an end token."""
    made = ["".join(random.choices("abcdefgh", k=length)) for length in lengths]
    folder = tmp_path_factory.mktemp("data") / "s"
    return write_shards(folder, (Piece(text, True) for text in made), [train([], 256)], end_id=END, shard=97)


def same(one: Batch, other: Batch) -> bool:
    held = (vars(one), vars(other))
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in ((held[0][name], held[1][name]) for name in ("ids", "targets", "valid", "source", "source_valid"))
    )


OBJECTIVES: list[Objective] = [
    NextToken(context=16),
    NextToken(context=16, separate=True),
    Masked(context=16, mask_id=299, n_vocab=256, rate=0.4),
    SpanCorruption(length=20, sentinels=(301, 302, 303), end_id=END, start_id=PAD, density=0.3),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_ranks_take_their_share_of_the_same_rows(shards: Shards, objective: Objective) -> None:
    """Drawn anew by another object, in another order: nothing is remembered between steps."""
    seed, step = random.randrange(2**40), random.randrange(10**6)
    made = [shard_data(shards, objective, batch_size=12, seed=seed) for _ in range(2)]
    made[1].batch(step + 5)
    whole = made[0].batch(step)
    assert whole.ids.shape[0] == 12
    assert same(whole, made[1].batch(step))
    for ranks in (2, 3, 12):
        parts = [made[1].batch(step, rank, ranks) for rank in reversed(range(ranks))][::-1]
        for name in ("ids", "targets", "source"):
            if getattr(whole, name) is not None:
                assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
        assert sum(part.counted for part in parts) == whole.counted
    other = shard_data(shards, objective, batch_size=12, seed=seed + 1)
    assert not same(other.batch(step), whole)
    assert not same(made[0].batch(step + 1), whole)


def test_every_row_once_an_epoch(shards: Shards) -> None:
    """Whatever the batch: rows of a batch may be of two epochs."""
    for size in (1, 7, 32):
        data = shard_data(shards, NextToken(context=16), batch_size=size, seed=random.randrange(2**40))
        n = data.n_rows
        assert n == (len(shards) - 17) // 16 + 1
        visited = [row for step in range(-(-3 * n // size)) for row in data.rows(step)][: 3 * n]
        epochs = [visited[i * n : (i + 1) * n] for i in range(3)]
        for epoch in epochs:
            assert sorted(epoch) == list(range(n))
        assert epochs[0] != epochs[1] != epochs[2]
        assert epochs[0] != list(range(n))


def test_each_token_is_a_target_once(shards: Shards) -> None:
    data = shard_data(shards, NextToken(context=16), batch_size=1, seed=3)
    rows = sorted(((data.rows(step)[0], data.batch(step)) for step in range(data.n_rows)), key=lambda found: found[0])
    n = data.n_rows * 16
    assert torch.equal(torch.cat([batch.ids[0] for _, batch in rows]), shards.tokens(0, n))
    assert torch.equal(torch.cat([batch.targets[0] for _, batch in rows]), shards.tokens(1, n + 1))


@given(st.integers(1, 400), st.lists(st.integers(0, 2**63 - 1), min_size=6, max_size=6))
def test_a_permutation(n: int, keys: list[int]) -> None:
    assert sorted(permuted(place, n, keys) for place in range(n)) == list(range(n))


@given(st.integers(2**30, 2**62), st.integers(0, 2**32))
def test_a_permutation_of_more_than_memory_holds(n: int, seed: int) -> None:
    draw = random.Random(seed)
    keys = [draw.getrandbits(63) for _ in range(6)]
    places = [draw.randrange(n) for _ in range(50)]
    made = [permuted(place, n, keys) for place in places]
    assert all(0 <= one < n for one in made)
    assert len(set(made)) == len(set(places))


@pytest.mark.parametrize("n", [5, 37])
def test_orders_are_all_alike(n: int) -> None:
    """Each place is sent to each, and neighbours to each pair, about as often (bound: once in 10^9 runs)."""
    runs = 6000
    firsts, steps = Counter(), Counter()
    for _ in range(runs):
        keys = [random.getrandbits(63) for _ in range(6)]
        one, two = permuted(0, n, keys), permuted(1, n, keys)
        firsts[one] += 1
        steps[(two - one) % n] += 1
    bound = math.sqrt(math.log(2e9 * n) / (2 * runs))
    assert all(abs(firsts[i] / runs - 1 / n) < bound for i in range(n))
    assert steps[0] == 0
    assert all(abs(steps[i] / runs - 1 / (n - 1)) < bound for i in range(1, n))


def test_validation_is_apart_and_always_the_same(shards: Shards) -> None:
    objective = Masked(context=16, mask_id=299, n_vocab=256, rate=0.4)
    data = shard_data(shards, objective, batch_size=4, seed=1, validation=0.2)
    held = list(data.validation())
    assert all(same(one, other) for one, other in zip(held, data.validation(), strict=True))
    n_rows = (len(shards) - data.stop) // 16
    assert sum(len(batch.ids) for batch in held) == n_rows
    seen = torch.cat([torch.where(batch.targets == IGNORED, batch.ids, batch.targets) for batch in held])
    assert torch.equal(seen.flatten(), shards.tokens(data.stop, data.stop + 16 * n_rows))
    assert data.n_rows == data.stop // 16
    assert not same(held[0], data.batch(0))
    assert list(shard_data(shards, objective, batch_size=4, seed=1).validation()) == []


def test_where_texts_are_divided(shards: Shards) -> None:
    """At the end of a document, with no less than what was asked for and at most twice that; else within one."""
    for _ in range(50):
        share = random.uniform(0.01, 0.9)
        at, wanted = divided(shards, share), round(len(shards) * share)
        assert wanted <= len(shards) - at <= max(2 * wanted, wanted)
        later = [end for end in shards.ends.tolist() if at < end <= len(shards) - wanted]
        assert not later
        assert at in shards.ends or len(shards) - at == wanted
    assert divided(shards, 0) == len(shards)
    with pytest.raises(InputError, match="validation: must be from 0 to below 1"):
        divided(shards, 1.0)


def test_one_long_document_is_divided_within(tmp_path: Path) -> None:
    one = write_shards(tmp_path / "s", [Piece("a" * 1000, True)], [train([], 256)])
    assert divided(one, 0.1) == 900


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(2, 20), st.data())
def test_packing(lengths: list[int], length: int, data: st.DataObject) -> None:
    """In order and without loss; a document that fits is in one row; a row has no room for the next document."""
    ends = np.cumsum(lengths)
    starts = [0, *ends.tolist()]
    stop = data.draw(st.sampled_from(starts[1:]))
    within = range(data.draw(st.sampled_from([one for one in starts if one < stop])), stop)
    rows = pack(ends, within, length).tolist()
    assert [row[0] for row in rows] == [within.start, *(row[1] for row in rows[:-1])]
    assert rows[-1][1] == within.stop
    assert all(0 < end - start <= length for start, end in rows)
    begin = {start for start, _ in rows}
    for begun, ended in pairwise(starts):
        holding = [(start, end) for start, end in rows if start < ended and begun < end]
        if holding and ended - begun <= length:
            assert len(holding) == 1
        elif holding:
            assert begun in begin
            assert all(end - start == length for start, end in holding[:-1])
    for start, end in rows[:-1]:
        following = min(one for one in starts if one > end)
        assert following - start > length


def test_rows_of_whole_documents(shards: Shards, lengths: list[int]) -> None:
    objective = NextToken(context=29, separate=True)
    data = shard_data(shards, objective, batch_size=3, seed=5, packing="documents", pad_id=PAD)
    learned = 0
    for step in range(-(-data.n_rows // 3)):
        batch, documents = data.batch(step), data.documents(step)
        assert documents.shape == (3, 30)
        rows = data.rows(step)[: data.n_rows - 3 * step]
        for row in range(len(rows)):
            ids, numbers = batch.ids[row], documents[row, :-1]
            assert ((ids == PAD) == (numbers == PADDING)).all()
            for number in set(documents[row].tolist()) - {PADDING}:
                own = documents[row] == number
                assert int(own.sum()) == lengths[number] + 1  # whole, with its end token
                targets = batch.targets[row][own[1:] & (batch.targets[row] != IGNORED)]
                start = int(shards.ends[number]) - lengths[number] - 1
                assert torch.equal(targets, shards.tokens(start + 1, start + lengths[number] + 1))
                learned += len(targets)
    assert learned == sum(lengths)  # all but each document's first token


def test_documents_of_a_stream(shards: Shards) -> None:
    """Targets within documents alone, where that is asked for; what the documents are is known."""
    data = shard_data(shards, NextToken(context=16, separate=True), batch_size=4, seed=2)
    for step in range(10):
        batch, documents = data.batch(step), data.documents(step)
        within = documents[:, 1:] == documents[:, :-1]
        assert torch.equal(batch.targets != IGNORED, within)
        assert torch.equal(within, batch.ids != END)
        assert batch.valid is None


def test_refused(shards: Shards) -> None:
    n = len(shards)
    with pytest.raises(InputError, match=rf"context: the text has {n:,} tokens and a sequence takes {n + 1:,}"):
        shard_data(shards, NextToken(context=n), batch_size=1, seed=1)
    assert shard_data(shards, NextToken(context=n - 1), batch_size=1, seed=1).n_rows == 1
    with pytest.raises(InputError, match=r"validation: .* tokens, and a sequence takes 101"):
        shard_data(shards, NextToken(context=100), batch_size=1, seed=1, validation=0.05)
    with pytest.raises(InputError, match="packing: must be stream, documents or single"):
        shard_data(shards, NextToken(context=8), batch_size=1, seed=1, packing="x")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="batch_size: must be at least 1"):
        shard_data(shards, NextToken(context=8), batch_size=0, seed=1)
    data: ShardData = shard_data(shards, NextToken(context=8), batch_size=6, seed=1)
    for rank, ranks in ((0, 4), (2, 2), (-1, 2)):
        with pytest.raises(InputError, match="batch_size: ranks have no equal shares"):
            data.batch(0, rank, ranks)


def test_pairs_of_texts() -> None:
    """Each once an epoch, shares of ranks, validation in order."""
    n = random.randint(5, 30)
    pairs = [([i], [i, i + 1]) for i in range(n)]
    objective = SequenceToSequence(source_length=3, target_length=4, end_id=END, start_id=PAD)
    data = PairData(pairs=pairs, objective=objective, batch_size=4, seed=random.randrange(2**40), held_out=pairs[:6])
    seen = []
    for step in range(n):
        batch = data.batch(step)
        parts = [data.batch(step, rank, 2) for rank in range(2)]
        assert batch.source is not None
        assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)
        assert torch.equal(batch.source[:, 0], batch.targets[:, 0])
        seen += batch.source[:, 0].tolist()
    epochs = [seen[i * n : (i + 1) * n] for i in range(4)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [batch.targets[:, 0].tolist() for batch in data.validation()] == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(InputError, match="pairs: empty"):
        PairData(pairs=[], objective=objective, batch_size=4, seed=1)
    with pytest.raises(InputError, match="batch_size: must be at least 1"):
        PairData(pairs=pairs, objective=objective, batch_size=0, seed=1)

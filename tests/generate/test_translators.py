"""Encoder and decoder: the same numbers at once or in pieces, alone or among others, by either kernel."""

from __future__ import annotations

from typing import get_args

import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from strategies import SEEDS, random_tokens, texts, whole
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.kernels.relative import buckets
from asbuilt.nn.cache import Cache
from asbuilt.nn.model import Model
from asbuilt.spec import RelativeBuckets
from asbuilt.spec.part import Kernel

KERNELS = st.sampled_from(get_args(Kernel))
MODELS = st.builds(strategies.randomised, strategies.translators(), SEEDS)


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-9 * max(1.0, float(b.abs().max())))


def new_cache(model: Model, batch: int, capacity: int, source: int) -> Cache:
    return Cache(model.spec, batch=batch, capacity=capacity, source=source, dtype=torch.float64)


@given(MODELS, KERNELS, SEEDS, st.integers(1, 12), st.lists(st.integers(1, 6), min_size=1, max_size=6))
@torch.no_grad()
def test_pieces_equal_the_whole(model: Model, kernel: Kernel, seed: int, source: int, sizes: list[int]) -> None:
    """The source is read with the first piece, and every other piece finds what it left."""
    n_vocab = model.spec.n_vocab
    read, written = random_tokens(n_vocab, 2, source, seed=seed), random_tokens(n_vocab, 2, sum(sizes), seed=seed + 1)
    cache = new_cache(model, 2, sum(sizes), source + 3)
    pieces = []
    for i, piece in enumerate(written.split(sizes, 1)):
        pieces.append(model(piece, source_BS=None if i else read, cache=cache, kernel=kernel))
    same(torch.cat(pieces, 1), whole(model, written, sizes, source_BS=read, kernel=kernel))


@given(MODELS, SEEDS)
@torch.no_grad()
def test_the_kernels_agree(model: Model, seed: int) -> None:
    tokens = random_tokens(model.spec.n_vocab, 2, 9, seed=seed)
    same(model(tokens, source_BS=tokens[:, :5]), model(tokens, source_BS=tokens[:, :5], kernel="reference"))


@given(MODELS, KERNELS, st.data())
@torch.no_grad()
def test_a_ragged_batch_equals_each_row_alone(model: Model, kernel: Kernel, data: DataObject) -> None:
    """Sources and texts of different lengths, both padded; then a step from the cache."""
    n_vocab = model.spec.n_vocab
    sources = data.draw(texts(n_vocab, max_tokens=9))
    written = data.draw(texts(n_vocab, rows=len(sources), max_tokens=9))
    read, real = _padded(sources)
    tokens, valid = _padded(written)
    step = random_tokens(n_vocab, len(sources), 1, seed=0)
    cache = new_cache(model, len(sources), tokens.shape[1] + 1, read.shape[1])
    logits = model(tokens, source_BS=read, source_valid_BS=real, valid_BT=valid, cache=cache, kernel=kernel)
    after = model(step, cache=cache, kernel=kernel)
    for b, (source, text) in enumerate(zip(sources, written, strict=True)):
        row = torch.tensor([text + step[b].tolist()])
        alone = whole(model, row, [len(text), 1], source_BS=torch.tensor([source]), kernel=kernel)[0]
        same(torch.cat((logits[b, valid[b]], after[b])), alone)


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Padding on the right holds a real token, so that one that is looked at changes the answer."""
    width = max(map(len, rows))
    tokens = torch.tensor([row + [row[0]] * (width - len(row)) for row in rows])
    return tokens, torch.arange(width) < torch.tensor([[len(row)] for row in rows])


@given(MODELS)
@torch.no_grad()
def test_the_source_matters_and_must_fit(model: Model) -> None:
    n_vocab = model.spec.n_vocab
    tokens = random_tokens(n_vocab, 1, 4, seed=0)
    with pytest.raises(InputError, match="source exceeds the cache"):
        model(tokens, source_BS=tokens, cache=new_cache(model, 1, 4, 3))
    with pytest.raises(AssertionError, match="no source"):
        model(tokens)


@given(st.sampled_from((4, 8, 32)), st.integers(17, 200), st.booleans())
def test_buckets_cover_all_and_never_go_back(n: int, far: int, both_ways: bool) -> None:
    """From far behind to far ahead each direction starts at its first bucket and grows to its last."""
    part = RelativeBuckets(n_buckets=n, max_distance=far, both_ways=both_ways)
    behind = buckets(part, -torch.arange(far + 2)).tolist()
    ahead = buckets(part, torch.arange(1, far + 2)).tolist()
    assert behind == sorted(behind)
    # the first bucket that grows is the narrowest, and narrower than one distance it may hold none
    narrowest = part.exact * ((far / part.exact) ** (1 / (part.one_way - part.exact)) - 1)
    assert set(behind) == set(range(part.one_way)) or narrowest < 1
    assert behind[: part.exact] == list(range(part.exact))
    if both_ways:
        assert [b - part.one_way for b in ahead] == behind[1:]
    else:
        assert set(ahead) == {0}

"""N-gram embeddings: the published sum, written out in whole numbers; in pieces, ragged and counted as declared."""

from __future__ import annotations

from dataclasses import replace

import one_mixer
import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.kernels.memory import memory
from asbuilt.measure import run as measured
from asbuilt.nn import build
from asbuilt.nn.cache import Cache
from asbuilt.nn.ngrams import hashed
from asbuilt.nn.registry import module
from asbuilt.nn.step import Step
from asbuilt.spec import LinearAttention, Model, NGrams, Pass, TokenEmbedding, from_dict, to_dict

MIXER = LinearAttention(d_model=6, n_heads=2, d_head=3)
PARTS = strategies.ngrams(6, 7)
TOKENS = st.integers(1, 12)


def stack(part: NGrams) -> Model:
    """One layer after the embedding."""
    plain = one_mixer.alone(MIXER)
    return plain.changed(embedding=TokenEmbedding(n_vocab=7, d_model=6, scale=0.5, ngrams=part))


MODELS = PARTS.map(stack)


def published(part: NGrams, tokens: list[int]) -> list[list[int]]:
    """Each table's rows of a text, in Python's whole numbers: those before the text, or its beginning, are 0."""
    found = []
    for table in part.tables:
        rows = []
        for t in range(len(tokens)):
            begin = max((s + 1 for s in range(t) if tokens[s] == part.boundary), default=0)
            ids = [tokens[t - i] if t - i >= begin else 0 for i in range(table.n)]
            rows.append(sum(one * part.n_vocab**i for i, one in enumerate(ids)) % table.n_rows)
        found.append(rows)
    return found


@torch.no_grad()
@given(PARTS, TOKENS, strategies.SEEDS)
def test_it_is_the_published_sum(part: NGrams, tokens: int, seed: int) -> None:
    model = strategies.randomised(stack(part), seed)
    ids = one_mixer.text(model.spec, 2, tokens, seed)
    tables = model.embedding.ngrams.tables  # type: ignore[union-attr]
    own = 0.5 * model.embedding.weight[ids]  # type: ignore[index]
    for row, made in enumerate(model.embedding(ids, model.begin((2, tokens), ids.device, None, None, "fused"))):
        wanted = own[row].clone()
        for table, rows in zip(tables, published(part, ids[row].tolist()), strict=True):  # type: ignore[arg-type]
            wanted += table.weight[rows] @ table.project.weight.T
        one_mixer.near(made, wanted / (1 + len(part.tables)), 1e-12)


@given(st.lists(st.integers(0, 2**24 - 1), min_size=2, max_size=16), st.integers(1, 2**31 - 1))
def test_no_hash_overflows(ids: list[int], n_rows: int) -> None:
    """Of ids and rows as many as a part may have, in Python's whole numbers."""
    made = hashed([torch.tensor([[one]]) for one in ids], 2**24, n_rows)
    assert made.item() == sum(one * 2 ** (24 * i) for i, one in enumerate(ids)) % n_rows


@given(MODELS, TOKENS, st.lists(st.integers(1, 11), max_size=3), strategies.SEEDS)
def test_pieces_are_the_whole(spec: Model, tokens: int, cuts: list[int], seed: int) -> None:
    one_mixer.check_pieces(spec, tokens, tuple(cuts), seed)


@given(MODELS, st.tuples(TOKENS, TOKENS), st.booleans(), strategies.SEEDS)
def test_padding_and_neighbours_change_nothing(spec: Model, lengths: tuple[int, int], left: bool, seed: int) -> None:
    one_mixer.check_ragged(spec, lengths, left, seed)


@settings(max_examples=20)
@given(MODELS, st.integers(1, 3), TOKENS, st.sampled_from((torch.float32, torch.bfloat16)))
def test_it_multiplies_and_saves_what_is_declared(spec: Model, batch: int, tokens: int, dtype: torch.dtype) -> None:
    one_mixer.check_products(spec, batch, tokens, 3)
    one_mixer.check_saved(spec, batch, tokens, dtype)
    assert cost.total_parameters(spec) == sum(p.numel() for p in build(spec, device="meta").parameters())


@torch.inference_mode()
@pytest.mark.parametrize("boundary", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d_model", [12, 240])
@pytest.mark.parametrize("n", [2, 4])
def test_it_needs_what_is_declared(boundary: int | None, dtype: torch.dtype, d_model: int, n: int) -> None:
    ngrams = NGrams.of(n_vocab=500, d_model=d_model, n=n, splits=n // 2, ratio=3.5, boundary=boundary)
    part = TokenEmbedding(n_vocab=500, d_model=d_model, ngrams=ngrams)
    made, ids = module(part, "x").to(dtype), torch.arange(600).view(2, 300) % 500
    seen = measured.peak_bytes(lambda: made(ids, Step((2, 300), ids.device, dtype=dtype)))
    assert 0.8 * seen <= memory(part).peak_bytes(Pass(tokens=300, batch=2, width=dtype.itemsize)) <= 1.25 * seen


@given(MODELS, st.integers(1, 3), st.integers(1, 40))
def test_a_sequence_remembers_its_last_ids(spec: Model, batch: int, capacity: int) -> None:
    """Four bytes each, however long the text and narrow the cache."""
    part = spec.embedding.ngrams  # type: ignore[union-attr]
    assert isinstance(part, NGrams)
    cache = Cache(spec, batch=batch, capacity=capacity, dtype=torch.bfloat16)
    assert cache.layers["embedding.ngrams"].nbytes == batch * 4 * (max(one.n for one in part.tables) - 1)


def test_the_tables_of_longcat_flash_lite() -> None:
    """Its config: 131,072 tokens, a stream of 3,072, ratio 78, n-grams of up to 4, 4 tables each."""
    part = NGrams.of(n_vocab=131072, d_model=3072, n=4, splits=4, ratio=78, boundary=2)
    assert [one.n for one in part.tables] == [2] * 4 + [3] * 4 + [4] * 4
    assert {one.d for one in part.tables} == {256}
    assert [one.n_rows for one in part.tables] == [10223616 + 1 + 2 * i for i in range(12)]
    spec = TokenEmbedding(n_vocab=131072, d_model=3072, ngrams=part)
    rows = sum(one.n_rows for one in part.tables)
    assert cost.total_parameters(spec) == 131072 * 3072 + rows * 256 + 12 * 256 * 3072
    assert from_dict(to_dict(spec)) == spec


def test_what_is_refused_by_name() -> None:
    part = NGrams.of(n_vocab=7, d_model=6, n=2, splits=2, ratio=2)
    with pytest.raises(InputError, match=r"NGrams\.n_vocab"):
        replace(part, n_vocab=2**24 + 1)
    with pytest.raises(InputError, match=r"HashedTable\.n"):
        replace(part.tables[0], n=17)
    with pytest.raises(InputError, match=r"NGrams\.tables"):
        replace(part, tables=())
    with pytest.raises(InputError, match=r"NGrams\.boundary"):
        replace(part, boundary=-1)
    with pytest.raises(InputError, match=r"TokenEmbedding\.ngrams"):
        TokenEmbedding(n_vocab=7, d_model=8, ngrams=part)
    with pytest.raises(InputError, match="splits"):
        NGrams.of(n_vocab=7, d_model=6, n=3, splits=2, ratio=2)
    with pytest.raises(InputError, match="documents of one row"):
        build(stack(part))(torch.zeros(1, 4, dtype=torch.long), documents_BT=torch.zeros(1, 4, dtype=torch.long))

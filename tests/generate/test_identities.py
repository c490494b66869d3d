"""The same numbers whichever way they are computed: at once or in pieces, alone or among others, by either kernel."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, DrawFn
from strategies import SEEDS, models, random_tokens, texts, whole
from torch import Tensor

from asbuilt import cost
from asbuilt.catalog import find
from asbuilt.nn.cache import Cache
from asbuilt.nn.model import Model
from asbuilt.spec.part import Kernel, walk

KERNELS = st.sampled_from(get_args(Kernel))
TOLERANCE = 1e-9  # of the largest logit, in float64


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE * max(1.0, float(b.abs().max())))


def new_cache(model: Model, batch: int, capacity: int) -> Cache:
    return Cache(model.spec, batch=batch, capacity=capacity, dtype=torch.float64, chunk=3)


@torch.no_grad()
def in_pieces(
    model: Model, tokens_BT: Tensor, sizes: list[int], kernel: Kernel, reach: tuple[int, ...] | None = None
) -> Tensor:
    cache = new_cache(model, tokens_BT.shape[0], tokens_BT.shape[1])
    pieces = [model(piece, cache=cache, kernel=kernel, reach=reach) for piece in tokens_BT.split(sizes, 1)]
    assert reach is None or cache.reread == 0
    assert cache.lengths == (tokens_BT.shape[1],) * tokens_BT.shape[0]
    return torch.cat(pieces, 1)


@st.composite
def model_and_tokens(draw: DrawFn, min_tokens: int = 1) -> tuple[Model, Tensor]:
    model = draw(models())
    batch, count = draw(st.integers(1, 3)), draw(st.integers(min_tokens, 24))
    return model, random_tokens(model.spec.n_vocab, batch, count, seed=draw(SEEDS))


def cut(total: int, sizes: list[int]) -> list[int]:
    """The sizes, repeated as often as it takes, as a cutting of `total`."""
    cuts: list[int] = []
    while (left := total - sum(cuts)) > 0:
        cuts.append(min(left, sizes[len(cuts) % len(sizes)]))
    return cuts


@given(model_and_tokens(), KERNELS, st.data())
@torch.no_grad()
def test_prefill_and_decode_equal_the_whole_pass(drawn: tuple[Model, Tensor], kernel: Kernel, data: DataObject) -> None:
    model, tokens = drawn
    prompt = data.draw(st.integers(1, tokens.shape[1]))
    sizes = [prompt] + [1] * (tokens.shape[1] - prompt)
    same(in_pieces(model, tokens, sizes, kernel), whole(model, tokens, sizes, kernel=kernel))


@given(model_and_tokens(), KERNELS, st.lists(st.integers(1, 9), min_size=1, max_size=5))
@torch.no_grad()
def test_chunked_prefill_equals_the_whole_pass(drawn: tuple[Model, Tensor], kernel: Kernel, sizes: list[int]) -> None:
    model, tokens = drawn
    sizes = cut(tokens.shape[1], sizes)
    same(in_pieces(model, tokens, sizes, kernel), whole(model, tokens, sizes, kernel=kernel))
    told = (tokens.shape[1],) * len(tokens)
    same(in_pieces(model, tokens, sizes, kernel, reach=told), model(tokens, kernel=kernel))


@given(model_and_tokens())
@torch.no_grad()
def test_the_kernels_agree(drawn: tuple[Model, Tensor]) -> None:
    model, tokens = drawn
    same(model(tokens, kernel="fused"), model(tokens, kernel="reference"))


@given(model_and_tokens(), KERNELS)
@torch.no_grad()
def test_last_is_the_last_position(drawn: tuple[Model, Tensor], kernel: Kernel) -> None:
    model, tokens = drawn
    same(model(tokens, last=True, kernel=kernel), model(tokens, kernel=kernel)[:, -1:])


@given(model_and_tokens(min_tokens=2), SEEDS, st.data())
@torch.no_grad()
def test_no_token_sees_what_follows(drawn: tuple[Model, Tensor], seed: int, data: DataObject) -> None:
    model, tokens = drawn
    at = data.draw(st.integers(1, tokens.shape[1] - 1))
    other = random_tokens(model.spec.n_vocab, *tokens.shape, seed=seed)
    other[:, :at] = tokens[:, :at]
    same(model(other)[:, :at], model(tokens)[:, :at])


@st.composite
def padded(draw: DrawFn, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The rows in one batch, each with padding of its own on the left and the right, and which tokens are real.

    Padding holds real token ids, so that one that is looked at changes the answer.
    """
    width = max(map(len, rows)) + draw(st.integers(0, 2))
    side = draw(st.sampled_from(["left", "right", "both"]))
    tokens = random_tokens(max(map(max, rows)) + 1, len(rows), width, seed=draw(SEEDS))
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    for b, row in enumerate(rows):
        spare = width - len(row)
        start = {"left": spare, "right": 0}.get(side, draw(st.integers(0, spare)))
        tokens[b, start : start + len(row)] = torch.tensor(row)
        valid[b, start : start + len(row)] = True
    return tokens, valid


@given(models(), st.booleans(), KERNELS, st.data())
@torch.no_grad()
def test_a_ragged_batch_equals_each_row_alone(model: Model, cached: bool, kernel: Kernel, data: DataObject) -> None:
    rows = data.draw(texts(model.spec.n_vocab))
    tokens, valid = data.draw(padded(rows))
    cache = new_cache(model, len(rows), max(map(len, rows))) if cached else None
    logits = model(tokens, cache=cache, valid_BT=valid, kernel=kernel)
    last = model(tokens, valid_BT=valid, last=True, kernel=kernel)
    for b, row in enumerate(rows):
        alone = model(torch.tensor([row]), kernel=kernel)
        same(logits[b, valid[b]], alone[0])
        same(last[b], alone[0, -1:])


@given(models(), KERNELS, st.data())
@torch.no_grad()
def test_a_ragged_batch_goes_on_as_each_row_alone(model: Model, kernel: Kernel, data: DataObject) -> None:
    """Ragged prefill, a ragged chunk and single tokens, all into one cache."""
    n_vocab = model.spec.n_vocab
    rows = data.draw(texts(n_vocab, max_tokens=12))
    more = data.draw(texts(n_vocab, rows=len(rows), max_tokens=6))
    steps = data.draw(st.integers(0, 8))
    ends = random_tokens(n_vocab, len(rows), steps, seed=data.draw(SEEDS))
    cache = new_cache(model, len(rows), max(map(len, rows)) + max(map(len, more)) + steps)
    got: list[list[Tensor]] = [[] for _ in rows]
    for texts_now in (rows, more):
        tokens, valid = data.draw(padded(texts_now))
        logits = model(tokens, cache=cache, valid_BT=valid, kernel=kernel)
        for b in range(len(rows)):
            got[b].append(logits[b, valid[b]])
    for t in range(steps):
        logits = model(ends[:, t : t + 1], cache=cache, kernel=kernel)
        for b in range(len(rows)):
            got[b].append(logits[b])
    for b, (row, rest) in enumerate(zip(rows, more, strict=True)):
        text = torch.tensor([row + rest + ends[b].tolist()])
        same(torch.cat(got[b]), whole(model, text, [len(row), len(rest)] + [1] * steps, kernel=kernel)[0])


@given(models(), KERNELS, SEEDS, st.data())
@torch.no_grad()
def test_an_answer_does_not_depend_on_the_neighbours(model: Model, kernel: Kernel, seed: int, data: DataObject) -> None:
    """Neither on their tokens nor on where their padding lies, in a prefill and in the step after it."""
    rows = data.draw(texts(model.spec.n_vocab, rows=3))
    tokens, valid = data.draw(padded(rows))
    other_tokens = random_tokens(model.spec.n_vocab, *tokens.shape, seed=seed)
    other_valid = random_tokens(2, *valid.shape, seed=seed + 1) == 1
    other_tokens[0], other_valid[0] = tokens[0], valid[0]
    answers = []
    for batch, mask in ((tokens, valid), (other_tokens, other_valid)):
        cache = new_cache(model, 3, tokens.shape[1] + 1)
        prefilled = model(batch, cache=cache, valid_BT=mask, kernel=kernel)[0, valid[0]]
        answers.append(torch.cat((prefilled, model(batch[:, :1], cache=cache, kernel=kernel)[0])))
    same(answers[0], answers[1])


@given(models(), st.integers(1, 4), st.integers(1, 12), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_the_cache_has_the_bytes_that_the_parts_say(
    model: Model, batch: int, capacity: int, dtype: torch.dtype
) -> None:
    cache = Cache(model.spec, batch=batch, capacity=capacity, dtype=dtype)
    remembered = [r for _, part in walk(model.spec) for r in part.remembers()]
    said = sum(r.size * r.tokens_kept(capacity) * r.number_bytes(dtype.itemsize) for r in remembered)
    storages = {
        tensor.data_ptr(): tensor.untyped_storage().nbytes() for x in cache.layers.values() for tensor in x.tensors
    }
    assert cache.nbytes == sum(storages.values()) == batch * said


@given(models(), st.integers(1, 5), st.integers(1, 5))
@torch.no_grad()
def test_the_cache_stays_the_same_memory(model: Model, prompt: int, steps: int) -> None:
    cache = new_cache(model, 2, prompt + steps)
    before = [tensor.data_ptr() for layer in cache.layers.values() for tensor in layer.tensors]
    model(torch.zeros(2, prompt, dtype=torch.long), cache=cache)
    for _ in range(steps):
        model(torch.zeros(2, 1, dtype=torch.long), cache=cache)
    assert before == [tensor.data_ptr() for layer in cache.layers.values() for tensor in layer.tensors]
    with pytest.raises(Exception, match="exceeds the cache"):
        model(torch.zeros(2, 1, dtype=torch.long), cache=cache)


@pytest.mark.parametrize(("name", "window", "whole"), [("gemma-3-1b", 512, 4), ("gpt-oss-20b", 128, 12)])
def test_layers_with_a_window_allocate_that_window(name: str, window: int, whole: int) -> None:
    """At 32k tokens, as billed: the few layers that see everything hold everything, and no others."""
    spec, capacity = find(name).spec(), 32_768
    cache = Cache(spec, batch=1, capacity=capacity, dtype=torch.bfloat16, device="meta")
    held = [tensor.shape[2] for layer in cache.layers.values() for tensor in layer.tensors]
    assert sorted(set(held)) == [window, capacity]
    assert held.count(capacity) == 2 * whole
    assert cache.nbytes == cost.cache(spec, capacity, "bf16").at_seq

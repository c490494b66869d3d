"""Generation gives what a plain loop over whole passes gives, for each row as if it were alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from strategies import CONTEXT, models, scripted, texts

from asbuilt.catalog import find
from asbuilt.errors import InputError
from asbuilt.generate import decode
from asbuilt.generate.decode import check_prompt, check_start, generate, require_text
from asbuilt.generate.sampling import Sampler, Sampling
from asbuilt.nn.cache import Cache
from asbuilt.nn.model import Model
from asbuilt.spec.part import Kernel

KERNELS = st.sampled_from(get_args(Kernel))
CHUNKS = st.none() | st.integers(1, 9)
WARM = st.builds(Sampling, temperature=st.sampled_from((0.0, 1.0)), top_p=st.just(0.9), seed=st.integers(0, 99))


@torch.no_grad()
def plain_loop(model: Model, prompt: list[int], count: int, sampling: Sampling, eos_ids: list[int]) -> list[int]:
    """No cache, no batch: a whole pass for every token."""
    sampler = Sampler([sampling], [prompt], model.spec.n_vocab)
    tokens: list[int] = []
    while len(tokens) < count and not (tokens and tokens[-1] in eos_ids):
        tokens += sampler(model(torch.tensor([prompt + tokens]))[:, -1]).tolist()
    return tokens


def by_row(steps: Iterator[list[int | None]], count: int) -> list[list[int]]:
    """The rows' tokens; a row that has stopped must stay so."""
    rows: list[list[int]] = [[] for _ in range(count)]
    stopped = [False] * count
    for step in steps:
        assert len(step) == count
        assert any(token is not None for token in step)
        for i, token in enumerate(step):
            assert not (stopped[i] and token is not None)
            stopped[i] = token is None
            rows[i] += [] if token is None else [token]
    return rows


@given(models(), st.integers(0, 12), CHUNKS, KERNELS, st.data())
def test_every_row_gets_what_the_plain_loop_gives_it_alone(
    model: Model, count: int, chunk: int | None, kernel: Kernel, data: DataObject
) -> None:
    n_vocab = model.spec.n_vocab
    prompts = data.draw(texts(n_vocab, max_tokens=12))
    eos_ids = data.draw(st.lists(st.integers(0, n_vocab - 1), max_size=2))
    asked = data.draw(st.lists(WARM, min_size=len(prompts), max_size=len(prompts)))
    steps = generate(
        model,
        prompts,
        max_new_tokens=count,
        sampling=asked,
        eos_ids=eos_ids,
        prefill_chunk=chunk,
        kernel=kernel,
    )
    assert by_row(steps, len(prompts)) == [
        plain_loop(model, prompt, count, one, eos_ids) for prompt, one in zip(prompts, asked, strict=True)
    ]


@given(models(), st.data())
def test_equal_lengths_are_passed_without_a_mask(model: Model, data: DataObject) -> None:
    prompts = data.draw(texts(model.spec.n_vocab))
    passes: list[bool] = []
    model.register_forward_pre_hook(
        lambda _m, _args, kwargs: passes.append(kwargs["valid_BT"] is None), with_kwargs=True
    )
    lengths = {len(prompt) for prompt in prompts}
    cache = Cache(model.spec, batch=len(prompts), capacity=max(lengths), dtype=torch.float64)
    with torch.inference_mode():
        decode.prefill(model, prompts, cache, chunk=1)
    assert passes == [position >= max(lengths) - min(lengths) for position in range(max(lengths))]
    assert cache.lengths == tuple(map(len, prompts))


@given(models(), st.integers(1, 40), st.data())
def test_the_context_is_filled_and_no_further(model: Model, over: int, data: DataObject) -> None:
    """A long row is clipped, and the short one beside it is not."""
    ids = st.integers(0, model.spec.n_vocab - 1)
    left = data.draw(st.integers(0, 4))
    long = data.draw(st.lists(ids, min_size=CONTEXT - left, max_size=CONTEXT - left))
    rows = by_row(generate(model, [long, long[:3]], max_new_tokens=left + over), 2)
    assert [len(row) for row in rows] == [left, left + over]


def tiny(n_vocab: int = 5, context: int = 16) -> Model:
    """Says p mod n_vocab after position p."""
    return scripted([p % n_vocab for p in range(context)], n_vocab)


def test_rows_stop_at_their_own_ends() -> None:
    steps = generate(tiny(), [[0], [0, 0, 0], [0, 0]], max_new_tokens=4, eos_ids=[3])
    assert list(steps) == [[0, 2, 1], [1, 3, 2], [2, None, 3], [3, None, None]]


def test_a_clipped_request_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        steps = generate(tiny(context=16), [[0] * 14], max_new_tokens=5)
    assert "max_new_tokens clipped from 5 to 2" in caplog.text
    assert len(list(steps)) == 2


def test_nothing_is_said_where_all_fits(caplog: pytest.LogCaptureFixture) -> None:
    generate(tiny(context=16), [[0] * 14], max_new_tokens=2)
    assert not caplog.text


def test_no_prompts_and_no_tokens_give_no_steps() -> None:
    assert list(generate(tiny(), [], max_new_tokens=3)) == []
    assert list(generate(tiny(), [[1], [2]], max_new_tokens=0)) == []


def test_the_caller_is_not_left_in_inference_mode() -> None:
    for _ in generate(tiny(), [[1]], max_new_tokens=3):
        assert not torch.is_inference_mode_enabled()


@given(st.integers(2, 5), st.integers(1, 3))
def test_rows_that_share_a_sampling_draw_alike(rows: int, seed: int) -> None:
    model = tiny(n_vocab=16)
    warm = Sampling(temperature=5.0, seed=seed)
    shared = by_row(generate(model, [[0]] * rows, max_new_tokens=8, sampling=warm), rows)
    assert shared == [shared[0]] * rows
    own = [replace(warm, seed=seed + i) for i in range(rows)]
    several = by_row(generate(model, [[0]] * rows, max_new_tokens=8, sampling=own), rows)
    assert several[0] == shared[0]
    assert any(row != several[0] for row in several)


BAD: list[tuple[str, Callable[[Model], object]]] = [
    ("prompt", lambda m: generate(m, [[0], []], max_new_tokens=1)),
    ("prompt", lambda m: generate(m, [[0] * 17], max_new_tokens=0)),
    ("prompt", lambda m: generate(m, [[0, 5]], max_new_tokens=1)),
    ("prompt", lambda m: generate(m, [[-1]], max_new_tokens=1)),
    ("prompt", lambda m: generate(m, [["a"]], max_new_tokens=1)),  # type: ignore[list-item]
    ("max_new_tokens", lambda m: generate(m, [[0]], max_new_tokens=-1)),
    ("max_new_tokens", lambda m: generate(m, [[0]], max_new_tokens=1.5)),  # type: ignore[arg-type]
    ("prefill_chunk", lambda m: generate(m, [[0]], max_new_tokens=1, prefill_chunk=0)),
    ("kernel", lambda m: generate(m, [[0]], max_new_tokens=1, kernel="flash")),  # type: ignore[arg-type]
    ("sampling", lambda m: generate(m, [[0]], max_new_tokens=1, sampling=[])),
]


@pytest.mark.parametrize(("field", "call"), BAD)
def test_what_cannot_be_is_refused_before_anything_runs(field: str, call: Callable[[Model], object]) -> None:
    with pytest.raises(InputError) as caught:
        call(tiny())
    assert caught.value.field == field
    assert caught.value.allowed


def test_what_continues_no_text_is_told_why() -> None:
    """A masked language model has a head, a stack without one decodes: neither says which token comes next."""
    masked = find("bert-base-uncased").spec()
    with pytest.raises(InputError, match="its attention is bidirectional"):
        check_prompt(masked, [1, 2])
    with pytest.raises(InputError, match="it has no head"):
        check_prompt(find("llama-2-7b").spec().changed(head=None), [1, 2])
    for name, made in (("vit-base-patch16-224", "labels"), ("clip-vit-base-patch32", "vectors")):
        with pytest.raises(InputError, match=f"predicts {made}, not the next token"):
            require_text(find(name).spec())
    require_text(find("llama-2-7b").spec())
    with pytest.raises(InputError, match="has no encoder"):
        check_start(find("llama-2-7b").spec(), [1])

"""Recorded decode steps: a record of one step, run again for later tokens, equals computing them.

A trace of PyTorch's operations stands for a CUDA graph: all that Python does, and every number that is not in a tensor,
is fixed when it is made.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_parts import EXPERTS, MODEL
from strategies import SEEDS, models, random_tokens
from torch import Tensor

from asbuilt import InputError, build, decoder
from asbuilt.generate import replay
from asbuilt.generate.decode import generate, prefill
from asbuilt.generate.draft import PromptLookup
from asbuilt.generate.replay import Decode, Replay, Replayed, cannot, places, traced
from asbuilt.generate.sampling import Sampling
from asbuilt.nn.cache import Cache
from asbuilt.nn.model import Model
from asbuilt.spec import Block, Branch

# What a graph cannot capture: a number that Python reads, a shape that depends on one, numbers copied to the device.
OUTSIDE = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "unique")


@pytest.fixture(autouse=True, scope="module")
def untold() -> Iterator[None]:
    """PyTorch logs every operation that it traces, to whoever listens to all."""
    log = logging.getLogger("torch.__trace")
    log.disabled = True
    yield
    log.disabled = False


def recorded(decode: Decode, tokens_B1: Tensor, positions_B1: Tensor) -> Callable[[], Tensor]:
    made = traced(decode, tokens_B1, positions_B1)
    for node in made.graph.nodes:
        assert not any(word in str(node.target) for word in OUTSIDE), node
    return lambda: made(tokens_B1, positions_B1)


def caches(model: Model, kv: str | None, prompts: list[list[int]], capacity: int) -> list[Cache]:
    """Two of the same prompts."""
    made = [
        Cache(model.spec, batch=len(prompts), capacity=capacity, dtype=model.dtype, device=model.device, kv=kv)
        for _ in range(2)
    ]
    for cache in made:
        prefill(model, prompts, cache)
    return made


@settings(max_examples=15)
@given(models(), SEEDS, st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 9), st.integers(1, 5))
@torch.no_grad()
def test_a_record_is_the_step(model: Model, seed: int, lengths: list[int], count: int, fewest: int) -> None:
    assume(not cannot(model.spec))
    n_vocab, longest = model.spec.n_vocab, max(lengths)
    rows = random_tokens(n_vocab, len(lengths), longest + count, seed=seed)
    prompts = [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
    ours, theirs = caches(model, None, prompts, longest + count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "FEWEST", fewest)
        step = Replayed(model, ours, recorded, "fused")
        for at in range(longest, longest + count):
            wanted = model(rows[:, at : at + 1], cache=theirs, last=True)[:, -1]
            found = step(rows[:, at : at + 1])
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9 * max(1.0, float(wanted.abs().max())))
            assert ours.lengths == theirs.lengths


def small(**changes: object) -> Model:
    sizes = {"d_model": 12, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "n_vocab": 50, "max_positions": 64}
    return build(decoder(**(sizes | changes)), seed=random.randrange(1000))  # type: ignore[arg-type]


@pytest.mark.parametrize("kv", ["bf16", "fp8", "int8:head", "int4:head"])
@torch.no_grad()
def test_records_write_and_read_every_format_of_caches(kv: str) -> None:
    model = small()
    ours, theirs = caches(model, kv, [[3, 1], [4, 1, 5]], 12)
    step = Replayed(model, ours, recorded, "fused")
    for token in range(6, 12):
        tokens_21 = torch.tensor([[token], [2 * token]])
        wanted = model(tokens_21, cache=theirs, last=True)[:, -1]
        torch.testing.assert_close(step(tokens_21), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fewest", [1, 4, 256])
def test_texts_are_the_same_when_rows_stop_at_different_times(fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = small(), [[3, 1, 4], [1, 5], [9, 2, 6, 5]]
    asked = {"max_new_tokens": 20, "sampling": Sampling(temperature=1.5, seed=random.randrange(99))}
    plain = [*generate(model, prompts, **asked)]
    ends = [row[at] for row, at in zip(zip(*plain, strict=True), (4, 9, 19), strict=True)]
    made: list[int] = []

    def record(decode: Decode, tokens_B1: Tensor, positions_B1: Tensor) -> Callable[[], Tensor]:
        made.append(len(tokens_B1))
        return recorded(decode, tokens_B1, positions_B1)

    monkeypatch.setattr(Replay, "record", lambda _: record)
    monkeypatch.setattr(replay, "FEWEST", fewest)
    found = [*generate(model, prompts, **asked, eos_ids=ends, replay=Replay(compiled=True))]
    assert found == [*generate(model, prompts, **asked, eos_ids=ends)]
    assert made == sorted(made, reverse=True)
    if fewest == 256:
        assert len(made) == len(set(made))  # once for each number of rows


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_a_record_reads_at_most_a_quarter_more_places(length: int, capacity: int) -> None:
    if length > capacity:
        return
    found = places(length, capacity)
    assert length <= found <= capacity
    assert found <= max(replay.FEWEST, length + max(replay.FEWEST, length // 4))
    assert len({places(n, capacity) for n in range(1, capacity + 1)}) <= 20


def test_what_cannot_be_recorded_is_refused() -> None:
    experts = replace(EXPERTS, d_model=11, router=replace(EXPERTS.router, d_model=11))
    mixture = build(replace(MODEL, blocks=(Block(branches=(Branch(name="ffn", body=experts),)),)), seed=0)
    with pytest.raises(InputError, match=r"^cuda_graphs: graphs are CUDA's \(got 'cpu'"):
        next(generate(small(), [[1]], max_new_tokens=2, replay=Replay(graphs=True)))
    with pytest.raises(InputError, match=r"^compile: drafts are verified in passes"):
        next(generate(small(), [[1]], max_new_tokens=2, replay=Replay(compiled=True), draft=PromptLookup()))
    with pytest.raises(InputError, match=r"^compile: .* not recorded: which experts run at .* depends on the tokens"):
        next(generate(mixture, [[1]], max_new_tokens=2, replay=Replay(compiled=True)))

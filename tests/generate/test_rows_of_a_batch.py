"""What belongs to a row stays with it when others leave: its source and which of it is real, its cache, its sampler."""

from __future__ import annotations

import pytest
import torch
from strategies import randomised, scripted

from asbuilt.generate.decode import generate, prefill
from asbuilt.generate.sampling import Sampler, Sampling
from asbuilt.nn.cache import Cache
from asbuilt.nn.model import Model
from asbuilt.spec import (
    Attention,
    Block,
    Branch,
    CrossAttention,
    EncoderDecoder,
    Head,
    LearnedPositions,
    LongRope,
    Rotary,
    TextEncoder,
    TokenEmbedding,
)

D = 6


def translator() -> Model:
    """Its rotary factors change at the third token, so that texts are read again, beside sources that stay."""
    scaling = LongRope(short_factors=(1.0,), long_factors=(4.0,), original_context=2, attention_factor=1.0)

    def attention(causal: bool) -> Branch:
        rotary = Rotary(d_rotary=2, scaling=scaling) if causal else None
        body = Attention(d_model=D, n_heads=2, n_kv_heads=1, d_head=3, causal=causal, positions=rotary)
        return Branch(name="attention", body=body)

    positions = LearnedPositions(n_positions=24, d_model=D)
    reads = TextEncoder(
        embedding=TokenEmbedding(n_vocab=19, d_model=D),
        positions=positions,
        max_positions=24,
        blocks=(Block(branches=(attention(False),)),),
    )
    cross = Branch(name="cross", body=CrossAttention(d_model=D, d_source=D, n_heads=2, d_head=3))
    spec = EncoderDecoder(
        embedding=TokenEmbedding(n_vocab=19, d_model=D),
        positions=positions,
        max_positions=24,
        encoder=reads,
        blocks=(Block(branches=(attention(True), cross)),),
        head=Head(d_model=D, n_vocab=19),
    )
    return randomised(spec, 5)


def alone(model: Model, source: list[int], count: int, eos: int) -> list[int]:
    """Whole passes of one row, its source unpadded."""
    text: list[int] = [0]
    while len(text) <= count and (len(text) == 1 or text[-1] != eos):
        with torch.no_grad():
            logits = model(torch.tensor([text]), source_BS=torch.tensor([source]))
        text.append(int(logits[0, -1].argmax()))
    return text[1:]


def test_sources_of_different_lengths_stay_with_their_rows() -> None:
    """Rows stop one after another, so that the masks of those that go on move up."""
    model = translator()
    sources = [[*range(1, n)] for n in (3, 12, 6, 19, 9)]
    found = {eos: [alone(model, source, 9, eos) for source in sources] for eos in range(19)}
    # an end at which some rows stop early, at different steps, and the last goes on
    eos = max(found, key=lambda e: len({len(row) for row in found[e]}))
    assert len({len(row) for row in found[eos]}) > 1
    steps = list(generate(model, sources, max_new_tokens=9, start=[0], eos_ids=[eos]))
    rows = [[step[b] for step in steps if step[b] is not None] for b in range(len(sources))]
    assert rows == found[eos]


@torch.no_grad()
@pytest.mark.parametrize("chosen", [[2], [0, 2], [2, 0], [1]])
def test_a_cache_that_drops_rows_goes_on_as_if_they_had_been_alone(chosen: list[int]) -> None:
    model = translator()
    sources, valid = torch.arange(12).repeat(3, 1), torch.arange(12) < torch.tensor([[4], [12], [7]])
    tokens, extra = torch.tensor([[0, 3], [0, 5], [0, 7]]), torch.tensor([[2], [4], [6]])
    cache = Cache(model.spec, batch=3, capacity=3, source=12, dtype=torch.float64)
    model(tokens, source_BS=sources, source_valid_BS=valid, cache=cache)
    cache.keep(chosen)
    assert cache.lengths == (2,) * len(chosen)
    have = model(extra[chosen], cache=cache)
    for place, row in enumerate(chosen):
        text = torch.cat((tokens[row], extra[row]))[None]
        source = sources[row : row + 1, : int(valid[row].sum())]
        want = model(text, source_BS=source)[:, -1:]
        torch.testing.assert_close(have[place : place + 1], want)


def test_samplers_keep_what_each_row_has_said_and_its_random_numbers() -> None:
    """Row 1 goes on alone: its penalty knows its own prompt, and its draws are those it would have had."""
    requests = [Sampling(temperature=1.0, seed=1), Sampling(temperature=2.0, seed=2, repetition_penalty=5.0)]
    logits = torch.linspace(0.0, 2.0, 9).repeat(2, 1)
    both, one = Sampler(requests, [[1], [8, 7]], 9), Sampler(requests[1:], [[8, 7]], 9)
    said = [int(both(logits)[1]), int(one(logits[1:])[0])]
    both.keep([1])
    for _ in range(20):
        said += [int(both(logits[1:])[0]), int(one(logits[1:])[0])]
    assert said[::2] == said[1::2]


def test_a_penalty_counts_from_the_prompt_on() -> None:
    """Logits 3.0 for the prompt's token and 2.0 for another: penalised by 2 the first is 1.5, and so is its like."""
    sampler = Sampler([Sampling(repetition_penalty=2.0)] * 2, [[0], [1]], 3)
    logits = torch.tensor([[3.0, 2.0, 1.2], [3.0, 2.0, 1.2]])
    assert sampler(logits).tolist() == [1, 0]  # 1.5 < 2; 3 > 1
    assert sampler(logits).tolist() == [0, 0]  # both said: 1.5 > 1.2 > 1; 1.5 > 1.2
    sampler.keep([1])
    assert sampler(torch.tensor([[2.0, 2.0, 1.2]])).tolist() == [2]  # 1 and 1 beside 1.2


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 6, 7, None])
@torch.no_grad()
def test_chunks_end_where_they_should(chunk: int | None) -> None:
    """Six tokens, and with another prompt of four: ceil(6 / chunk) passes, the last tokens in the last."""
    model = scripted([1, 2, 3, 4, 5, 6, 7, 0], 8)
    seen: list[tuple[int, ...]] = []
    model.get_submodule("blocks.0").register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    cache = Cache(model.spec, batch=2, capacity=6, dtype=torch.float64)
    logits = prefill(model, [[0] * 6, [0] * 4], cache, chunk=chunk)
    size = chunk or 6
    assert [shape[1] for shape in seen] == [size] * (6 // size) + ([6 % size] if 6 % size else [])
    assert cache.lengths == (6, 4)
    assert logits.argmax(-1).tolist() == [6, 4]

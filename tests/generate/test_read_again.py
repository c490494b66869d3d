"""Rotary factors chosen by length: what is read again, when, in which pieces, at what cost, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import strategies
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from asbuilt import cost
from asbuilt.generate.decode import generate, notes, prefill
from asbuilt.nn import build
from asbuilt.nn.cache import Cache
from asbuilt.spec import (
    MLP,
    Attention,
    Block,
    Branch,
    DynamicNTK,
    Head,
    ImageEncoder,
    LatentAttention,
    LongRope,
    MLPProjector,
    Model,
    Pass,
    PatchEmbedding,
    Rotary,
    Scaling,
    TokenEmbedding,
    TypeEmbedding,
    Vision,
)
from asbuilt.spec.positions import read_again, rotaries_by_length

ORIGINAL, WIDTH = 10, 8
LONG = LongRope(short_factors=(1.0, 2.0), long_factors=(3.0, 7.0), original_context=ORIGINAL, attention_factor=1.2)
GROWING = DynamicNTK(factor=3.0, original_context=ORIGINAL)


def spec(scaling: Scaling = LONG, mixer: str = "attention", causal: bool = True) -> Model:
    """Two layers, so that the second one's keys depend on what the first one made of the angles."""
    rotary = Rotary(d_rotary=4, theta=50.0, scaling=scaling)
    body = Attention(
        d_model=WIDTH,
        n_heads=2,
        n_kv_heads=1,
        d_head=6,
        positions=rotary,
        causal=causal,
        window=4 if mixer == "window" else None,
    )
    if mixer == "latent":
        body = LatentAttention(d_model=WIDTH, n_heads=2, kv_rank=5, d_nope=3, d_rope=4, d_value=3, positions=rotary)
    ffn = MLP(d_model=WIDTH, d_ff=9, activation="relu")
    block = Block(branches=(Branch(name="attention", body=body), Branch(name="ffn", body=ffn)))
    return Model(
        embedding=TokenEmbedding(n_vocab=31, d_model=WIDTH),
        blocks=(block, block),
        head=Head(d_model=WIDTH, n_vocab=31),
        max_positions=40,
    )


def greedy(model: strategies.Model, prompt: list[int], count: int) -> list[int]:
    """A whole pass for each token."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


MIXERS = pytest.mark.parametrize("mixer", ["attention", "window", "latent"])
SCALINGS = pytest.mark.parametrize("scaling", [LONG, GROWING])


@MIXERS
@SCALINGS
@pytest.mark.parametrize("chunk", [None, 1, 4])
@torch.no_grad()
def test_rows_that_cross_and_rows_that_do_not(scaling: Scaling, mixer: str, chunk: int | None) -> None:
    """Some never get past the original context, some cross it at different steps, one begins beyond it."""
    model = strategies.randomised(spec(scaling, mixer), 3)
    prompts = [[*range(1, n + 1)] for n in (2, 6, 9, ORIGINAL, ORIGINAL + 1, 17)]
    rows = zip(*generate(model, prompts, max_new_tokens=7, prefill_chunk=chunk), strict=True)
    assert [list(row) for row in rows] == [greedy(model, prompt, 7) for prompt in prompts]


@torch.no_grad()
def test_the_factors_are_the_rows_own() -> None:
    """By the angles: in a batch the short row is turned by the short list, whoever stands beside it."""
    model = strategies.randomised(spec(), 1)
    tokens, valid = torch.arange(12).repeat(2, 1), torch.ones(2, 12, dtype=torch.bool)
    valid[0, :7] = False
    short = model(tokens[:1, 7:])
    torch.testing.assert_close(model(tokens, valid_BT=valid)[0, 7:], short[0])
    other = replace(LONG, long_factors=LONG.short_factors)
    for scaling, same in ((other, False), (replace(LONG, short_factors=LONG.long_factors), True)):
        changed = strategies.randomised(spec(scaling), 1)
        assert torch.allclose(changed(tokens[1:]), model(tokens[1:])) == same


def reads(model: strategies.Model) -> list[int]:
    """Of every pass through the first block how many tokens it had."""
    seen: list[int] = []
    model.get_submodule("blocks.0").register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    return seen


@torch.no_grad()
@pytest.mark.parametrize(
    ("scaling", "chunk", "want"),
    [
        (LONG, None, [8, 1, 1, 10, 1, 1, 1]),
        (LONG, 4, [4, 4, 1, 1, 4, 4, 2, 1, 1, 1]),
        (GROWING, None, [8, 1, 1, 10, 1, 11, 1, 12, 1]),
    ],
)
def test_what_is_read_again_and_in_which_pieces(scaling: Scaling, chunk: int | None, want: list[int]) -> None:
    """Eight tokens and six new ones, the last of which is never read; the original context holds ten."""
    model = strategies.randomised(spec(scaling), 0)
    seen = reads(model)
    assert len(list(generate(model, [[1] * 8], max_new_tokens=6, prefill_chunk=chunk))) == 6
    assert seen == want


@torch.no_grad()
def test_a_long_prompt_in_pieces_is_read_once() -> None:
    """Its length is known beforehand, so every piece is turned as the whole."""
    model = strategies.randomised(spec(), 0)
    cache = Cache(model.spec, batch=1, capacity=20, dtype=torch.float64)
    prompt = [*range(20)]
    logits = prefill(model, [prompt], cache, chunk=3)
    torch.testing.assert_close(logits, model(torch.tensor([prompt]))[:, -1])
    assert cache.reread == 0


@torch.no_grad()
def test_a_cache_that_is_set_back_gives_the_shorter_text() -> None:
    """Twelve tokens by the long list, back to five, and one more: the short list holds again."""
    model = strategies.randomised(spec(), 0)
    cache = Cache(model.spec, batch=1, capacity=20, dtype=torch.float64)
    tokens = torch.arange(12)[None]
    model(tokens, cache=cache)
    cache.lengths = (5,)
    torch.testing.assert_close(model(tokens[:, 5:6], cache=cache), model(tokens[:, :6])[:, 5:])
    assert cache.reread == 5


@torch.no_grad()
@pytest.mark.parametrize("kept", [[1, 2], [2, 1], [2], [0, 2]])
def test_rows_that_stay_keep_their_texts_and_what_they_were_cached_under(kept: list[int]) -> None:
    """Texts of 4, 12 and 10 tokens in one batch; rows leave, and the next token takes the last past the original."""
    model = strategies.randomised(spec(), 0)
    texts = [[*range(start, start + n)] for start, n in ((0, 4), (5, 12), (11, 10))]
    cache = Cache(model.spec, batch=3, capacity=13, dtype=torch.float64)
    prefill(model, texts, cache)
    cache.keep(kept)
    have = model(torch.full((len(kept), 1), 3), cache=cache)
    for place, row in enumerate(kept):
        torch.testing.assert_close(have[place, -1], model(torch.tensor([[*texts[row], 3]]))[0, -1])
    # of texts of one batch each has the factors of its own length: only that of ten changes them
    assert cache.reread == 10


@SCALINGS
@MIXERS
def test_the_cost_is_the_declared_one_and_a_prefill_of_the_past(scaling: Scaling, mixer: str) -> None:
    """FLOPs of the step that crosses as counted; the head is not run again (2 * width * vocabulary)."""
    described = spec(scaling, mixer)
    model = build(described, device="meta")
    cache = Cache(described, batch=2, capacity=ORIGINAL + 1, dtype=torch.float32, device="meta")
    cache.lengths = (ORIGINAL,) * 2
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 1, dtype=torch.long, device="meta"), cache=cache, kernel="reference")
    step = cost.flops(described, Pass(tokens=1, past=ORIGINAL, batch=2)).forward
    past = (
        cost.flops(
            described, Pass(tokens=read_again(rotaries_by_length(described), ORIGINAL, ORIGINAL + 1), logits="last")
        ).forward
        - 2 * WIDTH * 31
    )
    assert counter.get_total_flops() == step + 2 * past
    assert cache.reread == 2 * ORIGINAL
    assert cache.nbytes == 2 * cost.cache(described, ORIGINAL + 1, "fp32").at_seq


def test_when_it_is_read_again() -> None:
    long, growing = (rotaries_by_length(spec(scaling)) for scaling in (LONG, GROWING))
    assert [read_again(long, past, past + 1) for past in (8, 9, 10, 11)] == [0, 0, 10, 0]
    assert [read_again(growing, past, past + 1) for past in (8, 9, 10, 11)] == [0, 0, 10, 11]
    assert read_again(long, 4, 30) == 4
    assert rotaries_by_length(spec(causal=False)) == ()  # remembers nothing


def test_it_is_said_beforehand() -> None:
    long, growing = spec(LONG), spec(GROWING)
    assert notes(long, 8, 3) == notes(growing, 8, 3) == []  # the eleventh token is said, not read
    assert notes(long, 11, 9) == notes(growing, 11, 1) == []
    (said,) = notes(long, 8, 4)
    assert said.startswith("beyond 10 tokens")
    for prompt, start in ((8, 10), (15, 15)):
        (said,) = notes(growing, prompt, 4)
        assert said.startswith(f"dynamic NTK: beyond {start} tokens every new token")
    assert len(notes(long, 8, 50)) == 2  # clipped too


@torch.no_grad()
def test_types_are_read_again_too() -> None:
    described = spec().changed(types=TypeEmbedding(n_types=3, d_model=WIDTH))
    model = strategies.randomised(described, 2)
    tokens = torch.arange(14).repeat(2, 1)
    types = tokens % 3
    cache = Cache(described, batch=2, capacity=14, dtype=torch.float64, chunk=3)
    model(tokens[:, :8], types_BT=types[:, :8], cache=cache)
    for end in range(9, 15):
        have = model(tokens[:, end - 1 : end], types_BT=types[:, end - 1 : end], cache=cache)
        want: Tensor = model(tokens[:, :end], types_BT=types[:, :end])
        torch.testing.assert_close(have, want[:, -1:])
    assert cache.reread > 0


@torch.no_grad()
def test_images_are_read_again_too() -> None:
    """Eight tokens of which four are an image's, then single ones past the original context."""
    tower = ImageEncoder(
        embedding=PatchEmbedding(image_size=4, patch_size=2, channels=1, d_model=3, bias=True),
        blocks=(Block(branches=(Branch(name="ffn", body=MLP(d_model=3, d_ff=3, activation="relu")),)),),
        max_positions=4,
    )
    projector = MLPProjector(widths=(3, WIDTH), activation="gelu", bias=True)
    for both_ways in (False, True):
        vision = Vision(tower=tower, projector=projector, placeholder=30, both_ways=both_ways)
        described = spec().changed(vision=vision)
        model = strategies.randomised(described, 2)
        tokens = torch.arange(14).repeat(2, 1)
        tokens[0, 1:5] = tokens[1, 3:7] = 30
        images = torch.linspace(-1, 1, 32, dtype=torch.float64).view(2, 1, 4, 4)
        cache = Cache(described, batch=2, capacity=14, dtype=torch.float64, chunk=3)
        model(tokens[:, :8], images=images, cache=cache)
        for end in range(9, 15):
            have = model(tokens[:, end - 1 : end], cache=cache)
            want: Tensor = model(tokens[:, :end], images=images)
            torch.testing.assert_close(have, want[:, -1:])


@torch.no_grad()
def test_vectors_of_a_ragged_batch_are_each_texts_own() -> None:
    """As `embed` reads them, padded on the right: one within the original context, one beyond it."""
    for scaling in (LONG, GROWING):
        model = strategies.randomised(spec(scaling, causal=False), 0)
        tokens = torch.arange(14).repeat(2, 1)
        valid = torch.arange(14) < torch.tensor([[6], [14]])
        states = model.states(tokens, valid_BT=valid)
        torch.testing.assert_close(states[0, :6], model.states(tokens[:1, :6])[0])
        torch.testing.assert_close(states[1], model.states(tokens[1:])[0])

"""Images in tiles, read by cross-attention: absent tiles, texts alone, what is refused by name, and generation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import strategies
import torch
from hypothesis import given, settings
from small_grids import seer
from small_tiles import PLACE, tiled_seer, tower

from asbuilt.errors import InputError
from asbuilt.generate.decode import generate
from asbuilt.generate.sampling import Sampling
from asbuilt.generate.seeing import tokens_per_image, with_placeholders
from asbuilt.nn import build
from asbuilt.nn.cache import Cache
from asbuilt.nn.tiles import Tiles
from asbuilt.spec import (
    CrossAttention,
    LanguageModel,
    Pass,
    RMSNorm,
    TiedHead,
    TiledVision,
    TokenEmbedding,
    VisionLanguageModel,
)

SPEC = tiled_seer()
IDS = torch.tensor([[3, 4, PLACE, 5, 6, 7], [PLACE, 1, 2, 3, 4, 5]])


def images(*tilings: tuple[int, int], n_tiles: int = 3) -> Tiles:
    """Images of normal numbers."""
    values = torch.randn(len(tilings), n_tiles, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    return Tiles(values.double(), tilings)


@given(strategies.tiled_seers(), strategies.SEEDS)
@settings(max_examples=10)
@torch.no_grad()
def test_a_text_without_an_image_is_the_language_models_own(spec: VisionLanguageModel, seed: int) -> None:
    whole, text = strategies.randomised(spec, seed), build(spec.text, dtype=torch.float64, seed=None)
    assert type(spec.text) is LanguageModel
    text.load_state_dict({k: v for k, v in whole.state_dict().items() if not k.startswith("vision.")})
    ids = torch.randint(spec.n_vocab, (2, 5), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(whole(ids), text(ids))


@torch.no_grad()
def test_absent_tiles_are_read_as_zeros() -> None:
    """What stands in them changes nothing, nor how many of them are given."""
    model = strategies.randomised(SPEC, 1)
    seen = images((1, 2), (1, 1))
    want = model(IDS, images=seen)
    other = seen.values.clone()
    other[0, 2], other[1, 1:] = 9.0, -9.0
    assert torch.equal(model(IDS, images=Tiles(other, seen.tilings)), want)
    torch.testing.assert_close(model(IDS, images=Tiles(seen.values[:, :2], seen.tilings)), want)
    assert not torch.allclose(model(IDS, images=Tiles(seen.values, ((2, 1), (1, 1))))[0], want[0])


@torch.no_grad()
def test_one_square_image_is_one_tile() -> None:
    model, seen = strategies.randomised(SPEC, 1), images((1, 1), (1, 1))
    want = model(IDS, images=seen)
    for pixels in (seen.values[:, 0], seen.values[:, :1]):
        assert torch.equal(model(IDS, images=pixels), want)


@torch.no_grad()
def test_padding_attends_to_all_but_padding() -> None:
    """Worked out by hand: token by token, who attends to whom."""
    built = build(tower(), dtype=torch.float64)
    _, step = built.opened(images((1, 2)), "fused")  # type: ignore[operator]
    assert step.padding_BT.tolist() == [[False] * 5 + [True] * 3 + [False] * 5 + [True] * 3 + [True] * 8]
    assert step.tilings_N.tolist() == [2]


@torch.no_grad()
def test_rows_of_a_cache_and_further_passes() -> None:
    model, seen = strategies.randomised(SPEC, 2), images((1, 2), (3, 1))
    whole = model(IDS, images=seen)
    cache = Cache(SPEC, batch=2, capacity=6, dtype=torch.float64)
    model(IDS[:, :4], images=seen, cache=cache)
    cache.keep([1])
    torch.testing.assert_close(model(IDS[1:, 4:], cache=cache), whole[1:, 4:])
    with pytest.raises(InputError, match="first pass"):
        model(IDS[1:, :1], images=images((1, 1)), cache=_after(model))


def _after(model: Any) -> Cache:  # noqa: ANN401  # a built model
    """A cache of one row that holds a text without an image."""
    cache = Cache(SPEC, batch=1, capacity=6, dtype=torch.float64)
    model(IDS[:1, :1], cache=cache)
    return cache


@pytest.mark.parametrize(
    ("ids", "given", "named"),
    [
        (IDS, images((1, 2)), "placeholders"),
        (IDS[:, 1:], images((1, 2), (1, 1)), "placeholders"),
        (torch.cat((IDS, IDS), 1), images((1, 2), (1, 1)), "placeholders"),
        (torch.cat((IDS, IDS), 1), images((1, 2), (1, 1), (1, 1), (1, 1)), "placeholders"),
        (IDS, images((1, 2), (2, 2)), "tiling"),
        (IDS, images((1, 2), (1, 1), n_tiles=4), "image size"),
        (IDS, images((1, 2), (1, 1), n_tiles=1), "image size"),
        (IDS, Tiles(images((1, 1)).values, ((1, 1), (1, 1))), "image size"),
        (IDS, torch.zeros(2, 2, 5, 4), "image size"),
    ],
    ids=range(9),
)
def test_wrong_images_are_refused_by_name(ids: torch.Tensor, given: Any, named: str) -> None:  # noqa: ANN401
    with pytest.raises(InputError, match=named):
        strategies.randomised(SPEC, 1)(ids, images=given)


def test_specs_that_do_not_fit_are_refused() -> None:
    vision = SPEC.vision
    assert isinstance(vision, TiledVision)
    for change in ({"taps": (3, 0)}, {"taps": (0,)}, {"keep_class": False}, {"both_ways": True}, {"layers": 1}):
        with pytest.raises(InputError, match=next(iter(change)) if "taps" not in change else "taps|projector"):
            replace(vision, **change)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="tilings"):
        tower(tilings=((1, 1), (2, 2)))
    with pytest.raises(InputError, match="d_source"):
        replace(SPEC.text, blocks=SPEC.blocks[:1])
    with pytest.raises(InputError, match="n_source"):
        SPEC.replace_where(CrossAttention, n_source=4)
    with pytest.raises(InputError, match="n_kv_heads"):
        CrossAttention(d_model=4, d_source=4, n_heads=3, d_head=2, n_kv_heads=2)
    with pytest.raises(InputError, match="q_norm"):
        CrossAttention(d_model=4, d_source=4, n_heads=3, d_head=2, q_norm=RMSNorm(d=4))
    plain = SPEC.text.edit("blocks.0.ffn", after_source=True).blocks[0]
    with pytest.raises(InputError, match="after_source"):
        LanguageModel(embedding=TokenEmbedding(n_vocab=20, d_model=8), blocks=(plain,), head=SPEC.head, max_positions=8)
    with pytest.raises(InputError, match="head"):
        replace(SPEC.text, head=TiedHead(d_model=8, n_vocab=20))
    with pytest.raises(InputError, match="images"):
        SPEC.child_run("vision", SPEC._own(Pass(tokens=4, images=2)))


def test_extra_rows_are_divided_as_the_table() -> None:
    part = TokenEmbedding(n_vocab=128256, d_model=8, extra=8)
    assert part.shard(8).holds()["weight"].shape[0] == 128264 // 8
    assert part.shard(8).n_vocab == 128256 // 8
    assert TokenEmbedding(n_vocab=100, d_model=8, extra=8).shard(3).n_rows == 64


def test_generation_reads_the_image_beside_a_placeholder_beyond_the_vocabulary() -> None:
    model, seen = strategies.randomised(SPEC, 3), images((3, 1))
    assert tokens_per_image(SPEC, seen) == [1]
    prompt = with_placeholders(SPEC, [3, 4, 5], seen, after=1, around=([], []))
    assert prompt == [3, PLACE, 4, 5]
    penalised = Sampling(repetition_penalty=1.5)
    for sampling in (Sampling(), penalised):
        steps = generate(model, [prompt], max_new_tokens=3, images=seen, sampling=sampling, prefill_chunk=2)
        found = [token for (token,) in steps]
        text = torch.tensor([prompt + found[:-1]])
        with torch.no_grad():
            whole = model(text, images=seen)[0, 3:].argmax(-1).tolist()
        assert sampling is penalised or whole == found
    with pytest.raises(InputError, match="another kind"):
        tokens_per_image(seer(), seen)

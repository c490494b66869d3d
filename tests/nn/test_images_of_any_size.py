"""Images of any size in texts: patches or pixels, padding, chunks, and what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import strategies
import torch
from small_grids import PLACE, TURNS, seer

from asbuilt.errors import InputError
from asbuilt.nn.cache import Cache
from asbuilt.nn.image_grid import Patches
from asbuilt.nn.vision_language_model import VisionLanguageModel
from asbuilt.spec import AxialPositions, GridVision, Plane, PooledProjector, RMSNorm, Rotary, Sections

GRIDS = ((1, 6, 4), (2, 4, 10), (1, 6, 4))
ROW = [1, *[PLACE] * 6, 5, 5, *[PLACE] * 20, 7, *[PLACE] * 6, 2, 1]


def built(axes: Sections | None = TURNS) -> VisionLanguageModel:
    model = strategies.randomised(seer(axes), 1)
    assert isinstance(model, VisionLanguageModel)
    return model


def averaged(axes: Sections | None = None) -> VisionLanguageModel:
    """One with positions by column and row, whose squares are averaged, and whose images' tokens see each other."""
    spec = seer(axes)
    assert isinstance(spec.vision, GridVision)
    tower = replace(spec.vision.tower, positions=AxialPositions(n_entries=10, d_model=8))
    means = PooledProjector(d_in=8, d_out=16, n_side=8, pool=2, norm=RMSNorm(d=8))
    vision = replace(spec.vision, tower=tower, projector=means, taps=(), mergers=(), both_ways=True)
    model = strategies.randomised(replace(spec, vision=vision), 1)
    assert isinstance(model, VisionLanguageModel)
    return model


MODELS = {"sections": built, "averaged": averaged, "both": lambda: averaged(TURNS)}


def patches(*grids: tuple[int, int, int]) -> Patches:
    n = sum(t * h * w for t, h, w in grids)
    return Patches(torch.randn(n, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64), grids)


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_pieces_after_images_are_the_whole_pass(kind: str) -> None:
    model, images, row = MODELS[kind](), patches(*GRIDS), torch.tensor([ROW])
    want = model(row, images=images)
    cache = Cache(model.spec, batch=1, capacity=64, dtype=torch.float64)
    first = Patches(images.values[:24], GRIDS[:1])
    rest = Patches(images.values[24:], GRIDS[1:])
    cuts = [(0, 8, first), (8, 36, rest), (36, 37, None), (37, len(ROW), None)]
    pieces = [model(row[:, a:b], images=given, cache=cache) for a, b, given in cuts]
    torch.testing.assert_close(torch.cat(pieces, 1), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_rows_of_a_padded_batch_are_rows_alone(kind: str) -> None:
    model, images, n = MODELS[kind](), patches(*GRIDS, GRIDS[0]), len(ROW)
    short = ROW[:8]
    tokens, valid = torch.full((2, n + 3), PLACE), torch.zeros(2, n + 3, dtype=torch.bool)
    tokens[0, 3:], valid[0, 3:] = torch.tensor(ROW), True
    tokens[1, :8], valid[1, :8] = torch.tensor(short), True
    cache = Cache(model.spec, batch=2, capacity=64, dtype=torch.float64)
    found = model(tokens, images=images, valid_BT=valid, cache=cache)
    last = model(torch.tensor([[5], [6]]), cache=cache)
    for i, (own, given) in enumerate(((ROW, Patches(images.values[:-24], GRIDS)), (short, None))):
        alone = given or Patches(images.values[-24:], GRIDS[:1])
        want = model(torch.tensor([[*own, 5 + i]]), images=alone)[0]
        torch.testing.assert_close(found[i][valid[i]], want[:-1], rtol=0, atol=1e-10)
        torch.testing.assert_close(last[i], want[-1:], rtol=0, atol=1e-10)


@torch.inference_mode()
def test_pixels_are_patches_of_repeated_frames() -> None:
    model = built()
    pixels = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    tokens = torch.tensor([[1, *[PLACE] * 6, 2], [1, *[PLACE] * 6, 4]])
    values = []
    for image in pixels:
        for R in range(0, 4, 2):
            for C in range(0, 6, 2):
                for r, c in ((R, C), (R, C + 1), (R + 1, C), (R + 1, C + 1)):
                    tile = image[:, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2]
                    values.append(tile[:, None].expand(3, 2, 2, 2).flatten())
    given = Patches(torch.stack(values), ((1, 4, 6),) * 2)
    torch.testing.assert_close(model(tokens, images=pixels), model(tokens, images=given), rtol=0, atol=1e-12)


@torch.inference_mode()
def test_the_tokens_of_an_image_see_each_other_alone() -> None:
    """Those of the second image are at 9 to 28; the first token of it sees its last patches, none before it does."""
    images = patches(*GRIDS)
    other = Patches(images.values.clone(), GRIDS)
    other.values[24 + 79] += 1  # the last patch of the second image
    for model, seen in ((built(), None), (averaged(), 9)):
        same = (model(torch.tensor([ROW]), images=images) == model(torch.tensor([ROW]), images=other)).all(-1)[0]
        first = int((~same).nonzero()[0])
        assert first == seen if seen else first > 9
    apart = torch.tensor([[1, PLACE, PLACE, 5, *[PLACE] * 4]])
    built(None)(apart, images=patches(GRIDS[0]))
    with pytest.raises(InputError, match="tokens: wrong number"):
        averaged()(apart, images=patches(GRIDS[0]))


def test_images_larger_than_the_tables_of_positions_are_refused() -> None:
    model, row = averaged(), torch.tensor([[1, *[PLACE] * 6]])
    model(torch.tensor([[1, *[PLACE] * 5]]), images=patches((1, 10, 2)))
    with pytest.raises(InputError, match=r"images: too large for its positions .*at most 10 rows and columns"):
        model(row, images=patches((1, 2, 12)))


@torch.inference_mode()
def test_sections_without_images_are_ordinary_rope() -> None:
    tokens = torch.tensor([ROW])
    ordinary = built(None)
    for axes in (Sections(pairs=(2, 1, 1)), Sections(pairs=(2, 1, 1), interleaved=True)):
        model = built(axes)
        model.load_state_dict(ordinary.state_dict())
        assert torch.equal(model(tokens), ordinary(tokens))
        seen = model(tokens, images=patches(*GRIDS))
        assert not torch.allclose(seen, ordinary(tokens, images=patches(*GRIDS)))


@pytest.mark.parametrize(
    ("images", "named"),
    [
        (patches((1, 6, 4), (2, 4, 10)), "tokens: wrong number"),
        (patches(*GRIDS, (1, 2, 2)), "tokens: wrong number"),
        (patches((1, 4, 6), (1, 4, 10), (2, 6, 4)), "tokens: wrong number"),
        (patches((1, 6, 3)), "images: wrong image grid"),
        (patches((0, 6, 4)), "images: wrong image grid"),
        (Patches(torch.zeros(7, 24), ((1, 2, 4),)), "images: wrong patches"),
        (Patches(torch.zeros(8, 23), ((1, 2, 4),)), "images: wrong patches"),
        (torch.zeros(1, 3, 10, 8), "images: wrong image size"),
        (torch.zeros(1, 3, 9, 8), "images: wrong image size"),
    ],
    ids=range(9),
)
def test_what_does_not_fit_is_refused(images: Patches, named: str) -> None:
    with pytest.raises(InputError, match=named):
        built()(torch.tensor([ROW]), images=images)


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        (Sections, {"pairs": (1, 1)}),
        (Sections, {"pairs": (0, 0, 0)}),
        (Sections, {"pairs": (1, 3, 0), "interleaved": True}),
        (Rotary, {"d_rotary": 8, "axes": Sections(pairs=(1, 1, 1))}),
        (Rotary, {"d_rotary": 6, "axes": Plane()}),
        (Rotary, {"d_rotary": 8, "axes": Plane(), "grid": 2}),
    ],
    ids=str,
)
def test_parts_refuse(part: type, fields: dict[str, object]) -> None:
    with pytest.raises(InputError, match=rf"{part.__name__}\.\w+: must be"):
        part(**fields)

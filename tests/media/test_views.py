"""Pictures in views of two sizes as transformers' processor of Step-3.7 prepares them, which needs torchvision.

Where it is missing they are compared with what the published rules give, reckoned by hand.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.media.image import Preparation
from asbuilt.media.views import Views
from asbuilt.nn.image_grid import Patches

KIND = "Step3p7ImageProcessor"
PART, WHOLE = ("<patch_start>", 81, "<patch_end>"), ("<im_start>", 169, "<im_end>")
LINE = "<patch_newline>"


def drawn() -> random.Random:
    """Numbers from PARITY_SEED, or fresh ones."""
    seed = int(os.environ.get("PARITY_SEED") or random.SystemRandom().randrange(2**32))
    print("PARITY_SEED", seed)
    return random.Random(seed)


def noise(rng: random.Random, height: int, width: int) -> Image.Image:
    """A picture of noise."""
    numbers = np.random.default_rng(rng.randrange(2**32)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(numbers)


def reading(folder: Path, **settings: object) -> Preparation:
    """What our reader makes of these settings."""
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": KIND, **settings}))
    return Preparation.read(folder)


def cut(view: Tensor, patch: int) -> Tensor:
    """The patches (P, D) of a view (C, H, W), row by row."""
    return F.unfold(view[None], patch, stride=patch)[0].T


def test_views_are_those_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    from transformers.models.step3p7.image_processing_step3p7 import Step3p7ImageProcessor
    from transformers.models.step3p7.processing_step3p7 import Step3p7Processor

    rng, shapes = drawn(), [(31, 130), (200, 90), (5, 19), (5, 21), (40, 40)]
    for _ in range(10):
        patch, stride = rng.randrange(1, 4), rng.choice([2, 4])
        least = -(-12 // (patch * stride))  # windows of 12 pixels or more: smaller ones are too many
        side, window = (patch * stride * rng.randrange(first, 9) for first in (1, least))
        said: dict[str, Any] = {"size": {"height": side, "width": side}, "patch_size": window}
        said |= {"resample": rng.choice([2, 3]), "max_image_size": rng.randrange(50, 150)}
        said |= {key: [rng.uniform(0.2, 0.6) for _ in range(3)] for key in ("image_mean", "image_std")}
        inner = {"vision_patch_size": patch, "downsampler_stride": stride}
        ours, theirs = reading(tmp_path, **said, **inner), Step3p7ImageProcessor(**said)
        n, m = ((one // (patch * stride)) ** 2 for one in (window, side))
        words = SimpleNamespace(patch_feature_placeholder="<p>" * n, image_feature_placeholder="<p>" * m)
        for size in (*shapes, *((rng.randrange(5, 200), rng.randrange(5, 200)) for _ in range(5))):
            given = noise(rng, *size)
            want = theirs(given, return_tensors="pt")
            have = ours.of([given])
            assert isinstance(have, Patches)
            views = [*want.get("pixel_values_local", ()), *want["pixel_values"]]
            assert have.grids == tuple((1, x.shape[1] // patch, x.shape[2] // patch) for x in views)
            torch.testing.assert_close(have.values, torch.cat([cut(x, patch) for x in views]), rtol=0, atol=1e-5)
            said_of = "".join("<p>" * one if isinstance(one, int) else one for one in have.texts[0])
            assert said_of == Step3p7Processor.replace_image_token(words, want, 0)  # type: ignore[arg-type]


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    from transformers.models.step3p7.image_processing_step3p7 import Step3p7ImageProcessor

    said = json.loads(Step3p7ImageProcessor().to_json_string())
    del said["image_processor_type"]
    assert reading(tmp_path, **said) == reading(tmp_path)


def area(image_CHW: Tensor, height: int, width: int) -> Tensor:
    """A picture resized with antialiasing, in bytes."""
    return F.interpolate(image_CHW[None], (height, width), mode="bilinear", antialias=True)[0]


# Of a height and width: the size as a whole, that of the canvas and the side of its tiles. Of at most 728 pixels a
# picture is cut by its shorter side, if it is more than half again as long; of more, by 504; where the longer side is
# more than 4 times the other, by the shorter one, if that is less. A rest of more than a fifth of a tile is one more.
@pytest.mark.parametrize(
    ("size", "whole", "canvas", "tile"),
    [
        ((700, 600), (700, 600), None, 0),
        ((728, 700), (728, 700), None, 0),
        ((600, 400), (600, 400), None, 0),  # half again as long is not more
        ((400, 601), (400, 601), (400, 800), 400),
        ((728, 100), (728, 100), (800, 100), 100),
        ((720, 100), (720, 100), (700, 100), 100),  # a rest of a fifth is not more
        ((729, 728), (729, 728), (1008, 1008), 504),
        ((1108, 604), (1108, 604), (1008, 504), 504),  # rests of 100 < 100.8
        ((1110, 604), (1110, 604), (1512, 504), 504),  # one of 102
        ((300, 1200), (300, 1200), (300, 1512), 504),  # a shorter side stays
        ((300, 1201), (300, 1201), (300, 1200), 300),
        ((4032, 2016), (3024, 1512), (3024, 1512), 504),
        ((31, 124), (31, 124), (31, 124), 31),  # not more than 4 times as long
    ],
)
def test_views_are_reckoned_by_hand(
    size: tuple[int, int], whole: tuple[int, int], canvas: tuple[int, int] | None, tile: int, tmp_path: Path
) -> None:
    ours = reading(tmp_path, image_mean=[0.0] * 3, image_std=[1.0] * 3)
    given = noise(drawn(), *size)
    have = ours.of([given])
    assert isinstance(have, Patches)
    pixels = torch.from_numpy(np.asarray(given).copy()).permute(2, 0, 1)
    views = [area(area(pixels, *whole), 728, 728)]
    said: list[str | int] = []
    if canvas is not None:
        large = area(pixels, *canvas)
        corners = [[(y, x) for x in range(0, canvas[1], tile)] for y in range(0, canvas[0], tile)]
        parts = [[large[:, y : y + tile, x : x + tile] for y, x in row] for row in corners]
        views = [*(area(one, 504, 504) for row in parts for one in row), *views]
        for row in parts:
            said += [*PART * len(row), LINE]
    assert have.texts == ((*said[:-1], *WHOLE),)
    assert have.grids == ((1, 36, 36),) * (len(views) - 1) + ((1, 52, 52),)
    want = torch.cat([cut(view.float() / 255, 14) for view in views])
    torch.testing.assert_close(have.values, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "square", "whole"),
    [
        ((31, 125), 125, (125, 125)),
        ((31, 124), None, (31, 124)),
        ((32, 200), None, (32, 200)),
        ((3024, 3000), None, (3024, 3000)),
        ((3025, 3000), None, (3024, 2999)),  # 3000 x 3024 / 3025 = 2999.008
        ((30, 6048), 6048, (3024, 3024)),
    ],
)
def test_sizes_before_the_cut_are_reckoned_by_hand(
    size: tuple[int, int], square: int | None, whole: tuple[int, int], tmp_path: Path
) -> None:
    made = reading(tmp_path).cut
    assert isinstance(made, Views)
    assert made.plan(*size)[:2] == (square, whole)


def test_a_thin_picture_is_made_square_with_zeros(tmp_path: Path) -> None:
    have = reading(tmp_path, image_mean=[0.0] * 3, image_std=[1.0] * 3).of([Image.new("RGB", (91, 13), (255,) * 3)])
    assert isinstance(have, Patches)
    assert (have.grids, have.texts) == (((1, 52, 52),), (WHOLE,))
    rows = have.values.view(52, 52, 3, 14, 14).permute(2, 0, 3, 1, 4).reshape(3, 728, 728)
    assert (rows[:, :100] == 1).all()  # 13 of 91 rows are 104 of 728
    assert (rows[:, 108:] == 0).all()


def test_views_of_several_pictures_stand_one_picture_after_the_other(tmp_path: Path) -> None:
    ours, rng = reading(tmp_path), drawn()
    given = [noise(rng, 401, 700), noise(rng, 50, 60), noise(rng, 600, 399)]
    together, each = ours.of(given), [ours.of([one]) for one in given]
    assert isinstance(together, Patches)
    assert all(isinstance(one, Patches) for one in each)
    assert together.grids == sum((one.grids for one in each), ())  # type: ignore[union-attr]
    assert together.texts == sum((one.texts for one in each), ())  # type: ignore[union-attr]
    assert torch.equal(together.values, torch.cat([one.values for one in each]))  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [(10**6, 40), (10**5, 1), (9600, 32)])
def test_a_picture_too_long_is_refused_before_it_is_resized(size: tuple[int, int], tmp_path: Path) -> None:
    made = reading(tmp_path, max_image_size=3000).cut
    assert isinstance(made, Views)
    with pytest.raises(InputError, match="too long or too large"):
        made.plan(*size)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"size": {"height": 728, "width": 784}}, "size: must be a square"),
        ({"size": {"height": 730, "width": 730}}, "size: .*a multiple of 56"),
        ({"patch_size": 500}, "patch_size: .*a multiple of 56"),
        ({"patch_size": 560}, "patch_size: .*up to 512"),
        ({"vision_patch_size": 16}, "size: .*a multiple of 64"),
        ({"max_image_size": 10**6}, "max_image_size"),
        ({"resample": 1}, "resample"),
        ({"do_resize": False}, "do_resize"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"colour": 1}, "colour"),
    ],
    ids=range(10),
)
def test_settings_of_views_are_refused_by_name(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=named):
        reading(tmp_path, **settings)

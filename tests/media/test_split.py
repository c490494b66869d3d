"""Large images cut into tiles whose patches are read like images: by hand, by Pillow, and as transformers does."""

from __future__ import annotations

import json
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.media.image import Preparation
from asbuilt.nn.image_grid import Patches

KIND = "Lfm2VlImageProcessorFast"
SMALL = {"encoder_patch_size": 2, "downsample_factor": 2, "min_image_tokens": 4, "max_image_tokens": 16, "tile_size": 8}
BEGIN, END, WHOLE = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"


def reading(folder: Path, **settings: object) -> Preparation:
    """What our reader makes of these settings."""
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": KIND, **settings}))
    return Preparation.read(folder)


def noise(rng: random.Random, height: int, width: int) -> Image.Image:
    """An image of noise."""
    numbers = np.random.default_rng(rng.randrange(2**32)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(numbers)


def images_of(found: Patches, patch: int, merge: int) -> list[Tensor]:
    """The images (C, H, W) whose patches stand square by square."""
    made, at = [], 0
    for _, rows, columns in found.grids:
        own = found.values[at : at + rows * columns].view(
            rows // merge, columns // merge, merge, merge, 3, patch, patch
        )
        made.append(own.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch))
        at += rows * columns
    return made


# By the class's defaults a token is 32 x 32 pixels, an image has 64 to 256 of them, and one of more than twice as many
# is cut into 2 to 10 tiles of 512 x 512. 1500 / 1000 = 3 / 2, and 6 tiles of which the image fills 0.95. As a whole it
# has at most 256 tokens: 13 x 19 = 247.
@pytest.mark.parametrize(
    ("size", "grids", "tiles"),
    [
        ((512, 512), [(32, 32)], None),
        ((100, 40), [(26, 12)], None),
        ((1000, 1500), [*[(32, 32)] * 6, (26, 38)], (2, 3)),
        ((600, 2000), [*[(32, 32)] * 3, (16, 58)], (1, 3)),
    ],
)
def test_tiles_are_reckoned_by_hand(
    size: tuple[int, int], grids: list[tuple[int, int]], tiles: tuple[int, int] | None, tmp_path: Path
) -> None:
    found = reading(tmp_path).of([noise(random.Random(0), *size)])
    assert isinstance(found, Patches)
    assert found.grids == tuple((1, *grid) for grid in grids)
    marks = [f"<|img_row_{i + 1}_col_{j + 1}|>" for i in range(tiles[0]) for j in range(tiles[1])] if tiles else []
    counts = [rows * columns // 4 for rows, columns in grids]
    said = [one for pair in zip([*marks, WHOLE], counts, strict=True) for one in pair] if tiles else counts
    assert found.texts == ((BEGIN, *said, END),)


def test_pixels_are_those_of_pillow_but_for_a_step_of_rounding(tmp_path: Path) -> None:
    """Whose filters are the same; its weights are rounded to other bits."""
    rng = random.Random(2)
    pictures = [noise(rng, 30, 46), noise(rng, 9, 13)]
    found = reading(tmp_path, **SMALL, max_tiles=6).of(pictures)
    assert isinstance(found, Patches)
    assert found.grids == (*[(1, 4, 4)] * 6, (1, 6, 8), (1, 4, 6))
    have = images_of(found, 2, 2)
    large = pictures[0].resize((24, 16), resample=Image.Resampling.BILINEAR)
    boxes = [(x, y, x + 8, y + 8) for y in (0, 8) for x in (0, 8, 16)]
    want = [large.crop(box) for box in boxes]
    for one, size in zip(pictures, [(16, 12), (12, 8)], strict=True):
        want.append(one.resize(size, resample=Image.Resampling.BILINEAR))
    for mine, theirs in zip(have, want, strict=True):
        numbers = torch.from_numpy(np.asarray(theirs).copy()).permute(2, 0, 1) / 127.5 - 1
        assert (mine - numbers).abs().max() < 1.01 / 127.5
        assert (mine - numbers).abs().mean() < 0.1 / 127.5


def test_settings_of_the_processor_file_come_first(tmp_path: Path) -> None:
    picture = noise(random.Random(3), 40, 40)
    reading(tmp_path)
    inner = {"image_processor_type": KIND, **SMALL, "use_thumbnail": False, "min_tiles": 3, "max_tiles": 4}
    said = {"image_processor": inner, "processor_class": "Lfm2VlProcessor", "use_image_special_tokens": False}
    (tmp_path / "processor_config.json").write_text(json.dumps(said))
    found = Preparation.read(tmp_path).of([picture, picture])
    assert isinstance(found, Patches)
    assert found.texts == ((4,) * 4,) * 2
    (tmp_path / "processor_config.json").write_text(json.dumps(said | {"use_image_special_tokens": 1}))
    with pytest.raises(InputError, match="use_image_special_tokens"):
        Preparation.read(tmp_path)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tile_size": 500}, "tile_size"),
        ({"tile_size": 8192, "max_tiles": 2}, "tile_size"),
        ({"min_tiles": 5, "max_tiles": 4}, "max_tiles"),
        ({"max_tiles": 10**6}, "max_tiles"),
        ({"min_image_tokens": 300}, "max_image_tokens"),
        ({"max_image_tokens": 10**9}, "max_image_tokens"),
        ({"encoder_patch_size": 0}, "encoder_patch_size"),
        ({"resample": 1}, "resample"),
        ({"do_pad": False}, "do_pad"),
        ({"max_pixels_tolerance": "2"}, "max_pixels_tolerance"),
    ],
)
def test_settings_of_tiles_are_refused_by_name(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=named):
        reading(tmp_path, **settings)


def test_an_image_that_would_grow_without_bound_is_refused(tmp_path: Path) -> None:
    made = reading(tmp_path, encoder_patch_size=256, downsample_factor=4, tile_size=1024, max_tiles=9)
    with pytest.raises(InputError, match="too long to resize"):
        made.of([noise(random.Random(4), 1, 90_000)])


def test_tiles_are_those_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    theirs = import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl").Lfm2VlImageProcessor
    rng = random.Random(torch.seed())
    for _ in range(10):
        patch, merge, least, tiles = rng.randrange(2, 5), rng.randrange(1, 4), rng.randrange(1, 9), rng.randrange(2, 5)
        made = theirs(
            encoder_patch_size=patch,
            downsample_factor=merge,
            min_image_tokens=least,
            max_image_tokens=least + rng.randrange(40),
            tile_size=patch * merge * 3,
            min_tiles=tiles,
            max_tiles=tiles + rng.randrange(6),
            resample=rng.choice([2, 3]),
        )
        (tmp_path / "preprocessor_config.json").write_text(made.to_json_string())
        pictures = [noise(rng, rng.randrange(1, 90), rng.randrange(1, 90)) for _ in range(4)]
        want = made(pictures, return_tensors="pt")
        have = Preparation.read(tmp_path).of(pictures)
        assert isinstance(have, Patches)
        assert [list(grid[1:]) for grid in have.grids] == want["spatial_shapes"].tolist()
        for mine, values in zip(images_of(have, patch, merge), want["pixel_values"], strict=True):
            rows, columns = mine.shape[1] // patch, mine.shape[2] // patch
            own = values[: rows * columns].view(rows, columns, patch, patch, 3).permute(4, 0, 2, 1, 3)
            torch.testing.assert_close(mine, own.reshape(mine.shape), rtol=0, atol=1e-5)

"""Pictures as transformers' processors prepare them for InternVL, Llama 4, Kimi-K2.5 and MiniMax-M3, and their texts.

Those of all but InternVL need torchvision; what they compute is reckoned by hand too.
"""

from __future__ import annotations

import json
import os
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from asbuilt.errors import InputError
from asbuilt.media.image import Preparation
from asbuilt.nn.image_grid import Patches
from asbuilt.nn.pieces import Pieces

LLAMA4, KIMI, MINIMAX = "Llama4ImageProcessor", "Kimi_K25ImageProcessor", "MiniMaxM3VLImageProcessor"
INTERNVL = "GotOcr2ImageProcessor"
FOLDERS = {LLAMA4: "llama4", KIMI: "kimi_k25", MINIMAX: "minimax_m3_vl"}
BEGIN, END = "<|image_start|>", "<|image_end|>"


def drawn() -> random.Random:
    """Numbers from PARITY_SEED, or fresh ones."""
    seed = int(os.environ.get("PARITY_SEED") or random.SystemRandom().randrange(2**32))
    print("PARITY_SEED", seed)
    return random.Random(seed)


def noise(rng: random.Random, height: int, width: int) -> Image.Image:
    """A picture of noise."""
    numbers = np.random.default_rng(rng.randrange(2**32)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(numbers)


def pictures(rng: random.Random, most: int = 90) -> list[Image.Image]:
    """A few pictures of several shapes, some of whole tiles."""
    sizes = [(rng.randrange(1, most), rng.randrange(1, most)) for _ in range(4)]
    return [noise(rng, *size) for size in (*sizes, (24, 48), (rng.randrange(1, 40),) * 2)]


def reading(folder: Path, kind: str, outer: dict[str, Any] | None = None, **settings: object) -> Preparation:
    """What our reader makes of these settings."""
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind, **settings}))
    (folder / "processor_config.json").write_text(json.dumps(outer or {}))
    return Preparation.read(folder)


def theirs(kind: str) -> Any:  # noqa: ANN401  # a class of transformers'
    """transformers' class; skips the test without torchvision."""
    pytest.importorskip("torchvision")
    name = FOLDERS[kind]
    return getattr(import_module(f"transformers.models.{name}.image_processing_{name}"), kind)


def normal(rng: random.Random) -> dict[str, Any]:
    """Means and deviations."""
    return {key: [rng.uniform(0.2, 0.6) for _ in range(3)] for key in ("image_mean", "image_std")}


def test_tiles_of_internvl_are_those_of_transformers(tmp_path: Path) -> None:
    name = "transformers.models.got_ocr2.image_processing_pil_got_ocr2"
    made = getattr(import_module(name), f"{INTERNVL}Pil")
    rng = drawn()
    for _ in range(6):
        least = rng.randrange(1, 4)
        side = {"height": rng.randrange(3, 30), "width": rng.randrange(3, 30)}
        said: dict[str, Any] = {
            "size": side,
            "min_patches": least,
            "max_patches": least + rng.randrange(12),
            "resample": 3,
        }
        said |= normal(rng)
        given = pictures(rng)
        want = made(**said)(given, crop_to_patches=True, return_tensors="pt")
        have = reading(tmp_path, INTERNVL, {"image_seq_length": 7}, **said).of(given)
        assert isinstance(have, Pieces)
        torch.testing.assert_close(have.values, torch.as_tensor(want["pixel_values"]).float(), rtol=0, atol=1e-5)
        assert [text[1] for text in have.texts] == [7 * int(n) for n in want["num_patches"]]
        assert {(first, last) for first, _, last in have.texts} == {("<img>", "</img>")}


def test_words_around_an_image_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    given = [noise(drawn(), 10, 10)]
    for said in ({"start_image_token": "<a>", "end_image_token": "<b>"}, {"start_image_token": "<a>"}):
        for inner in (said, {"extra_special_tokens": said}):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(inner))
            have = reading(tmp_path, INTERNVL).of(given)
            assert isinstance(have, Pieces)
            assert have.texts == (("<a>", 256, said.get("end_image_token", "</img>")),)


def test_tiles_of_llama4_are_those_of_transformers(tmp_path: Path) -> None:
    kind, rng = theirs(LLAMA4), drawn()
    processor = import_module("transformers.models.llama4.processing_llama4").Llama4Processor
    for i in range(12):
        side = rng.randrange(4, 25) * 2
        said: dict[str, Any] = {"size": {"height": side, "width": side}, "max_patches": rng.randrange(1, 17)}
        said |= {"resize_to_max_canvas": i % 3 == 0, "resample": rng.choice([2, 3])} | normal(rng)
        outer: dict[str, Any] = {"patch_size": 2, "pixel_shuffle_ratio": 0.5}
        ours = reading(tmp_path, LLAMA4, outer, **said)
        for given in pictures(rng, 200):
            want, have = kind(**said)([given], return_tensors="pt"), ours.of([given])
            assert isinstance(have, Pieces)
            torch.testing.assert_close(have.values, want["pixel_values"].flatten(0, -4).float(), rtol=0, atol=1e-5)
            n = (side // 2) ** 2 // 4
            words = processor._prompt_split_image(None, want["aspect_ratios"][0].tolist(), n)
            assert "".join("<|patch|>" * one if isinstance(one, int) else one for one in have.texts[0]) == words
            assert have.mark == "<|image|>"


@pytest.mark.parametrize("kind", [KIMI, MINIMAX])
def test_patches_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    made, rng = theirs(kind), drawn()
    for _ in range(8):
        patch, merge = rng.randrange(2, 6), rng.randrange(1, 4)
        said: dict[str, Any] = {"patch_size": patch, "merge_size": merge, "resample": rng.choice([2, 3])} | normal(rng)
        if kind == KIMI:
            said |= {"max_patches": rng.randrange(1, 300), "size": dict.fromkeys(("max_height", "max_width"), 9)}
        else:
            least = rng.randrange(100, 900)
            said |= {"temporal_patch_size": rng.randrange(1, 3), "min_pixels": least, "max_pixels": least * 4}
        given = [one for one in pictures(rng) if max(one.size) <= 200 * min(one.size)]
        want, have = made(**said)(given, return_tensors="pt"), reading(tmp_path, kind, **said).of(given)
        assert isinstance(have, Patches)
        assert have.grids == tuple(map(tuple, want["image_grid_thw"].tolist()))
        values = squares(want["pixel_values"], have.grids, merge) if kind == KIMI else want["pixel_values"]
        torch.testing.assert_close(have.values, values, rtol=0, atol=1e-5)
        words = ("]<]start of image[>[", "]<]end of image[>[") if kind == MINIMAX else ()
        counts = [rows * columns // merge**2 for _, rows, columns in have.grids]
        assert have.texts == tuple((*words[:1], n, *words[1:]) for n in counts)


def squares(rows: torch.Tensor, grids: tuple[tuple[int, int, int], ...], merge: int) -> torch.Tensor:
    """Patches (P, ...) that stand row by row, in squares, (P, D)."""
    each, found = rows.flatten(1).split([h * w for _, h, w in grids]), []
    for x, (_, h, w) in zip(each, grids, strict=True):
        cut = x.view(h // merge, merge, w // merge, merge, -1).transpose(1, 2)
        found.append(cut.reshape(h * w, -1))
    return torch.cat(found)


# Of 336 x 336 pixels: 300 x 900 is enlarged to one row of three tiles by 336 / 300, and stays as wide as it is.
# 50 x 16.8 is a little less than 840 in 32-bit numbers.
@pytest.mark.parametrize(
    ("size", "said", "rows", "columns", "inside"),
    [
        ((336, 336), {}, 1, 1, (336, 336)),
        ((100, 50), {}, 1, 1, (336, 168)),
        ((300, 900), {}, 1, 3, (300, 900)),
        ((3000, 3000), {}, 4, 4, (1344, 1344)),
        (
            (100, 50),
            {"resize_to_max_canvas": True},
            5,
            3,
            (1680, 839),
        ),  # 50 x 16.8 in 32-bit numbers is a little less than 840
    ],
)
def test_canvases_are_reckoned_by_hand(
    size: tuple[int, int], said: dict[str, Any], rows: int, columns: int, inside: tuple[int, int], tmp_path: Path
) -> None:
    have = reading(tmp_path, LLAMA4, **said).of([Image.new("RGB", (size[1], size[0]), (255, 255, 255))])
    assert isinstance(have, Pieces)
    n = rows * columns
    tiles = have.values[:n].view(rows, columns, 3, 336, 336).permute(2, 0, 3, 1, 4).reshape(3, rows * 336, -1)
    assert (tiles[:, : inside[0], : inside[1]] == 1).all()
    assert (tiles[:, inside[0] :] == -1).all()
    assert (tiles[:, :, inside[1] :] == -1).all()
    line = [144, "<|tile_x_separator|>"] * columns
    whole = [*line[:-1], "<|tile_y_separator|>"] * rows if n > 1 else []
    assert have.texts == ((BEGIN, *whole, "<|image|>", 144, END),)
    assert len(have.values) == n + (n > 1)
    assert (have.values[n:] == 1).all()


# 28 pixels a square: 100 x 30 is padded to 112 x 56; of at most 8 patches, 14 x 4 / 2 patches are shrunk by sqrt(8/14)
@pytest.mark.parametrize(
    ("size", "said", "inside", "grid"),
    [
        ((100, 30), {}, (100, 30), (8, 4)),
        ((100, 30), {"max_patches": 8}, (75, 22), (6, 2)),
        ((100, 30), {"size": {"max_height": 3, "max_width": 3}}, (42, 12), (4, 2)),
        ((1, 1), {}, (1, 1), (2, 2)),
    ],
)
def test_padded_patches_are_reckoned_by_hand(
    size: tuple[int, int], said: dict[str, Any], inside: tuple[int, int], grid: tuple[int, int], tmp_path: Path
) -> None:
    have = reading(tmp_path, KIMI, **said).of([Image.new("RGB", (size[1], size[0]), (255, 255, 255))])
    assert isinstance(have, Patches)
    assert have.grids == ((1, *grid),)
    assert (have.values == 1).sum() == 3 * inside[0] * inside[1]
    assert (have.values == -1).sum() == 3 * (grid[0] * grid[1] * 14**2 - inside[0] * inside[1])


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        (INTERNVL, {"min_patches": 3, "max_patches": 2}, "max_patches"),
        (INTERNVL, {"max_patches": 10**6}, "max_patches"),
        (INTERNVL, {"size": {"height": 8000, "width": 8000}}, "size"),
        (INTERNVL, {"do_resize": False}, "do_resize"),
        (LLAMA4, {"size": {"height": 8000, "width": 8000}}, "size"),
        (LLAMA4, {"size": {"height": 30, "width": 20}}, "size"),
        (LLAMA4, {"do_normalize": False}, "do_normalize"),
        (LLAMA4, {"do_resize": False}, "do_resize"),
        (LLAMA4, {"resample": 1}, "resample"),
        (LLAMA4, {"min_patches": 1}, "min_patches"),
        (KIMI, {"size": {"max_height": 3, "max_width": 4}}, "size"),
        (KIMI, {"size": 5}, "size"),
        (KIMI, {"max_patches": 0}, "max_patches"),
        (KIMI, {"do_center_crop": True}, "do_center_crop"),
        (MINIMAX, {"max_pixels": 2**40}, "max_pixels"),
        (MINIMAX, {"resample": 0}, "resample"),
    ],
)
def test_settings_of_pieces_are_refused_by_name(
    kind: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=named):
        reading(tmp_path, kind, **settings)


NONE_AND_OLD: tuple[dict[str, Any], ...] = ({}, {"size": [672, 672]})


def test_a_size_that_no_processor_reads_is_the_usual_one(tmp_path: Path) -> None:
    given = [noise(drawn(), 700, 1000)]
    usual, said = (reading(tmp_path, MINIMAX, **more).of(given) for more in NONE_AND_OLD)
    assert isinstance(usual, Patches)
    assert isinstance(said, Patches)
    assert usual.grids == said.grids == ((1, 40, 56),)


def test_pictures_that_padding_would_make_too_large_are_refused(tmp_path: Path) -> None:
    made = reading(tmp_path, KIMI, patch_size=256, merge_size=256)
    with pytest.raises(InputError, match="too large for its patches"):
        made.of([noise(drawn(), 3, 3)])


def test_numbers_of_llama4_are_rounded_to_sixteen_bits_after_each_step(tmp_path: Path) -> None:
    rng = drawn()
    given, said = noise(rng, 336, 336), normal(rng)
    have = reading(tmp_path, LLAMA4, **said).of([given])
    assert isinstance(have, Pieces)
    short = lambda x: torch.as_tensor(x, dtype=torch.float32).bfloat16().float()  # noqa: E731
    bytes_CHW = torch.from_numpy(np.asarray(given).copy()).permute(2, 0, 1).float()
    mean, std = (short(said[key])[:, None, None] for key in ("image_mean", "image_std"))
    want = short(short(short(bytes_CHW / 255) - mean) / std)
    assert (have.values[0] == want).float().mean() > 0.99  # a product with 1/255 may round otherwise than a quotient
    assert (have.values == short(have.values)).all()

"""Pictures that fill a number of tokens, as transformers' processors of Gemma 4 prepare them.

The one that models are trained with needs torchvision; another resizes with Pillow, to the same sizes and, but for how
bytes are rounded, to the same numbers.
"""

from __future__ import annotations

import json
import math
import os
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from asbuilt.errors import InputError
from asbuilt.media.cut import Filled
from asbuilt.media.image import Preparation
from asbuilt.nn.image_grid import Patches

KIND = "Gemma4ImageProcessor"
TOKENS = (70, 140, 280, 560, 1120)


def drawn() -> random.Random:
    """Numbers from PARITY_SEED, or fresh ones."""
    seed = int(os.environ.get("PARITY_SEED") or random.SystemRandom().randrange(2**32))
    print("PARITY_SEED", seed)
    return random.Random(seed)


def noise(rng: random.Random, height: int, width: int, between: tuple[int, int] = (0, 256)) -> Image.Image:
    """A picture of noise."""
    numbers = np.random.default_rng(rng.randrange(2**32)).integers(*between, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(numbers)


def reading(folder: Path, **settings: object) -> Preparation:
    """What our reader makes of these settings."""
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": KIND, **settings}))
    return Preparation.read(folder)


# Nothing said, numbers are scaled and not shifted.
NORMALISED: tuple[dict[str, Any], ...] = ({}, {"do_normalize": True}, {"do_normalize": False})


def settings(rng: random.Random, tokens: int) -> dict[str, Any]:
    """Small patches, and how numbers are scaled and shifted if they are."""
    said: dict[str, Any] = {"patch_size": rng.randrange(2, 5), "pooling_kernel_size": rng.randrange(1, 4)}
    said |= {"max_soft_tokens": tokens, "resample": rng.choice([2, 3])}
    said |= {key: [rng.uniform(0.2, 0.6) for _ in range(3)] for key in ("image_mean", "image_std")}
    return said | ({"rescale_factor": rng.uniform(0.001, 0.01)} if rng.random() < 0.3 else {})


def row_by_row(have: Patches, merge: int) -> list[Tensor]:
    """The patches of each image row by row, each of pixels with their channels, as theirs are."""
    found = []
    for x, (_, h, w) in zip(have.values.split([h * w for _, h, w in have.grids]), have.grids, strict=True):
        p = math.isqrt(x.shape[1] // 3)
        rows = x.view(h // merge, w // merge, merge, merge, 3, p, p).transpose(1, 2)
        found.append(rows.permute(0, 1, 2, 3, 5, 6, 4).reshape(h * w, -1))
    return found


def same(have: Patches, want: Any, merge: int, within: float) -> None:  # noqa: ANN401  # what a processor returns
    """Compares patches, where they lie, and how many tokens they make."""
    for i, (own, (_, h, w)) in enumerate(zip(row_by_row(have, merge), have.grids, strict=True)):
        places = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(h), indexing="xy"), -1).view(-1, 2)
        at = torch.as_tensor(want["image_position_ids"][i])
        assert torch.equal(at[: len(own)], places)
        assert (at[len(own) :] == -1).all()
        values = torch.as_tensor(want["pixel_values"][i], dtype=torch.float32)
        torch.testing.assert_close(own, values[: len(own)], rtol=0, atol=within)
    counts = [int(n) for n in want["num_soft_tokens_per_image"]]
    assert have.texts == tuple(("<|image>", n, "<image|>") for n in counts)


def test_patches_are_those_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    made, rng = getattr(import_module("transformers.models.gemma4.image_processing_gemma4"), KIND), drawn()
    for i in range(9):
        said = settings(rng, rng.choice(TOKENS[:3])) | NORMALISED[i % 3]
        given = [noise(rng, rng.randrange(1, 120), rng.randrange(1, 120)) for _ in range(3)]
        given += [noise(rng, 2, rng.randrange(100, 900)), noise(rng, 48, 48)]
        have = reading(tmp_path, **said).of(given)
        assert isinstance(have, Patches)
        same(have, made(**said)(given, return_tensors="pt"), said["pooling_kernel_size"], 1e-5)
        said = json.loads(made(**said).to_json_string())
        again = reading(tmp_path, **said).of(given)
        assert isinstance(again, Patches)
        assert torch.equal(again.values, have.values)


def test_patches_are_those_of_pillow_but_for_how_bytes_are_rounded(tmp_path: Path) -> None:
    """Of numbers that cubic weights leave within a byte: both clip after each axis, in another order."""
    rng = drawn()
    for normalised in NORMALISED:
        said = settings(rng, 70) | normalised
        given = [noise(rng, rng.randrange(20, 90), rng.randrange(20, 90), (90, 166)) for _ in range(3)]
        have = reading(tmp_path, **said).of(given)
        assert isinstance(have, Patches)
        scale = said.get("rescale_factor", 1 / 255) / (min(said["image_std"]) if said.get("do_normalize") else 1)
        want = Gemma4ImageProcessorPil(**said)(given, return_tensors="pt")
        same(have, want, said["pooling_kernel_size"], 3.5 * scale)  # bytes


def test_pictures_that_fill_their_tokens_are_not_resized(tmp_path: Path) -> None:
    rng = drawn()
    said = settings(rng, 70)
    unit = said["patch_size"] * said["pooling_kernel_size"]
    given = [noise(rng, 7 * unit, 10 * unit), noise(rng, 14 * unit, 5 * unit)]
    have = reading(tmp_path, **said).of(given)
    assert isinstance(have, Patches)
    assert [text[1] for text in have.texts] == [70, 70]
    same(have, Gemma4ImageProcessorPil(**said)(given, return_tensors="pt"), said["pooling_kernel_size"], 1e-5)


def test_sizes_are_those_of_transformers() -> None:
    rng = drawn()
    for _ in range(5000):
        patch, merge, tokens = rng.randrange(1, 20), rng.randrange(1, 5), rng.choice(TOKENS)
        cut = Filled(patch=patch, frames=1, merge=merge, least=0, most=tokens * (patch * merge) ** 2)
        longest = int(10 ** rng.uniform(0, 4))
        size = rng.randrange(1, longest + 1), rng.randrange(1, longest + 1)
        assert cut.size(*size) == get_aspect_ratio_preserving_size(*size, patch, tokens * merge**2, merge)


# 280 squares of 48 pixels: 1000 x 600 is enlarged by sqrt(645,120 / 600,000) to 1036.9 x 622.2, 21 x 12 of them
@pytest.mark.parametrize(
    ("size", "squares"), [((1000, 600), (21, 12)), ((1, 5000), (1, 280)), ((300, 1), (280, 1)), ((20, 20), (16, 16))]
)
def test_sizes_are_reckoned_by_hand(size: tuple[int, int], squares: tuple[int, int], tmp_path: Path) -> None:
    have = reading(tmp_path).of([Image.new("RGB", (size[1], size[0]), (255, 0, 51))])
    assert isinstance(have, Patches)
    assert have.grids == ((1, 3 * squares[0], 3 * squares[1]),)
    assert have.texts == (("<|image>", math.prod(squares), "<image|>"),)
    channels = have.values.view(-1, 3, 256)
    torch.testing.assert_close(channels, torch.tensor([1.0, 0.0, 0.2])[:, None].expand_as(channels))


def test_words_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    for said in ({"boi_token": "<a>", "eoi_token": "<b>"}, {"extra_special_tokens": {"boi_token": "<a>"}}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
        have = reading(tmp_path).of([noise(drawn(), 10, 10)])
        assert isinstance(have, Patches)
        assert have.texts == (("<a>", 256, said.get("eoi_token", "<image|>")),)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"max_soft_tokens": 100}, "max_soft_tokens: must be one of 70, 140, 280, 560, 1120"),
        ({"pooling_kernel_size": 0}, "pooling_kernel_size"),
        ({"patch_size": 256, "max_soft_tokens": 1120}, "patch_size"),
        ({"do_resize": False}, "do_resize"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"resample": 0}, "resample"),
        ({"do_pad": True}, "do_pad"),
        ({"min_soft_tokens": 3}, "min_soft_tokens"),
    ],
)
def test_settings_are_refused(said: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=named):
        reading(tmp_path, **said)

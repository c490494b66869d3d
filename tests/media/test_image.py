"""Images prepared as transformers' Pillow processors prepare them, and what is refused before it is decoded."""

from __future__ import annotations

import json
import random
import struct
import zlib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from asbuilt.errors import InputError
from asbuilt.media.image import Preparation, opened
from asbuilt.nn.image_grid import Patches
from asbuilt.nn.tiles import Tiles

CLASSES = {
    "CLIPImageProcessor": "clip",
    "SiglipImageProcessor": "siglip",
    "ViTImageProcessor": "vit",
    "Qwen2VLImageProcessor": "qwen2_vl",
    "BitImageProcessor": "bit",
    "PixtralImageProcessor": "pixtral",
    "MllamaImageProcessor": "mllama",
    "DINOv3ViTImageProcessor": "dinov3_vit",
}
WITHOUT_PILLOW = ("DINOv3ViTImageProcessor",)  # transformers' own needs torchvision
SIZES = [(30, 41), (64, 64), (300, 20), (57, 131), (131, 57), (9, 40)]
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("CLIPImageProcessor", {}),
    ("CLIPImageProcessor", {"size": 40, "crop_size": 36, "resample": 2, "image_mean": [0.1, 0.2, 0.3]}),
    ("CLIPImageProcessor", {"size": {"height": 20, "width": 30}, "do_center_crop": False, "do_normalize": False}),
    ("SiglipImageProcessor", {"size": {"height": 32, "width": 32}, "do_rescale": False}),
    ("ViTImageProcessor", {"size": {"height": 24, "width": 28}, "rescale_factor": 0.01}),
    ("BitImageProcessor", {}),
    ("BitImageProcessor", {"size": {"shortest_edge": 50}, "crop_size": 45, "image_mean": [0.1, 0.2, 0.3]}),
    ("PixtralImageProcessor", {}),
    ("PixtralImageProcessor", {"size": {"longest_edge": 50}, "patch_size": 6, "resample": 2}),
    ("MllamaImageProcessor", {}),
    (
        "MllamaImageProcessor",
        {"size": {"height": 28, "width": 28}, "max_image_tiles": 4, "image_mean": [0.4, 0.5, 0.3]},
    ),
    ("MllamaImageProcessor", {"size": {"height": 20, "width": 20}, "max_image_tiles": 7, "resample": 3}),
    ("DINOv3ViTImageProcessor", {}),
    ("DINOv3ViTImageProcessor", {"size": {"height": 20, "width": 30}, "resample": 3, "image_std": [0.1, 0.2, 0.3]}),
    ("DINOv3ViTImageProcessor", {"size": {"shortest_edge": 25}, "rescale_factor": 0.01, "do_normalize": False}),
    ("DINOv3ViTImageProcessor", {"do_resize": False}),
    ("Qwen2VLImageProcessor", {}),
    ("Qwen2VLImageProcessor", {"min_pixels": 800, "max_pixels": 2000, "patch_size": 4, "temporal_patch_size": 1}),
    ("Qwen2VLImageProcessor", {"size": {"shortest_edge": 900, "longest_edge": 5000}, "patch_size": 5, "merge_size": 3}),
]


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """An image of noise."""
    numbers = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(numbers)


def reading(folder: Path, kind: str, **settings: object) -> Preparation:
    """What our reader makes of a folder with these settings."""
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind, **settings}))
    return Preparation.read(folder)


def reference(kind: str) -> Any:  # noqa: ANN401  # one of transformers' classes
    """transformers' processor, that of Pillow if there is one; skips a test without the library it needs."""
    name = CLASSES[kind]
    if kind not in WITHOUT_PILLOW:
        return getattr(import_module(f"transformers.models.{name}.image_processing_pil_{name}"), f"{kind}Pil")
    pytest.importorskip("torchvision")
    return getattr(import_module(f"transformers.models.{name}.image_processing_{name}"), kind)


@pytest.mark.parametrize(("kind", "settings"), SETTINGS, ids=range(len(SETTINGS)))
def test_images_are_prepared_as_transformers_does(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    theirs, ours = reference(kind), reading(tmp_path, kind, **settings)
    for seed, size in enumerate(SIZES):
        image = picture(size, seed)
        file = tmp_path / "a.png"
        image.save(file)
        want, have = theirs(**settings)(image, return_tensors="pt"), ours.of([file])
        if isinstance(have, Patches) and "image_sizes" in want:
            (_, rows, columns), patch = have.grids[0], ours.cut.patch  # type: ignore[union-attr]  # pyright: ignore
            assert [(rows * patch, columns * patch)] == [tuple(map(int, size)) for size in want["image_sizes"]]
            squares = have.values.view(rows, columns, 3, patch, patch).permute(2, 0, 3, 1, 4)
            have = squares.reshape(1, 3, rows * patch, columns * patch)
        if isinstance(have, Patches):
            assert have.grids == tuple(map(tuple, want["image_grid_thw"].tolist()))
            have = have.values
        if isinstance(have, Tiles):
            known = [(a, b) for a in range(1, 9) for b in range(1, 9) if a * b <= have.values.shape[1]]
            assert [known.index(tiling) + 1 for tiling in have.tilings] == want["aspect_ratio_ids"][0].tolist()
            have = have.values[:, None]
        torch.testing.assert_close(have, want["pixel_values"].float(), rtol=0, atol=1e-5)


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    for kind in CLASSES:
        if kind not in WITHOUT_PILLOW or find_spec("torchvision"):
            said = json.loads(reference(kind)().to_json_string())
            Preparation.read(_written(tmp_path, said))


@pytest.mark.parametrize("resample", [2, 3])
def test_images_that_are_scaled_first_are_resized_as_numbers(resample: int, tmp_path: Path) -> None:
    """By Pillow's own filters of images of 32-bit numbers; an image that is rounded to bytes is off by up to 1/510."""
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    given = {"size": {"height": 20, "width": 37}, "resample": resample, "image_mean": mean, "image_std": std}
    ours = reading(tmp_path, "DINOv3ViTImageProcessor", **given)
    for seed, size in enumerate(SIZES):
        image = picture(size, seed)
        scaled = np.asarray(image, dtype=np.float32) / 255
        bands = [Image.fromarray(scaled[..., i]).resize((37, 20), resample=resample) for i in range(3)]
        want = (np.stack([np.asarray(band) for band in bands]) - np.array(mean)[:, None, None]) / np.array(std)[
            :, None, None
        ]
        torch.testing.assert_close(ours.pixels(image), torch.from_numpy(want).float(), rtol=0, atol=1e-5)


def _written(folder: Path, said: dict[str, Any]) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    return folder


def test_modes_and_rotations_are_read_in_rgb(tmp_path: Path) -> None:
    for mode in ("L", "RGBA", "P", "CMYK", "1"):
        file = tmp_path / f"{mode}.tiff"
        picture((9, 7)).convert(mode).save(file)
        assert (opened(file).mode, opened(file).size) == ("RGB", (7, 9))
    exif = Image.Exif()
    exif[0x0112] = 6
    picture((9, 7)).save(tmp_path / "turned.jpg", exif=exif)
    assert opened(tmp_path / "turned.jpg").size == (9, 7)


def _bomb(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels, and holds none."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = lambda kind, data: (  # noqa: E731
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    )
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"no image", "cannot be read as an image"),
        (b"", "cannot be read as an image"),
        (_bomb(20_000, 20_000), "too large|cannot be read as an image"),
        (_bomb(10_000, 10_001), "too large"),
        (_bomb(10, 10), "cannot be read as an image"),
    ],
    ids=range(5),
)
def test_hostile_files_are_refused(data: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(InputError, match=named):
        opened(tmp_path / "a.png")
    with pytest.raises(InputError, match="cannot be read"):
        opened(tmp_path / "missing.png")


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("OtherImageProcessor", {}, "image_processor_type"),
        ("CLIPImageProcessor", {"size": {"shortest_edge": 10**6}}, "size"),
        ("CLIPImageProcessor", {"crop_size": {"height": -1, "width": 3}}, "crop_size"),
        ("CLIPImageProcessor", {"image_mean": [1, 2]}, "image_mean"),
        ("CLIPImageProcessor", {"image_std": [0, 1, 1]}, "image_std"),
        ("CLIPImageProcessor", {"resample": 9}, "resample"),
        ("CLIPImageProcessor", {"do_pad": True}, "do_pad"),
        ("CLIPImageProcessor", {"colour": 1}, "colour"),
        ("Gemma3ImageProcessor", {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("PixtralImageProcessor", {"size": {"longest_edge": 10**6}}, "size"),
        ("PixtralImageProcessor", {"size": {"height": 20, "width": 30}}, "size"),
        ("PixtralImageProcessor", {"patch_size": {"height": 16, "width": 14}}, "patch_size"),
        ("PixtralImageProcessor", {"do_resize": False}, "do_resize"),
        ("MllamaImageProcessor", {"do_pad": False}, "do_pad"),
        ("MllamaImageProcessor", {"do_resize": False}, "do_resize"),
        ("MllamaImageProcessor", {"size": {"height": 20, "width": 30}}, "size"),
        ("MllamaImageProcessor", {"size": 4096, "max_image_tiles": 256}, "size"),
        ("MllamaImageProcessor", {"max_image_tiles": 0}, "max_image_tiles"),
        ("Qwen2VLImageProcessor", {"max_pixels": 2**40}, "max_pixels"),
        ("Qwen2VLImageProcessor", {"min_pixels": 9000, "max_pixels": 8000}, "max_pixels"),
        ("DINOv3ViTImageProcessor", {"resample": 1}, "resample"),
        ("DINOv3ViTImageProcessor", {"do_rescale": False}, "do_rescale"),
        ("DINOv3ViTImageProcessor", {"do_center_crop": True}, "do_center_crop"),
        ("Qwen2VLImageProcessor", {"patch_size": 0}, "patch_size"),
        ("Qwen2VLImageProcessor", {"do_resize": False}, "do_resize"),
    ],
)
def test_settings_are_refused_by_name(kind: str, settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=named):
        reading(tmp_path, kind, **settings)


def test_very_long_images_are_refused(tmp_path: Path) -> None:
    for kind, size in (("Qwen2VLImageProcessor", (2, 500)), ("CLIPImageProcessor", (1, 10_000))):
        made = reading(tmp_path, kind, **({"size": 9000} if kind[0] == "C" else {}))
        with pytest.raises(InputError, match="image"):
            made.of([picture(size)])


def test_patch_bounds_hold(tmp_path: Path) -> None:
    made = reading(tmp_path, "Qwen2VLImageProcessor", min_pixels=400, max_pixels=3000, patch_size=4)
    rng = random.Random(1)
    for _ in range(200):
        size = rng.randrange(1, 400), rng.randrange(1, 400)
        if max(size) <= 200 * min(size):
            assert made.cut is not None
            high, wide = made.cut.size(*size)
            assert high % 8 == wide % 8 == 0
            assert high * wide <= max(3000, 8 * max(high, wide))

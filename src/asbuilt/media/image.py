"""Images: files, and what a preprocessor_config.json says to do with them before a model reads them.

An image is resized, cropped, scaled and normalised to pixels of one size, or divided into patches of a grid of its own
size (Wang et al. 2024, Qwen2-VL, arXiv 2409.12191, section 2.1), or cut into tiles, as transformers' processors do with
Pillow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.families.shared.reader import ConfigReader, is_number, is_whole
from asbuilt.files import read_object
from asbuilt.media.cut import MOST_RESIZED, Cut, Grid, Rows, Split
from asbuilt.media.tiles import Tiling
from asbuilt.nn.image_grid import Patches
from asbuilt.nn.tiles import Tiles

if TYPE_CHECKING:
    from PIL.Image import Image

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
WITHIN = "image_processor"
LARGEST = 1 << 20  # bytes of a preprocessor_config.json
MOST_PIXELS = 100_000_000  # of a file, before any is decoded
MOST_SIDE = 1 << 14
MOST_TILES = 256
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BILINEAR, BICUBIC = 2, 3  # Pillow's numbers
FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
# What transformers' classes do where a config is silent: means and deviations, the filter, the size, whether to crop.
GRIDS = ("Qwen2VLImageProcessor", "Qwen3VLImageProcessor")
TILED = "MllamaImageProcessor"
SCALED_FIRST = "DINOv3ViTImageProcessor"
SPLIT = "Lfm2VlImageProcessor"
ROWS = "PixtralImageProcessor"
DEFAULTS: dict[str, tuple[tuple[Sequence[float], Sequence[float]], int, dict[str, int], bool]] = {
    "CLIPImageProcessor": (CLIP, BICUBIC, {"shortest_edge": 224}, True),
    "CLIPFeatureExtractor": (CLIP, BICUBIC, {"shortest_edge": 224}, True),
    "LlavaImageProcessor": (CLIP, BICUBIC, {"shortest_edge": 224}, True),
    "SiglipImageProcessor": (HALF, BICUBIC, {"height": 224, "width": 224}, False),
    "ViTImageProcessor": (HALF, BILINEAR, {"height": 224, "width": 224}, False),
    "ViTFeatureExtractor": (HALF, BILINEAR, {"height": 224, "width": 224}, False),
    TILED: (HALF, BILINEAR, {"height": 224, "width": 224}, False),
    SCALED_FIRST: (IMAGENET, BILINEAR, {"height": 224, "width": 224}, False),
    "BitImageProcessor": (CLIP, BICUBIC, {"shortest_edge": 224}, True),
    ROWS: (CLIP, BICUBIC, {"longest_edge": 1024}, False),
    SPLIT: (HALF, BILINEAR, {"height": 512, "width": 512}, False),
    "Gemma3ImageProcessor": (HALF, BILINEAR, {"height": 224, "width": 224}, False),
    **dict.fromkeys(GRIDS, (CLIP, BICUBIC, {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, False)),
}


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is done with an image: `size` (height, width), or its `shortest` edge, a centre `crop`, then `cut`.

    With a `tiling` it is resized within its tiles, padded with zeros below and on the right, and cut into them. With
    `scaled_first` its numbers are not rounded to bytes after it is resized. With a `Split` it is cut into tiles, of
    which each becomes patches.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    factor: float | None
    resample: int
    size: tuple[int, int] | None = None
    shortest: int | None = None
    crop: tuple[int, int] | None = None
    cut: Cut | None = None
    tiling: Tiling | None = None
    scaled_first: bool = False

    @classmethod
    def read(cls, folder: Path) -> Preparation:
        """Returns what a checkpoint folder says; raises InputError for what is not read or not supported."""
        reader, outer = _settings(folder)
        kind = _kind(reader)
        (mean, std), resample, size, crops = DEFAULTS[kind]
        resizes = reader.flag("do_resize", default=True)
        crops = kind not in GRIDS and reader.flag("do_center_crop", default=crops, null=False)
        normalises = reader.flag("do_normalize", default=True)
        number = reader.size("resample", default=resample, least=0, most=5)
        made: dict[str, Any] = {
            "factor": _factor(reader),
            "mean": _numbers(reader, "image_mean", mean) if normalises else (0.0,) * 3,
            "std": _numbers(reader, "image_std", std) if normalises else (1.0,) * 3,
            "resample": number,
        }
        if kind in GRIDS:
            reader.require("do_resize", resizes, "true: images are resized to whole squares of patches")
            made["cut"] = _cut(reader, size)
        elif kind == ROWS:
            reader.require("do_resize", resizes, "true: images are resized to whole squares of patches")
            reader.require("do_center_crop", not crops, "false: images of this kind are not cropped")
            made["cut"] = _rows(reader, outer, size)
        elif kind == SPLIT:
            made["cut"] = _split(reader, number, outer)
        elif kind == TILED:
            reader.require("do_resize", resizes, "true: images are resized to tiles")
            made["tiling"] = _tiling(reader, size)
        else:
            if kind == SCALED_FIRST:
                made["scaled_first"] = _scaled_first(reader, number, crops, made["factor"])
            made |= _resized(reader, size) if resizes else {}
            made["crop"] = _sides(reader, "crop_size", {"height": 224, "width": 224}) if crops else None
        _declare(reader)
        reader.finish()
        return cls(**made)

    def of(self, images: Sequence[str | Path | Image]) -> Tensor | Patches | Tiles:
        """Returns pixels (N, C, H, W), or patches and grids, or tiles and tilings.

        Raises InputError for an image that cannot be read.
        """
        if self.tiling is not None:
            return self._tiled([opened(image) for image in images], self.tiling)
        if isinstance(self.cut, Split):
            return self._splits([opened(image) for image in images], self.cut)
        read = [self.pixels(opened(image)) for image in images]
        if self.cut is None:
            if len({tuple(one.shape) for one in read}) > 1:
                raise InputError("images of several sizes", field="images", fix="resize them to one size")
            return torch.stack(read)
        found = [self.cut.patches(one) for one in read]
        grids = tuple(grid for _, grid in found)
        texts = tuple(map(self.cut.text, grids))
        return Patches(torch.cat([values for values, _ in found]), grids, texts)

    def _tiled(self, images: Sequence[Image], tiling: Tiling) -> Tiles:
        shapes = [tiling.shape(image.height, image.width) for image in images]
        values = [tiling.tiles(self.pixels(one, shape), shape) for one, shape in zip(images, shapes, strict=True)]
        return Tiles(torch.stack(values), tuple(shapes))

    def _splits(self, images: Sequence[Image], cut: Split) -> Patches:
        found: list[tuple[Tensor, Grid]] = []
        texts: list[tuple[str | int, ...]] = []
        for image in images:
            shape = cut.tiles(image.height, image.width)
            own = [cut.patches(self.scaled(one)) for one in self._parts(_bytes(image), cut, shape)]
            texts.append(cut.tiled(shape, [math.prod(grid) // cut.merge**2 for _, grid in own]))
            found += own
        return Patches(torch.cat([values for values, _ in found]), tuple(grid for _, grid in found), tuple(texts))

    def _parts(self, image_CHW: Tensor, cut: Split, shape: tuple[int, int] | None) -> list[Tensor]:
        """Returns the tiles of an image, row by row, and it as a whole, in bytes; of one tile, that alone."""
        whole = self._interpolated(image_CHW, cut.size(*image_CHW.shape[1:]))
        if shape is None:
            return [whole]
        rows, columns = shape
        large = self._interpolated(image_CHW, (rows * cut.side, columns * cut.side))
        tiles = [tile for row in large.split(cut.side, 1) for tile in row.split(cut.side, 2)]
        return [*tiles, whole] if cut.thumbnail and len(tiles) > 1 else tiles

    def _interpolated(self, x_CHW: Tensor, size: tuple[int, int]) -> Tensor:
        return F.interpolate(x_CHW[None], size, mode=FILTERS[self.resample], antialias=True)[0]

    def scaled(self, x_CHW: Tensor) -> Tensor:
        """Returns an image's numbers, 0 to 255, scaled and normalised in float32."""
        x_CHW = x_CHW.to(torch.float32)
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return ((x_CHW if self.factor is None else x_CHW * self.factor) - mean) / std

    def pixels(self, image: Image, tiles: tuple[int, int] | None = None) -> Tensor:
        """Returns one image (C, H, W) in float32: resized, cropped or padded to `tiles`, scaled and normalised."""
        size = self._size(image.height, image.width)
        if size != (image.height, image.width) and not self.scaled_first:
            image = image.resize((size[1], size[0]), resample=self.resample)  # type: ignore[arg-type]  # pyright: ignore
        if self.crop is not None:
            image = _centre(image, self.crop)
        x = _bytes(image).to(torch.float32)
        if tiles is not None and self.tiling is not None:
            high, wide = (n * self.tiling.side for n in tiles)
            x = F.pad(x, (0, wide - image.width, 0, high - image.height))
        if self.scaled_first and size != (image.height, image.width):
            # what comes first matters to no number: resizing is linear, and nothing is rounded
            x = self._interpolated(x, size)
        return self.scaled(x)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        if self.cut is not None:
            return self.cut.size(height, width)
        if self.tiling is not None:
            return self.tiling.size(height, width)
        if self.shortest is None:
            return self.size or (height, width)
        short, long = sorted((height, width))
        other = int(self.shortest * long / short)
        if self.shortest * other > MOST_RESIZED:
            raise InputError("too long to resize", field="image", value=(height, width))
        return (self.shortest, other) if height <= width else (other, self.shortest)


def opened(given: str | Path | Image) -> Image:
    """Returns an image in RGB, upright; raises InputError before decoding one of too many pixels."""
    try:
        from PIL import Image as Pillow
        from PIL import ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise InputError("is not installed", field="pillow", fix="pip install 'asbuilt[media]'") from error
    name = str(given) if isinstance(given, str | Path) else "image"
    try:
        image = Pillow.open(given) if isinstance(given, str | Path) else given
        if image.width * image.height > MOST_PIXELS:
            allowed = f"at most {MOST_PIXELS:,} pixels"
            raise InputError("too large", field=name, value=(image.width, image.height), allowed=allowed)
        return ImageOps.exif_transpose(image).convert("RGB")
    except (UnidentifiedImageError, Pillow.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise InputError(f"cannot be read as an image: {error}", field=name) from error


def _settings(folder: Path) -> tuple[ConfigReader, dict[str, Any]]:
    """Returns a folder's settings of images, and those of its processor of texts and images, if it has any.

    The former stand among the latter, or in a file of their own.
    """
    file = folder / PROCESSOR
    outer = read_object(file, LARGEST, finite=False) if file.is_file() else {}
    if outer.get(WITHIN) is not None:
        return ConfigReader(outer[WITHIN], str(file), f"{WITHIN}."), outer
    file = folder / PREPROCESSOR
    return ConfigReader(read_object(file, LARGEST), str(file)), outer


def _kind(reader: ConfigReader) -> str:
    key = reader.spelled("image_processor_type", "feature_extractor_type") or "image_processor_type"
    said = reader.text(key)
    plain = said.removesuffix("Fast").removesuffix("Pil")
    reader.require(key, plain in DEFAULTS, f"one of {', '.join(DEFAULTS)}")
    return plain


def _factor(reader: ConfigReader) -> float | None:
    factor = reader.number("rescale_factor", default=1 / 255, null=1 / 255, most=1e6)
    return factor if reader.flag("do_rescale", default=True) else None


def _numbers(reader: ConfigReader, key: str, usual: Sequence[float]) -> tuple[float, ...]:
    said: Any = reader.config.get(key) if reader.given(key) else list(usual)
    ok = isinstance(said, list) and len(said) == 3 and all(is_number(x) for x in said)
    reader.require(key, ok and (key == "image_mean" or all(x > 0 for x in said)), "three numbers")
    return tuple(map(float, said))


def _whole_of(reader: ConfigReader, key: str, usual: Mapping[str, int]) -> dict[str, int]:
    """Returns an object of sizes; one number is both sides, or in older configs of CLIP the shortest edge."""
    said: Any = reader.config[key] if reader.given(key) else dict(usual)
    if is_whole(said):
        said = {"shortest_edge": said} if "shortest_edge" in usual else {"height": said, "width": said}
    ok = isinstance(said, dict) and all(x is None or (is_whole(x) and 1 <= x <= MOST_RESIZED) for x in said.values())
    reader.require(key, ok, "an object of whole numbers")
    return {name: value for name, value in said.items() if value is not None}


def _sides(reader: ConfigReader, key: str, usual: Mapping[str, int]) -> tuple[int, int]:
    said = _whole_of(reader, key, usual)
    ok = said.keys() == {"height", "width"} and max(said.values()) <= MOST_SIDE
    reader.require(key, ok, f"a height and a width of at most {MOST_SIDE}")
    return said["height"], said["width"]


def _resized(reader: ConfigReader, usual: Mapping[str, int]) -> dict[str, Any]:
    said = _whole_of(reader, "size", usual)
    if said.keys() != {"shortest_edge"}:
        return {"size": _sides(reader, "size", usual)}
    reader.require("size", said["shortest_edge"] <= MOST_SIDE, f"an edge of at most {MOST_SIDE}")
    return {"shortest": said["shortest_edge"]}


def _cut(reader: ConfigReader, usual: Mapping[str, int]) -> Cut:
    said = _whole_of(reader, "size", usual) if reader.given("size") else dict(usual)
    bounds = [
        reader.size(older, default=said.get(newer, usual[newer]), null=said.get(newer, usual[newer]), most=MOST_RESIZED)
        for older, newer in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    ]
    reader.require("max_pixels", bounds[0] <= bounds[1], f"at least min_pixels = {bounds[0]}")
    sizes = [
        reader.size(key, default=value, most=256)
        for key, value in (("patch_size", 14), ("temporal_patch_size", 2), ("merge_size", 2))
    ]
    return Cut(patch=sizes[0], frames=sizes[1], merge=sizes[2], least=bounds[0], most=bounds[1])


def _rows(reader: ConfigReader, outer: Mapping[str, Any], usual: Mapping[str, int]) -> Rows:
    """Returns how images are divided into rows of patches, squares of which the processor of texts merges.

    Its own file says the patch's size and how many of them are merged along a side, or the settings' `patch_size` does.
    """
    said = _whole_of(reader, "size", usual)
    longest = said.get("longest_edge", said.get("height", 0))
    square = said.keys() == {"longest_edge"} or (said.keys() == {"height", "width"} and len({*said.values()}) == 1)
    reader.require("size", square and longest <= MOST_SIDE // 2, f"a longest_edge of at most {MOST_SIDE // 2}")
    patches = _whole_of(reader, "patch_size", {"height": 16, "width": 16})
    ok = patches.keys() == {"height", "width"} and len({*patches.values()}) == 1
    reader.require("patch_size", ok and patches["height"] <= 256, "the same height and width, at most 256")
    within = ConfigReader(dict(outer), PROCESSOR)
    patch = within.size("patch_size", default=patches["height"], most=256)
    merge = within.size("spatial_merge_size", default=1, most=256)
    reader.only("do_pad", True, False, None, reason="models read as many patches as an image has")
    return Rows(patch=patch, frames=1, merge=merge, least=0, most=MOST_RESIZED, longest=longest)


def _split(reader: ConfigReader, resample: int, outer: Mapping[str, Any]) -> Split:
    """Returns how images are cut into tiles of patches; raises InputError for what makes no whole squares."""
    reader.require("resample", resample in (BILINEAR, BICUBIC), "2 (bilinear) or 3 (bicubic)")
    patch = reader.size("encoder_patch_size", default=16, most=256)
    merge = reader.size("downsample_factor", default=2, most=256)
    square = (patch * merge) ** 2
    most_tokens = MOST_RESIZED // square
    reader.require("encoder_patch_size", most_tokens > 0, f"squares of at most {MOST_RESIZED:,} pixels")
    least = reader.size("min_image_tokens", default=64, most=most_tokens)
    most = reader.size("max_image_tokens", default=256, most=most_tokens)
    reader.require("max_image_tokens", least <= most, f"at least min_image_tokens = {least}")
    side = reader.size("tile_size", default=512, most=MOST_SIDE)
    reader.require("tile_size", side % (patch * merge) == 0, f"a multiple of {patch * merge}, a token's pixels")
    splits = reader.flag("do_image_splitting", default=True)
    tiles = [reader.size(key, default=n, most=MOST_TILES) for key, n in (("min_tiles", 2), ("max_tiles", 10))]
    reader.require("max_tiles", tiles[0] <= tiles[1], f"at least min_tiles = {tiles[0]}")
    fits = side * side * tiles[1] <= MOST_RESIZED
    reader.require("tile_size", fits or not splits, f"tiles of at most {MOST_RESIZED:,} pixels together")
    marked = outer.get("use_image_special_tokens", True)
    if type(marked) is not bool:
        raise InputError(field=f"{PROCESSOR}: use_image_special_tokens", value=marked, allowed="true or false")
    reader.only("do_pad", True, None, reason="models read as many patches as an image has")
    for key in ("size", "max_num_patches", "max_thumbnail_image_patches", "return_row_col_info"):
        reader.irrelevant(key, "the other keys say it, or it changes only what transformers returns")
    return Split(
        patch=patch,
        frames=1,
        merge=merge,
        least=least * square,
        most=most * square,
        side=side,
        least_tiles=tiles[0] if splits else 1,
        most_tiles=tiles[1] if splits else 1,
        thumbnail=reader.flag("use_thumbnail", default=True),
        tolerance=reader.number("max_pixels_tolerance", default=2.0, most=1e6),
        marked=marked,
    )


def _tiling(reader: ConfigReader, usual: Mapping[str, int]) -> Tiling:
    reader.only("do_pad", True, reason="images are padded to whole tiles")
    high, wide = _sides(reader, "size", usual)
    reader.require("size", high == wide, "a square tile")
    most = reader.size("max_image_tiles", default=4, most=MOST_TILES)
    reader.require("size", high * wide * most <= MOST_RESIZED, f"tiles of at most {MOST_RESIZED:,} pixels together")
    return Tiling(side=high, most=most)


def _scaled_first(reader: ConfigReader, resample: int, crops: bool, factor: float | None) -> bool:
    """Returns true; raises InputError for what transformers computes otherwise where it resizes after scaling."""
    reader.require("resample", resample in (BILINEAR, BICUBIC), "2 (bilinear) or 3 (bicubic)")
    reader.require("do_center_crop", not crops, "false: this kind is not cropped")
    reader.require("do_rescale", factor is not None, "true: images are resized as scaled numbers")
    return True


def _declare(reader: ConfigReader) -> None:
    """Declares what changes nothing here, and refuses what would."""
    if "do_pad" not in reader.known:
        reader.only("do_pad", False, None, reason="images are not padded")
    reader.only("do_pan_and_scan", False, None, reason="images are not cut into several")
    reader.only("do_convert_rgb", True, None, reason="images are read in RGB")
    reader.only("default_to_square", True, False, None, reason="the size says it")
    reader.only("input_data_format", None, reason="images are read from files")
    reader.only("data_format", "channels_first", None, reason="models read channels first")
    for key in ("processor_class", "return_tensors", "device", "disable_grouping", "image_seq_length", "feature_size"):
        reader.irrelevant(key, "what transformers returns or how it computes")
    if not {"size", "crop_size", "do_center_crop"} <= reader.known:
        for key in ("size", "crop_size", "do_center_crop"):
            reader.irrelevant(key, "this kind of preparation has none")
    for key in ("image_mean", "image_std", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"):
        reader.irrelevant(key, "not used")
    reader.irrelevant("pan_and_scan_min_ratio_to_activate", "not used")


def _bytes(image: Image) -> Tensor:
    """Returns an image in RGB as bytes (C, H, W)."""
    data = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return data.view(image.height, image.width, 3).permute(2, 0, 1)


def _centre(image: Image, size: tuple[int, int]) -> Image:
    top, left = (image.height - size[0]) // 2, (image.width - size[1]) // 2
    if top < 0 or left < 0:
        raise InputError("smaller than the crop", field="image", value=(image.height, image.width), allowed=str(size))
    return image.crop((left, top, left + size[1], top + size[0]))

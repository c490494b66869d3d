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
from asbuilt.families.shared.reader import ConfigReader, is_number
from asbuilt.files import read_object
from asbuilt.media.cut import MOST_RESIZED, Cut, Grid, Split
from asbuilt.media.pieces import Fitted, Stretched
from asbuilt.media.sizes import (
    BICUBIC,
    BILINEAR,
    MOST_SIDE,
    PROCESSOR,
    cut_of,
    filled_of,
    fitted_of,
    padded_of,
    rows_of,
    sides_of,
    split_of,
    stretched_of,
    tiling_of,
    whole_of,
)
from asbuilt.media.tiles import Tiling
from asbuilt.media.views import Plan, Views, views_of
from asbuilt.nn.image_grid import Patches
from asbuilt.nn.pieces import Pieces
from asbuilt.nn.tiles import Tiles

if TYPE_CHECKING:
    from PIL.Image import Image

PREPROCESSOR = "preprocessor_config.json"
WITHIN = "image_processor"
LARGEST = 1 << 20  # bytes of a preprocessor_config.json
MOST_PIXELS = 100_000_000  # of a file, before any is decoded
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
# What transformers' classes do where a config is silent: means and deviations, the filter, the size, whether to crop.
GRIDS = ("Qwen2VLImageProcessor", "Qwen3VLImageProcessor")
TILED = "MllamaImageProcessor"
SCALED_FIRST = "DINOv3ViTImageProcessor"
SPLIT = "Lfm2VlImageProcessor"
ROWS = "PixtralImageProcessor"
STRETCHED, FITTED = "GotOcr2ImageProcessor", "Llama4ImageProcessor"
PADDED = "Kimi_K25ImageProcessor"
BETWEEN = "MiniMaxM3VLImageProcessor"
FILLED = "Gemma4ImageProcessor"
VIEWS = "Step3p7ImageProcessor"
WORDS = {BETWEEN: ("]<]start of image[>[", "]<]end of image[>[")}
# Those whose images transformers resizes with torch alone.
BY_TORCH = (FITTED, PADDED, BETWEEN, FILLED, VIEWS)
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
    STRETCHED: (CLIP, BICUBIC, {"height": 384, "width": 384}, False),
    FITTED: (HALF, BILINEAR, {"height": 336, "width": 336}, False),
    PADDED: (HALF, BICUBIC, {"max_height": 512, "max_width": 512}, False),
    BETWEEN: (CLIP, BICUBIC, {"shortest_edge": 4 * 28 * 28, "longest_edge": 451584}, False),
    FILLED: (((0.0,) * 3, (1.0,) * 3), BICUBIC, {}, False),
    VIEWS: (CLIP, BILINEAR, {"height": 728, "width": 728}, False),
    **dict.fromkeys(GRIDS, (CLIP, BICUBIC, {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, False)),
}


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is done with an image: `size` (height, width), or its `shortest` edge, a centre `crop`, then `cut`.

    With a `tiling` it is resized within its tiles, padded with zeros below and on the right, and cut into them. With
    `scaled_first` its numbers are not rounded to bytes after it is resized. With a `Split` it is cut into tiles, of
    which each becomes patches, with `Views` into tiles that are resized once more; with `pieces`, into tiles that are
    images for the tower. What is `by_torch` is resized in bytes with torch's weights, which are rounded to other bits
    than Pillow's.
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
    pieces: Stretched | Fitted | None = None
    scaled_first: bool = False
    by_torch: bool = False

    @classmethod
    def read(cls, folder: Path) -> Preparation:
        """Returns what a checkpoint folder says; raises InputError for what is not read or not supported."""
        reader, outer = _settings(folder)
        kind = _kind(reader)
        (mean, std), resample, size, crops = DEFAULTS[kind]
        resizes = reader.flag("do_resize", default=True)
        crops = kind not in GRIDS and reader.flag("do_center_crop", default=crops, null=False)
        normalises = reader.flag("do_normalize", default=kind != FILLED)
        number = reader.size("resample", default=resample, least=0, most=5)
        made: dict[str, Any] = {
            "factor": _factor(reader),
            "mean": _numbers(reader, "image_mean", mean) if normalises else (0.0,) * 3,
            "std": _numbers(reader, "image_std", std) if normalises else (1.0,) * 3,
            "resample": number,
            "by_torch": kind in BY_TORCH,
        }
        if kind in BY_TORCH:
            reader.require("resample", number in (BILINEAR, BICUBIC), "2 (bilinear) or 3 (bicubic)")
        if kind in (*GRIDS, BETWEEN, PADDED, FILLED):
            reader.require("do_resize", resizes, "true: images are resized to whole squares of patches")
            reader.require("do_center_crop", not crops, "false: images of this kind are not cropped")
            made["cut"] = _cut(reader, kind, size, folder)
        elif kind == VIEWS:
            reader.require("do_resize", resizes, "true: images are resized to views")
            reader.require("do_center_crop", not crops, "false: images of this kind are not cropped")
            made["cut"] = views_of(reader, size)
        elif kind in (STRETCHED, FITTED):
            reader.require("do_resize", resizes, "true: images are resized to tiles")
            reader.require("do_center_crop", not crops, "false: images of this kind are not cropped")
            read = stretched_of if kind == STRETCHED else fitted_of
            made["pieces"] = read(reader, ConfigReader(outer, PROCESSOR), size, folder)
        elif kind == ROWS:
            reader.require("do_resize", resizes, "true: images are resized to whole squares of patches")
            reader.require("do_center_crop", not crops, "false: images of this kind are not cropped")
            made["cut"] = rows_of(reader, outer, size)
        elif kind == SPLIT:
            made["cut"] = split_of(reader, number, outer)
        elif kind == TILED:
            reader.require("do_resize", resizes, "true: images are resized to tiles")
            made["tiling"] = tiling_of(reader, size)
        else:
            if kind == SCALED_FIRST:
                made["scaled_first"] = _scaled_first(reader, number, crops, made["factor"])
            made |= _resized(reader, size) if resizes else {}
            made["crop"] = sides_of(reader, "crop_size", {"height": 224, "width": 224}) if crops else None
        _declare(reader)
        reader.finish()
        return cls(**made)

    def of(self, images: Sequence[str | Path | Image]) -> Tensor | Patches | Pieces | Tiles:
        """Returns pixels (N, C, H, W), or patches and grids, or pictures in pieces, or tiles and tilings.

        Raises InputError for an image that cannot be read.
        """
        if self.tiling is not None:
            return self._tiled([opened(image) for image in images], self.tiling)
        if self.pieces is not None:
            return self._pieces([opened(image) for image in images], self.pieces)
        if isinstance(self.cut, Split):
            return self._splits([opened(image) for image in images], self.cut)
        if isinstance(self.cut, Views):
            return self._views([opened(image) for image in images], self.cut)
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

    def _pieces(self, images: Sequence[Image], how: Stretched | Fitted) -> Pieces:
        found: list[Tensor] = []
        shapes = [how.shape(image.height, image.width) for image in images]
        for image, shape in zip(images, shapes, strict=True):
            inner, (high, wide) = how.inside(image.height, image.width, shape), how.tile
            large = self._resized(image, inner)
            canvas = F.pad(large, (0, shape[1] * wide - inner[1], 0, shape[0] * high - inner[0]))
            tiles = [tile for row in canvas.split(high, 1) for tile in row.split(wide, 2)]
            found += [*tiles, self._resized(image, how.tile)] if len(tiles) > 1 else tiles
        scaled = self._scaled_shortly if isinstance(how, Fitted) else self.scaled
        return Pieces(scaled(torch.stack(found)), tuple(map(how.text, shapes)), how.mark)

    def _resized(self, image: Image, size: tuple[int, int]) -> Tensor:
        """Returns an image of a height and width in bytes."""
        if self.by_torch:
            return self._interpolated(_bytes(image), size)
        same = size == (image.height, image.width)
        return _bytes(image if same else image.resize((size[1], size[0]), resample=self.resample))  # type: ignore[arg-type]  # pyright: ignore

    def _splits(self, images: Sequence[Image], cut: Split) -> Patches:
        found: list[tuple[Tensor, Grid]] = []
        texts: list[tuple[str | int, ...]] = []
        for image in images:
            shape = cut.tiles(image.height, image.width)
            own = [cut.patches(self.scaled(one)) for one in self._parts(_bytes(image), cut, shape)]
            texts.append(cut.tiled(shape, [math.prod(grid) // cut.merge**2 for _, grid in own]))
            found += own
        return Patches(torch.cat([values for values, _ in found]), tuple(grid for _, grid in found), tuple(texts))

    def _views(self, images: Sequence[Image], cut: Views) -> Patches:
        plans = [cut.plan(image.height, image.width) for image in images]
        found = [self._seen(_bytes(image), cut, plan) for image, plan in zip(images, plans, strict=True)]
        own = [cut.patches(self.scaled(view)) for views in found for view in views]
        values, grids = zip(*own, strict=True)
        return Patches(torch.cat(values), grids, tuple(map(cut.viewed, plans)))

    def _seen(self, image_CHW: Tensor, cut: Views, plan: Plan) -> list[Tensor]:
        """Returns the tiles of an image, row by row, and it as a whole, in bytes, each as large as its view is."""
        if plan.square is not None:
            image_CHW = F.pad(image_CHW, (0, plan.square - image_CHW.shape[2], 0, plan.square - image_CHW.shape[1]))
        whole = self._interpolated(self._interpolated(image_CHW, plan.whole), (cut.side, cut.side))
        if plan.tile == 0:
            return [whole]
        canvas = self._interpolated(image_CHW, plan.canvas)
        tiles = [tile for row in canvas.split(plan.tile, 1) for tile in row.split(plan.tile, 2)]
        return [*(self._interpolated(tile, (cut.window, cut.window)) for tile in tiles), whole]

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

    def _scaled_shortly(self, x: Tensor) -> Tensor:
        """Returns the numbers that each step rounds to 16 bits, as in the published code of Llama 4."""
        factor = 1.0 if self.factor is None else self.factor
        mean, std = (torch.tensor(values, dtype=torch.bfloat16)[:, None, None] for values in (self.mean, self.std))
        return ((x.to(torch.bfloat16) * factor - mean) / std).to(torch.float32)

    def pixels(self, image: Image, tiles: tuple[int, int] | None = None) -> Tensor:
        """Returns one image (C, H, W) in float32: resized, cropped or padded to `tiles`, scaled and normalised."""
        size = self._size(image.height, image.width)
        if self.by_torch and self.cut is not None:
            high, wide = self.cut.padded(*size)
            return self.scaled(F.pad(self._resized(image, size), (0, wide - size[1], 0, high - size[0])))
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


def _cut(reader: ConfigReader, kind: str, size: Mapping[str, int], folder: Path) -> Cut:
    """Returns how images of this kind are divided into squares of patches."""
    if kind == FILLED:
        return filled_of(reader, folder)
    return padded_of(reader, size) if kind == PADDED else cut_of(reader, size, WORDS.get(kind, ()))


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


def _resized(reader: ConfigReader, usual: Mapping[str, int]) -> dict[str, Any]:
    said = whole_of(reader, "size", usual)
    if said.keys() != {"shortest_edge"}:
        return {"size": sides_of(reader, "size", usual)}
    reader.require("size", said["shortest_edge"] <= MOST_SIDE, f"an edge of at most {MOST_SIDE}")
    return {"shortest": said["shortest_edge"]}


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

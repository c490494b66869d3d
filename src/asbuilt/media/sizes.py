"""What a preprocessor_config.json says of sizes: of patches, tiles and pixels, each bounded before any is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.files import read_object
from asbuilt.media.cut import BREAK, LAST, MOST_RESIZED, Cut, Filled, Padded, Rows, Split
from asbuilt.media.pieces import WHOLE, Fitted, Stretched
from asbuilt.media.tiles import Tiling

PROCESSOR, TOKENIZER = "processor_config.json", "tokenizer_config.json"
LARGEST_TOKENIZER = 1 << 24  # bytes of a tokenizer_config.json
MOST_SIDE = 1 << 14
MOST_TILES = 256
BILINEAR, BICUBIC = 2, 3  # Pillow's numbers
MOST_TOKENS = (70, 140, 280, 560, 1120)  # of an image that fills its tokens


def whole_of(reader: ConfigReader, key: str, usual: Mapping[str, int]) -> dict[str, int]:
    """Returns an object of sizes; one number is both sides, or in older configs of CLIP the shortest edge."""
    said: Any = reader.config[key] if reader.given(key) else dict(usual)
    if is_whole(said):
        said = {"shortest_edge": said} if "shortest_edge" in usual else {"height": said, "width": said}
    ok = isinstance(said, dict) and all(x is None or (is_whole(x) and 1 <= x <= MOST_RESIZED) for x in said.values())
    reader.require(key, ok, "an object of whole numbers")
    return {name: value for name, value in said.items() if value is not None}


def sides_of(reader: ConfigReader, key: str, usual: Mapping[str, int]) -> tuple[int, int]:
    """Returns a height and a width; raises InputError for other sizes."""
    said = whole_of(reader, key, usual)
    ok = said.keys() == {"height", "width"} and max(said.values()) <= MOST_SIDE
    reader.require(key, ok, f"a height and a width of at most {MOST_SIDE}")
    return said["height"], said["width"]


def cut_of(reader: ConfigReader, usual: Mapping[str, int], around: tuple[str, ...] = ()) -> Cut:
    """Returns how images are divided into squares of patches between bounds of pixels, and the words `around` one."""
    replaced = bool(around) and reader.config.get("size") == [672, 672]  # published, and not read by transformers
    said = whole_of(reader, "size", usual) if reader.given("size") and not replaced else dict(usual)
    bounds = [
        reader.size(older, default=said.get(newer, usual[newer]), null=said.get(newer, usual[newer]), most=MOST_RESIZED)
        for older, newer in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    ]
    reader.require("max_pixels", bounds[0] <= bounds[1], f"at least min_pixels = {bounds[0]}")
    sizes = [
        reader.size(key, default=value, most=256)
        for key, value in (("patch_size", 14), ("temporal_patch_size", 2), ("merge_size", 2))
    ]
    return Cut(patch=sizes[0], frames=sizes[1], merge=sizes[2], least=bounds[0], most=bounds[1], around=around)


def padded_of(reader: ConfigReader, usual: Mapping[str, int]) -> Padded:
    """Returns how images are shrunk to a number of patches and padded to whole squares of them."""
    said = whole_of(reader, "size", usual)
    square = said.keys() == {"max_height", "max_width"} and len({*said.values()}) == 1
    reader.require(
        "size", square and said["max_height"] <= MOST_SIDE, f"an equal max_height and max_width, {MOST_SIDE}"
    )
    patch, merge = (reader.size(key, default=n, most=256) for key, n in (("patch_size", 14), ("merge_size", 2)))
    most = reader.size("max_patches", default=16384, most=MOST_RESIZED)
    return Padded(patch=patch, frames=1, merge=merge, least=0, most=most, longest=said["max_height"])


def stretched_of(reader: ConfigReader, outer: ConfigReader, usual: Mapping[str, int], folder: Path) -> Stretched:
    """Returns how images are stretched to tiles; the tokenizer's settings say which words stand around them."""
    reader.irrelevant("crop_to_patches", "transformers' InternVLProcessor cuts images whatever it says")
    tile = sides_of(reader, "size", usual)
    least, most = (reader.size(key, default=n, most=MOST_TILES) for key, n in (("min_patches", 1), ("max_patches", 12)))
    reader.require("max_patches", least <= most, f"at least min_patches = {least}")
    _bounded(reader, tile, most)
    around = _around(folder, start_image_token="<img>", end_image_token="</img>")
    tokens = outer.size("image_seq_length", default=256, most=MOST_RESIZED)
    return Stretched(tile=tile, least=least, most=most, tokens=tokens, around=around)


def filled_of(reader: ConfigReader, folder: Path) -> Filled:
    """Returns how images fill a number of tokens; the tokenizer's settings say which words stand around them."""
    patch = reader.size("patch_size", default=16, most=256)
    merge = reader.size("pooling_kernel_size", default=3, most=256)
    tokens = reader.size("max_soft_tokens", default=280)
    reader.require("max_soft_tokens", tokens in MOST_TOKENS, f"one of {', '.join(map(str, MOST_TOKENS))}")
    most = tokens * (patch * merge) ** 2
    reader.require("patch_size", most <= MOST_RESIZED, f"such that images have at most {MOST_RESIZED:,} pixels")
    around = _around(folder, boi_token="<|image>", eoi_token="<image|>")
    return Filled(patch=patch, frames=1, merge=merge, least=0, most=most, around=around)


def _around(folder: Path, **usual: str) -> tuple[str, str]:
    """Returns the words that a tokenizer's settings put before and after an image, by their keys' usual ones."""
    file = folder / TOKENIZER
    words = ConfigReader(read_object(file, LARGEST_TOKENIZER, finite=False) if file.is_file() else {}, str(file))
    start, end = (_named(words, key, word) for key, word in usual.items())
    return start, end


def _named(words: ConfigReader, key: str, usual: str) -> str:
    """Returns the word that a tokenizer's settings give a name, there or among their extra special tokens."""
    extra = words.config.get("extra_special_tokens")
    if isinstance(extra, dict) and key in extra and key not in words.config:
        words = ConfigReader(extra, words.where, "extra_special_tokens.")
    return words.text(key, default=usual)


def fitted_of(reader: ConfigReader, outer: ConfigReader, usual: Mapping[str, int], folder: Path) -> Fitted:
    """Returns how images are fitted on tiles; the settings of texts and images say how many tokens one has."""
    both = reader.flag("do_rescale", default=True) and reader.flag("do_normalize", default=True)
    reader.require("do_normalize", both, "true, as do_rescale")
    tile = sides_of(reader, "size", usual)
    reader.require("size", tile[0] == tile[1], "a square tile")
    most = reader.size("max_patches", default=16, most=MOST_TILES)
    _bounded(reader, tile, most)
    patch = outer.size("patch_size", default=14, most=MOST_SIDE)
    ratio = outer.number("pixel_shuffle_ratio", default=0.5, above=1 / 256, most=1.0)
    tokens = (tile[0] // patch) ** 2 // round(1 / ratio**2)
    outer.require("patch_size", tokens > 0, "such that a tile has a token")
    mark, largest = outer.text("image_token", default=WHOLE), reader.flag("resize_to_max_canvas", default=False)
    return Fitted(tile=tile, most=most, tokens=tokens, largest=largest, mark=mark)


def _bounded(reader: ConfigReader, tile: tuple[int, int], most: int) -> None:
    fits = math.prod(tile) * (most + 1) <= MOST_RESIZED
    reader.require("size", fits, f"tiles of at most {MOST_RESIZED:,} pixels together")


def rows_of(reader: ConfigReader, outer: Mapping[str, Any], usual: Mapping[str, int]) -> Rows:
    """Returns how images are divided into rows of patches, squares of which the processor of texts merges.

    Its own file says the patch's size, how many of them are merged along a side and the words after rows, or the
    settings' `patch_size` does.
    """
    said = whole_of(reader, "size", usual)
    longest = said.get("longest_edge", said.get("height", 0))
    square = said.keys() == {"longest_edge"} or (said.keys() == {"height", "width"} and len({*said.values()}) == 1)
    reader.require("size", square and longest <= MOST_SIDE // 2, f"a longest_edge of at most {MOST_SIDE // 2}")
    patches = whole_of(reader, "patch_size", {"height": 16, "width": 16})
    ok = patches.keys() == {"height", "width"} and len({*patches.values()}) == 1
    reader.require("patch_size", ok and patches["height"] <= 256, "the same height and width, at most 256")
    within = ConfigReader(dict(outer), PROCESSOR)
    patch = within.size("patch_size", default=patches["height"], most=256)
    merge = within.size("spatial_merge_size", default=1, most=256)
    after = within.text("image_break_token", default=BREAK), within.text("image_end_token", default=LAST)
    reader.only("do_pad", True, False, None, reason="models read as many patches as an image has")
    return Rows(patch=patch, frames=1, merge=merge, least=0, most=MOST_RESIZED, longest=longest, after=after)


def split_of(reader: ConfigReader, resample: int, outer: Mapping[str, Any]) -> Split:
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


def tiling_of(reader: ConfigReader, usual: Mapping[str, int]) -> Tiling:
    """Returns how images are fitted within square tiles."""
    reader.only("do_pad", True, reason="images are padded to whole tiles")
    high, wide = sides_of(reader, "size", usual)
    reader.require("size", high == wide, "a square tile")
    most = reader.size("max_image_tiles", default=4, most=MOST_TILES)
    reader.require("size", high * wide * most <= MOST_RESIZED, f"tiles of at most {MOST_RESIZED:,} pixels together")
    return Tiling(side=high, most=most)

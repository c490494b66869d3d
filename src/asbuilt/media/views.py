"""A picture as one square, and a large or long one cut into squares before it: views of two sizes for one tower.

StepFun 2026, the published code of Step-3.7-Flash. Ties and rounding are those of transformers' processor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from asbuilt.errors import InputError
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.media.cut import MOST_RESIZED, Cut, Sides
from asbuilt.media.sizes import MOST_SIDE, MOST_TILES, sides_of

THIN, LONG = 32, 4  # pixels of a side, and how many times as long the other one is, of what becomes a square first
PATCH_START, PATCH_END, NEXT_ROW = "<patch_start>", "<patch_end>", "<patch_newline>"
START, END = "<im_start>", "<im_end>"


class Plan(NamedTuple):
    """What becomes of a picture.

    It is padded with zeros to a `square`, if there is one. As a whole it is resized to `whole`, and then to one view;
    it is resized to a `canvas` too, which is cut into tiles of `tile` x `tile`, unless that is 0.
    """

    square: int | None
    whole: Sides
    canvas: Sides
    tile: int

    @property
    def rows_columns(self) -> Sides:
        """Rows and columns of tiles; a side shorter than a tile has one."""
        if self.tile == 0:
            return 0, 0
        return max(1, self.canvas[0] // self.tile), max(1, self.canvas[1] // self.tile)


@dataclass(frozen=True, kw_only=True)
class Views(Cut):
    """Patches of a picture as a square of `side` pixels, after those of its tiles, each resized to `window` pixels.

    A picture is first shrunk to a `longest` side. A token has `stride` x `stride` patches of the tower.
    """

    side: int
    window: int
    longest: int
    stride: int

    def plan(self, height: int, width: int) -> Plan:
        """Returns what becomes of a picture; raises InputError for one too long to be cut or resized."""
        given, square = (height, width), None
        if min(given) < THIN and max(given) > LONG * min(given):
            height = width = square = max(given)
        if max(height, width) > self.longest:
            scale = self.longest / max(height, width)
            height, width = int(height * scale), int(width * scale)
        tile = self._tile(height, width)
        canvas = (self._snapped(height, tile), self._snapped(width, tile))
        plan = Plan(square, (height, width), canvas, tile)
        areas = [height * width, math.prod(canvas), (square or 0) ** 2]
        if min(height, width) == 0 or max(areas) > MOST_RESIZED or math.prod(plan.rows_columns) > MOST_TILES:
            allowed = f"one of at most {MOST_TILES} tiles and, resized, {MOST_RESIZED:,} pixels"
            raise InputError("too long or too large", field="image", value=given, allowed=allowed)
        return plan

    def _tile(self, height: int, width: int) -> int:
        """Returns the side of a tile; 0 for a picture that is not cut."""
        short, long = sorted((height, width))
        if long <= self.side:
            return short if 2 * long > 3 * short else 0
        return min(short, self.window) if long > LONG * short else self.window

    def _snapped(self, side: int, tile: int) -> int:
        """Returns a side in whole tiles, one more for a rest of more than a fifth; a shorter one stays."""
        if tile == 0 or side < tile:
            return side
        return tile * (side // tile + (side % tile > 0.2 * tile))

    def viewed(self, plan: Plan) -> tuple[str | int, ...]:
        """Returns what stands for a picture in a text: tiles between words, a word after each row, and the whole."""
        whole, part = ((side // (self.patch * self.stride)) ** 2 for side in (self.side, self.window))
        rows, columns = plan.rows_columns
        said: list[str | int] = []
        for _ in range(rows):
            said += [*(PATCH_START, part, PATCH_END) * columns, NEXT_ROW]
        return (*said[:-1], START, whole, END)


def views_of(reader: ConfigReader, usual: Mapping[str, int]) -> Views:
    """Returns how pictures become views; raises InputError for sizes that are not of whole tokens."""
    patch = reader.size("vision_patch_size", default=14, most=256)
    stride = reader.size("downsampler_stride", default=4, most=256)
    high, wide = sides_of(reader, "size", usual)
    window = reader.size("patch_size", default=504, most=MOST_SIDE)
    unit = patch * stride
    reader.require("size", high == wide and high % unit == 0, f"a square, a multiple of {unit}, a token's pixels")
    fits = window % unit == 0 and window**2 * MOST_TILES <= MOST_RESIZED
    most = math.isqrt(MOST_RESIZED // MOST_TILES)
    reader.require("patch_size", fits, f"a multiple of {unit}, a token's pixels, up to {most}")
    longest = reader.size("max_image_size", default=3024, most=MOST_SIDE)
    return Views(
        patch=patch,
        frames=1,
        merge=1,
        least=0,
        most=MOST_RESIZED,
        side=high,
        window=window,
        longest=longest,
        stride=stride,
    )

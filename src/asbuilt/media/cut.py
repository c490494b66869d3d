"""An image divided into patches of a grid of its own size, and a large one into tiles of which each has such a grid.

Wang et al. 2024, Qwen2-VL (arXiv 2409.12191), section 2.1; Liquid AI 2025, LFM2 (arXiv 2511.23404): its tiles
have the aspect ratio that is nearest to the image's. Ties and rounding are those of transformers' processors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from asbuilt.errors import InputError

MOST_ASPECT = 200
MOST_RESIZED = 1 << 26  # pixels of an image after it is resized
Grid = tuple[int, int, int]  # frames, rows, columns
Sides = tuple[int, int]  # a height and a width, or rows and columns
START, END, THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
BREAK, LAST = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How an image becomes patches: pixels per side of a patch, frames, patches per side of a square, pixel bounds.

    In a text it stands between two words `around` it, if there are any.
    """

    patch: int
    frames: int
    merge: int
    least: int
    most: int
    around: tuple[str, ...] = ()

    def text(self, grid: Grid) -> tuple[str | int, ...]:
        """Returns what stands for an image in a text: words, and how many tokens."""
        return (*self.around[:1], math.prod(grid) // self.merge**2, *self.around[1:])

    def padded(self, height: int, width: int) -> Sides:
        """Returns the size of a resized image with zeros below and on the right: none."""
        return height, width

    def size(self, height: int, width: int) -> Sides:
        """Returns the nearest size of whole squares within the bounds; raises InputError for a very long image."""
        if max(height, width) > MOST_ASPECT * min(height, width):
            allowed = f"one side at most {MOST_ASPECT} times the other"
            raise InputError(field="image", value=(height, width), allowed=allowed)
        return self._within(height, width, 0)

    def _within(self, height: int, width: int, shortest: int) -> Sides:
        unit = self.patch * self.merge
        high, wide = (max(shortest, round(side / unit) * unit) for side in (height, width))
        if high * wide > self.most:
            shrink = math.sqrt(height * width / self.most)
            return tuple(max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))  # type: ignore[return-value]  # pyright: ignore
        if high * wide < self.least:
            grow = math.sqrt(self.least / (height * width))
            return tuple(math.ceil(side * grow / unit) * unit for side in (height, width))  # type: ignore[return-value]  # pyright: ignore
        return high, wide

    def patches(self, image_CHW: Tensor) -> tuple[Tensor, Grid]:
        """Returns the patches (P, D), square by square, and the grid (1, rows, columns)."""
        channels, p, m = len(image_CHW), self.patch, self.merge
        rows, columns = image_CHW.shape[1] // p, image_CHW.shape[2] // p
        tiles = image_CHW.view(channels, rows // m, m, p, columns // m, m, p).permute(1, 4, 2, 5, 0, 3, 6)
        repeated = tiles.unsqueeze(5).expand(*tiles.shape[:5], self.frames, p, p)
        return repeated.reshape(rows * columns, -1), (1, rows, columns)


@dataclass(frozen=True, kw_only=True)
class Split(Cut):
    """Patches of an image, or if it is large, of tiles of `side` x `side` pixels and of the whole image, smaller.

    An image is large if it has more than `tolerance` times the most pixels of one; then it is resized to `least_tiles`
    to `most_tiles` tiles, after which it stands as a whole if there is a `thumbnail`. `marked` says that words stand
    around an image and before its tiles.
    """

    side: int
    least_tiles: int
    most_tiles: int
    thumbnail: bool
    tolerance: float
    marked: bool

    def size(self, height: int, width: int) -> Sides:
        """Returns the nearest size of whole squares within the bounds; raises InputError for a very long image."""
        found = self._within(height, width, self.patch * self.merge)
        if found[0] * found[1] > MOST_RESIZED:
            raise InputError("too long to resize", field="image", value=(height, width))
        return found

    def tiles(self, height: int, width: int) -> Sides | None:
        """Returns the rows and columns of tiles of an image; None for an image that is not cut.

        Of tilings equally near to its aspect ratio it is the last, counted by tiles, of which the image fills half.
        """
        unit = self.patch * self.merge
        resized = math.prod(max(self.patch, round(side / unit) * unit) for side in (height, width))
        if self.most_tiles == 1 or resized <= self.most * self.tolerance:
            return None
        some = range(self.least_tiles, self.most_tiles + 1)
        # Of as many tiles, in the order of a set: there a tie between 1 x 4 and 2 x 2 is decided by it.
        shapes = {(w, h) for n in some for w in range(1, n + 1) for h in range(1, n + 1) if w * h in some}
        return nearest_ratio(sorted(shapes, key=math.prod), (height, width), self.side**2)

    def tiled(self, tiles: Sides | None, counts: Sequence[int]) -> tuple[str | int, ...]:
        """Returns what stands for an image in a text: words, and the tokens of its tiles, so many of each."""
        if tiles is None or tiles == (1, 1):
            said: list[str | int] = [*counts]
        else:
            places = [(row, column) for row in range(tiles[0]) for column in range(tiles[1])]
            marks = [f"<|img_row_{row + 1}_col_{column + 1}|>" for row, column in places]
            marks += [THUMBNAIL] * self.thumbnail
            said = [one for mark, n in zip(marks, counts, strict=True) for one in (mark, n)]
        return (START, *said, END) if self.marked else tuple(one for one in said if isinstance(one, int))


@dataclass(frozen=True, kw_only=True)
class Rows(Cut):
    """Patches of an image that is only ever shrunk, to a longest side; each row of tokens ends with a word.

    `after` are the word after each row but the last, and the one after that. Agrawal et al. 2024, Pixtral 12B (arXiv
    2410.07073), section 2.1.
    """

    longest: int
    after: tuple[str, str] = (BREAK, LAST)

    def size(self, height: int, width: int) -> Sides:
        """Returns the size within the longest side, each side rounded up to whole squares."""
        unit, ratio = self.patch * self.merge, max(height, width) / self.longest
        sides = (height, width) if ratio <= 1 else (math.floor(height / ratio), math.floor(width / ratio))
        return tuple(((side - 1) // unit + 1) * unit for side in sides)  # type: ignore[return-value]  # pyright: ignore

    def text(self, grid: Grid) -> tuple[str | int, ...]:
        """Returns what stands for an image in a text: rows of tokens, with words between them and at the end."""
        _, rows, columns = grid
        said = [one for _ in range(rows // self.merge) for one in (columns // self.merge, self.after[0])]
        return (*said[:-1], self.after[1])


@dataclass(frozen=True, kw_only=True)
class Padded(Cut):
    """Patches of an image that is only ever shrunk, and padded with zeros to whole squares; `longest` is in patches.

    `most` are patches too. Kimi Team 2025, Kimi-VL (arXiv 2504.07491), section 2.1.
    """

    longest: int

    def size(self, height: int, width: int) -> Sides:
        """Returns the size within the bounds; raises InputError for what would still be too large when padded."""
        whole = max(1.0, height // self.patch) * max(1.0, width // self.patch)
        most = self.longest * self.patch
        scale = min(1.0, math.sqrt(self.most / whole), most / height, most / width)
        high, wide = (min(max(1, int(side * scale)), most) for side in (height, width))
        if math.prod(self.padded(high, wide)) > MOST_RESIZED:
            raise InputError("too large for its patches", field="image", value=(height, width))
        return high, wide

    def padded(self, height: int, width: int) -> Sides:
        """Returns the size in whole squares."""
        unit = self.patch * self.merge
        return -(-height // unit) * unit, -(-width // unit) * unit


@dataclass(frozen=True, kw_only=True)
class Filled(Cut):
    """Patches of an image shrunk or enlarged to as many whole squares as `most` pixels hold at its own proportions.

    Where less than one square would be left of a side, it has one, and the other side all that there may be. Gemma Team
    2026, as published.
    """

    def size(self, height: int, width: int) -> Sides:
        """Returns the size in whole squares."""
        unit, scale = self.patch * self.merge, math.sqrt(self.most / (height * width))
        high, wide = (math.floor(scale * side / unit) for side in (height, width))
        longest = self.most // unit**2
        if high == 0:
            high, wide = 1, longest
        elif wide == 0:
            high, wide = longest, 1
        return high * unit, wide * unit


def nearest_ratio(shapes: Iterable[Sides], size: Sides, tile: int) -> Sides:
    """Returns the rows and columns, of `shapes` of columns and rows, with the ratio nearest to an image's.

    Of equally near ones it is the last, of which with tiles of so many pixels the image fills half.
    """
    height, width = size
    best, nearest = (1, 1), math.inf
    for columns, rows in shapes:
        off = abs(width / height - columns / rows)
        fills = height * width > 0.5 * tile * rows * columns
        if off < nearest or (off == nearest and fills):
            best, nearest = (rows, columns), off
    return best

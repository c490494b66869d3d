"""A picture cut into tiles that are images of one size for a tower, and the picture as a whole beside them.

Chen et al. 2024, InternVL 1.5 (arXiv 2404.16821), section 3.3; Meta 2025, the Llama 4 model card. Ties and rounding are
those of transformers' processors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from asbuilt.media.cut import END, START, Sides, nearest_ratio

Text = tuple[str | int, ...]
WHOLE, NEXT_TILE, NEXT_ROW = "<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>"


@dataclass(frozen=True, kw_only=True)
class Stretched:
    """A picture stretched to `least` to `most` tiles of a `tile`'s height and width, as near to its ratio as possible.

    With more than one tile it stands after them as a whole, stretched to one. Each has `tokens`, between two `around`.
    """

    tile: Sides
    least: int
    most: int
    tokens: int
    around: tuple[str, str]
    mark: str | None = None

    def shape(self, height: int, width: int) -> Sides:
        """Returns the rows and columns of tiles."""
        some, sides = range(self.least, self.most + 1), range(1, self.most + 1)
        shapes = [(columns, rows) for columns in sides for rows in sides if columns * rows in some]
        return nearest_ratio(sorted(shapes, key=math.prod), (height, width), math.prod(self.tile))

    def inside(self, height: int, width: int, shape: Sides) -> Sides:
        """Returns the height and width of the picture in its tiles: those of all of them."""
        return shape[0] * self.tile[0], shape[1] * self.tile[1]

    def text(self, shape: Sides) -> Text:
        """Returns what stands for a picture in a text."""
        n = math.prod(shape)
        return self.around[0], self.tokens * (n + (n > 1)), self.around[1]


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A picture on a canvas of at most `most` square tiles, with zeros below or on the right of it.

    It is enlarged least, or else shrunk least; with `largest`, enlarged most. With more than one tile it stands after
    them as a whole, stretched to one.
    """

    tile: Sides
    most: int
    tokens: int
    largest: bool
    mark: str | None = WHOLE

    def shape(self, height: int, width: int) -> Sides:
        """Returns the rows and columns of tiles: of equally good ones the fewest."""
        shapes = [*_by_ratio(self.most)]
        rows_columns = torch.tensor(shapes)  # scales are 32-bit numbers, which decides ties
        heights, widths = (rows_columns * self.tile[0]).unbind(1)
        scales = torch.minimum(heights / height, widths / width)
        larger = scales[scales >= 1]
        best = scales.max() if not len(larger) or self.largest else larger.min()
        found = [shape for shape, same in zip(shapes, (scales == best).tolist(), strict=True) if same]
        return min(found, key=math.prod)

    def inside(self, height: int, width: int, shape: Sides) -> Sides:
        """Returns the height and width of the picture on its canvas, of its own ratio.

        Unless `largest`, a side between one tile and the canvas stays as it is, and the other follows.
        """
        limits = [self._limit(side, n) for side, n in zip((height, width), shape, strict=True)]
        high, wide = limits[0] / height, limits[1] / width
        if wide < high:
            return max(1, min(math.floor(height * wide), int(limits[0]))), int(limits[1])
        return int(limits[0]), max(1, min(math.floor(width * high), int(limits[1])))

    def _limit(self, side: int, n: int) -> int | torch.Tensor:
        """Returns the most pixels of a side; that of the canvas divides as a 32-bit number, as in transformers."""
        canvas, own = n * self.tile[0], max(side, self.tile[0])
        return own if own <= canvas and not self.largest else torch.tensor(canvas)

    def text(self, shape: Sides) -> Text:
        """Returns what stands for a picture in a text: tiles with words between them and after each row."""
        said: list[str | int] = []
        for _ in range(shape[0] if math.prod(shape) > 1 else 0):
            said += [*[one for _ in range(shape[1]) for one in (self.tokens, NEXT_TILE)][:-1], NEXT_ROW]
        return START, *said, WHOLE, self.tokens, END


def _by_ratio(most: int) -> Iterable[Sides]:
    """Yields rows and columns of at most so many tiles, those of one ratio together, from the most tiles on."""
    found: dict[float, list[Sides]] = {}
    for n in range(most, 0, -1):
        for rows in (rows for rows in range(1, n + 1) if n % rows == 0):
            found.setdefault(rows / (n // rows), []).append((rows, n // rows))
    return (shape for shapes in found.values() for shape in shapes)

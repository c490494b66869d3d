"""An image cut into tiles of one square size: which tiling it has, and how large it is in it, as Llama 3.2 Vision does.

Dubey et al. 2024, Llama 3 (arXiv 2407.21783), section 7. Ties and rounding are those of transformers' processor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tiles of `side` x `side` pixels, at most `most` of an image."""

    side: int
    most: int

    def shape(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns of tiles: those that enlarge the image least, or else shrink it least.

        Among equal ones the fewest tiles.
        """
        sides = range(1, self.most + 1)
        scales = {
            (rows, columns): min(rows * self.side / height, columns * self.side / width)
            for rows in sides
            for columns in sides
            if rows * columns <= self.most
        }
        larger = [scale for scale in scales.values() if scale >= 1]
        best = min(larger) if larger else max(scales.values())
        return min((shape for shape, scale in scales.items() if scale == best), key=lambda shape: shape[0] * shape[1])

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width of the image within its tiles, of which it may leave some of one side free.

        A side that is between one tile and the tiling's stays as it is; the other follows.
        """
        rows, columns = self.shape(height, width)
        high = min(max(height, self.side), rows * self.side)
        wide = min(max(width, self.side), columns * self.side)
        if wide / width < high / height:
            return min(math.floor(height * (wide / width)) or 1, high), wide
        return high, min(math.floor(width * (high / height)) or 1, wide)

    def tiles(self, image_CHW: Tensor, shape: tuple[int, int]) -> Tensor:
        """Returns (most, C, side, side): the tiles row by row, and zeros in place of absent ones."""
        rows, columns = shape
        tiles = image_CHW.unflatten(2, (columns, self.side)).unflatten(1, (rows, self.side)).permute(1, 3, 0, 2, 4)
        return F.pad(tiles.flatten(0, 1), (0, 0) * 3 + (0, self.most - rows * columns))

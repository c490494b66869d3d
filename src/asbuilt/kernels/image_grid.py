"""Images as grids of patches: their order in files, windows, coordinates, and positions in a text.

Shapes: frames F, rows H and columns W of patches, width M; patches stand row by row unless said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Grid = tuple[int, int]
Taps = tuple[Tensor, Tensor]  # places along one axis, and their weights


def row_by_row(x_FPM: Tensor, grid: Grid, merge: int) -> Tensor:
    """Returns patches that stand square by square of `merge` x `merge`, as processors give them, row by row."""
    rows, columns = grid
    x = x_FPM.unflatten(1, (rows // merge, columns // merge, merge, merge)).transpose(2, 3)
    return x.reshape(x_FPM.shape)


def coordinates(grid: Grid, device: torch.device) -> Tensor:
    """Returns time (0), row and column of each patch, (3, 1, H * W)."""
    places = torch.arange(grid[0] * grid[1], device=device)
    return torch.stack((torch.zeros_like(places), places // grid[1], places % grid[1]))[:, None]


def _pieces(grid: Grid, side: int) -> Iterator[tuple[slice, slice, Grid]]:
    """Yields the rectangles (rows, columns) that windows of one size fill, and that size: at most four."""

    def cuts(length: int) -> list[tuple[slice, int]]:
        whole = length // side * side
        ends = [(slice(0, whole), side), (slice(whole, length), length - whole)]
        return [(part, size) for part, size in ends if part.stop > part.start]

    for rows, height in cuts(grid[0]):
        for columns, width in cuts(grid[1]):
            yield rows, columns, (height, width)


def windows(x_FPM: Tensor, grid: Grid, side: int) -> list[tuple[Tensor, Grid]]:
    """Returns the windows of one size as a batch (F * windows, patches, M), and that size, for each size."""
    x_FHWM, cut = x_FPM.unflatten(1, grid), []
    for rows, columns, size in _pieces(grid, side):
        piece = x_FHWM[:, rows, columns].unflatten(2, (-1, size[1])).unflatten(1, (-1, size[0])).transpose(2, 3)
        cut.append((piece.reshape(-1, size[0] * size[1], x_FPM.shape[-1]), size))
    return cut


def joined(parts: Sequence[Tensor], grid: Grid, side: int) -> Tensor:
    """Returns what `windows` cut, together again (F, P, M)."""
    width, bands = parts[0].shape[-1], {}
    for part, (rows, columns, size) in zip(parts, _pieces(grid, side), strict=True):
        high, wide = rows.stop - rows.start, columns.stop - columns.start
        piece = part.view(-1, high // size[0], wide // size[1], *size, width).transpose(2, 3)
        bands.setdefault(rows.start, []).append(piece.reshape(-1, high, wide, width))
    lines = [band[0] if len(band) == 1 else torch.cat(band, 2) for band in bands.values()]
    return (lines[0] if len(lines) == 1 else torch.cat(lines, 1)).flatten(1, 2)


def windowed_reference(x_PM: Tensor, grid: Grid, side: int) -> list[Tensor]:
    """Returns the same windows of one frame one by one, each (patches, M), as the plain form of `windows`."""
    x = x_PM.unflatten(0, grid)
    corners = [(r, c) for r in range(0, grid[0], side) for c in range(0, grid[1], side)]
    return [x[r : r + side, c : c + side].flatten(0, 1) for r, c in corners]


def taps(grid: Grid, n_side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the four places (4, P) in a square table around each patch, and their weights, which sum to 1."""
    axes = []
    for length in grid:
        at = torch.arange(length, dtype=torch.float64, device=device) * (n_side - 1) / max(length - 1, 1)
        low = at.floor().clamp(max=max(n_side - 2, 0))
        high = (low + 1).clamp(max=n_side - 1)
        axes.append(((low.long(), 1 - (at - low)), (high.long(), at - low)))
    return _crossed(axes[0], axes[1], n_side)


def linear_taps(grid: Grid, n_side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the four places (4, P) in a square table around each patch, and their weights, which sum to 1.

    Edges are repeated; the centres of patches lie within the table's area.
    """
    axes = []
    for length in grid:
        at = (torch.arange(length, dtype=torch.float64, device=device) + 0.5) * n_side / length - 0.5
        low = at.clamp(min=0).floor()
        beyond = at.clamp(min=0) - low
        axes.append([(low.long(), 1 - beyond), ((low + 1).clamp(max=n_side - 1).long(), beyond)])
    return _crossed(axes[0], axes[1], n_side)


def cubic_taps(grid: Grid, n_side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the sixteen places (16, P) in a square table around each patch, and their weights, which sum to 1.

    Cubic convolution (Keys 1981) with a = -3/4 and edges repeated; the centres of patches lie within the table's area.
    """
    axes = []
    for length in grid:
        at = (torch.arange(length, dtype=torch.float64, device=device) + 0.5) * n_side / length - 0.5
        near = [at.floor() + step for step in (-1, 0, 1, 2)]
        axes.append([(place.clamp(0, n_side - 1).long(), _keys((at - place).abs())) for place in near])
    return _crossed(axes[0], axes[1], n_side)


def triangle_taps(grid: Grid, n_side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the places in a square table near each patch, and their weights, which sum to 1.

    A weight falls from 1 at the patch to 0 at the distance of the next patch, or of the next vector if that is more.
    """
    axes = []
    for length in grid:
        scale = n_side / length
        reach = max(1.0, scale)
        at = (torch.arange(length, dtype=torch.float64, device=device) + 0.5) * scale - 0.5
        places = (at - reach).floor() + 1 + torch.arange(math.ceil(2 * reach), device=device)[:, None]
        weights = (1 - (places - at).abs() / reach).clamp(min=0)
        weights = weights.masked_fill((places < 0) | (places >= n_side), 0)
        axes.append([*zip(places.clamp(0, n_side - 1).long(), weights / weights.sum(0), strict=True)])
    return _crossed(axes[0], axes[1], n_side)


def _keys(x: Tensor, a: float = -0.75) -> Tensor:
    """Returns the weight of a vector at a distance x of at most 2."""
    within = ((a + 2) * x - (a + 3)) * x * x + 1
    return torch.where(x <= 1, within, (((x - 5) * x + 8) * x - 4) * a)


def _crossed(rows: Sequence[Taps], columns: Sequence[Taps], n_side: int) -> tuple[Tensor, Tensor]:
    """Returns the places in a square table and their weights, of those along both axes."""
    pairs = [(row, column) for row in rows for column in columns]
    places = torch.stack([(r[0][:, None] * n_side + c[0]).flatten() for r, c in pairs])
    return places, torch.stack([(r[1][:, None] * c[1]).flatten() for r, c in pairs])


def text_positions(
    images: Sequence[tuple[int, tuple[int, int, int]]], tokens: int, start: int, device: torch.device
) -> tuple[Tensor, int]:
    """Returns the coordinates (3, tokens) of a row's tokens from position `start` on, and that of the token after.

    `images` are the first token and the grid (frames, rows, columns) of each image, in order. An image's coordinates
    begin where a text token's would, and the text after it continues at the largest plus 1 (arXiv 2409.12191, 2.1).
    """
    pieces, done, at = [], 0, start
    for first, grid in images:
        pieces.append(_line(at, first - done, device))
        at += first - done
        axes = torch.meshgrid(*(torch.arange(n, device=device) for n in grid), indexing="ij")
        pieces.append(torch.stack(axes).flatten(1) + at)
        done, at = first + grid[0] * grid[1] * grid[2], at + max(grid[1:])
    pieces.append(_line(at, tokens - done, device))
    return torch.cat(pieces, 1), at + tokens - done


def _line(start: int, tokens: int, device: torch.device) -> Tensor:
    return torch.arange(start, start + tokens, device=device).expand(3, -1)

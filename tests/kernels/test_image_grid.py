"""Grids of patches: order, windows, interpolation and coordinates, each beside its plain form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from asbuilt.kernels.image_grid import (
    cubic_taps,
    joined,
    linear_taps,
    row_by_row,
    taps,
    text_positions,
    triangle_taps,
    windowed_reference,
    windows,
)
from asbuilt.spec import GridPositions

GRIDS = [(4, 4), (4, 6), (7, 5), (1, 9), (9, 1), (3, 3), (8, 12)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("side", [1, 2, 4])
def test_windows_are_cut_and_joined(grid: tuple[int, int], side: int) -> None:
    x = torch.randn(2, grid[0] * grid[1], 3)
    cut = windows(x, grid, side)
    assert len(cut) <= 4
    assert all(part.shape[1] == size[0] * size[1] for part, size in cut)
    assert torch.equal(joined([part for part, _ in cut], grid, side), x)
    found = sorted(tuple(window.flatten().tolist()) for part, _ in windows(x[:1], grid, side) for window in part)
    assert found == sorted(tuple(window.flatten().tolist()) for window in windowed_reference(x[0], grid, side))


def test_squares_of_a_file_become_rows() -> None:
    rows = torch.arange(24).view(1, 24, 1)
    squares = [r * 6 + c for R in range(0, 4, 2) for C in range(0, 6, 2) for r in (R, R + 1) for c in (C, C + 1)]
    assert torch.equal(row_by_row(rows[:, squares], (4, 6), 2), rows)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("side", [1, 2, 5])
def test_positions_are_interpolated_with_corners_aligned(grid: tuple[int, int], side: int) -> None:
    table = torch.randn(side**2, 3, dtype=torch.float64)
    want = F.interpolate(table.T.view(1, 3, side, side), size=grid, mode="bilinear", align_corners=True)
    places, weights = taps(grid, side, table.device)
    have = (table[places] * weights[..., None]).sum(0)
    torch.testing.assert_close(have, want[0].flatten(1).T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("side", [1, 2, 5, 16])
def test_positions_are_interpolated_linearly(grid: tuple[int, int], side: int) -> None:
    table = torch.randn(side**2, 3, dtype=torch.float64)
    want = F.interpolate(table.T.view(1, 3, side, side), size=grid, mode="bilinear", align_corners=False)
    places, weights = linear_taps(grid, side, table.device)
    have = (table[places] * weights[..., None]).sum(0)
    torch.testing.assert_close(have, want[0].flatten(1).T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("side", [1, 2, 5, 8])
def test_positions_are_interpolated_by_cubics(grid: tuple[int, int], side: int) -> None:
    table = torch.randn(side**2, 3, dtype=torch.float64)
    want = F.interpolate(table.T.view(1, 3, side, side), size=grid, mode="bicubic", align_corners=False)
    places, weights = cubic_taps(grid, side, table.device)
    have = (table[places] * weights[..., None]).sum(0)
    torch.testing.assert_close(have, want[0].flatten(1).T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("side", [1, 2, 5, 8, 16])
def test_positions_are_interpolated_by_triangles(grid: tuple[int, int], side: int) -> None:
    table = torch.randn(side**2, 3, dtype=torch.float64)
    image = table.T.reshape(1, 3, side, side)
    if grid[1] == 1:  # torch errs where one column is left, so rows and columns change places
        want = F.interpolate(image.mT.contiguous(), size=grid[::-1], mode="bilinear", antialias=True).mT
    else:
        want = F.interpolate(image.contiguous(), size=grid, mode="bilinear", antialias=True)
    places, weights = triangle_taps(grid, side, table.device)
    have = (table[places] * weights[..., None]).sum(0)
    torch.testing.assert_close(have, want[0].flatten(1).T, rtol=0, atol=1e-12)
    part = GridPositions(n_side=side, d_model=3, interpolation="triangle")
    assert len(places) == part.n_taps(grid[0]) * part.n_taps(grid[1])


def test_text_continues_after_the_largest_coordinate() -> None:
    found, end = text_positions([(2, (1, 2, 3)), (9, (2, 1, 1))], 12, 10, torch.device("cpu"))
    assert found.tolist() == [
        [10, 11, 12, 12, 12, 12, 12, 12, 15, 16, 17, 17],
        [10, 11, 12, 12, 12, 13, 13, 13, 15, 16, 16, 17],
        [10, 11, 12, 13, 14, 12, 13, 14, 15, 16, 16, 17],
    ]
    assert end == 18

"""Images of any size: their patches, windows of attention, and vectors for a text.

Shapes: images N, frames F, patches P, numbers per patch D, model width M, batch of texts B, text tokens T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asbuilt.errors import InputError
from asbuilt.kernels.image_grid import Grid, joined, row_by_row, text_positions, windows
from asbuilt.kernels.rows import row_products
from asbuilt.nn.attention import Attention
from asbuilt.nn.linear import PartModule
from asbuilt.nn.registry import computes, module
from asbuilt.nn.step import Step
from asbuilt.nn.vision import ConvolvedProjector, MLPProjector, PatchEmbedding, PooledProjector, Seen, Vision
from asbuilt.spec import image_grid
from asbuilt.spec.part import Kernel


@dataclass(frozen=True)
class Patches:
    """The patches of several images, as processors give them: `values` (P, D) and each image's (frames, rows, columns).

    An image's patches stand frame by frame, in squares of as many patches as one token has, each row by row.
    `texts` says what stands for each picture in a text, of which several of these images may be parts: words, and how
    many placeholders. Without it those of each image are a picture, without words.
    """

    values: Tensor
    grids: tuple[tuple[int, int, int], ...]
    texts: tuple[tuple[str | int, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.grids)

    def to(self, device: torch.device) -> Patches:
        """Returns the patches on a device."""
        return replace(self, values=self.values.to(device))


class Alike(NamedTuple):
    """Images of one size: which they are, the frames of each, and all their patches row by row (F, P, D)."""

    which: list[int]
    frames: list[int]
    patches: Tensor
    grid: Grid


@computes(image_grid.GridPatches)
class GridPatches(PatchEmbedding):
    """W x + b of each patch x."""

    def images(self, pixels: Tensor) -> Tensor:
        """Returns images (N, C, H, W) or (B, n, C, H, W) as (N, C, H, W); raises InputError for other shapes."""
        p, shape = self.part.patch_size, tuple(pixels.shape)
        fits = len(shape) in (4, 5) and shape[-3] == self.part.channels and min(shape[-2:]) >= p
        if not fits or shape[-1] % p or shape[-2] % p:
            allowed = f"(N, {self.part.channels}, H, W) with H and W multiples of {p}, or (B, n, ...)"
            raise InputError("wrong image size", field="images", value=shape, allowed=allowed)
        return pixels.flatten(0, -4) if pixels.ndim == 5 else pixels

    def grid(self, pixels_NCHW: Tensor) -> Grid:
        """Returns the rows and columns of patches of images."""
        return pixels_NCHW.shape[2] // self.part.patch_size, pixels_NCHW.shape[3] // self.part.patch_size

    def patches(self, pixels_NCHW: Tensor) -> Tensor:
        """Returns (N, P, D), row by row, each in the layout of the convolution's matrix; patches are kept as given."""
        if pixels_NCHW.ndim == 3:
            return pixels_NCHW
        p, (rows, columns) = self.part.patch_size, self.grid(pixels_NCHW)
        assert isinstance(self.part, image_grid.GridPatches)
        tiles = pixels_NCHW.unflatten(3, (columns, p)).unflatten(2, (rows, p)).permute(0, 2, 4, 1, 3, 5)
        repeated = tiles.unsqueeze(4).expand(*tiles.shape[:4], self.part.frames, p, p)
        return repeated.reshape(len(pixels_NCHW), rows * columns, self.part.d_patch).contiguous()


@computes(image_grid.Windowed)
class Windowed(PartModule):
    """Attention within each window of an image."""

    attention: Attention

    def __init__(self, part: image_grid.Windowed, path: str) -> None:
        super().__init__(part, path)
        self.side = part.side
        self.add_module("attention", module(part.attention, f"{path}.attention"))

    def forward(self, x_FPM: Tensor, step: Step) -> Tensor:
        """Returns (F, P, M)."""
        assert step.grid is not None, "windows are those of an image"
        parts = [self.attention(x, self.within(step, len(x), size)) for x, size in windows(x_FPM, step.grid, self.side)]
        return joined(parts, step.grid, self.side)

    def within(self, step: Step, count: int, size: Grid) -> Step:
        """Returns the step over all windows of one size, the same for all layers."""

        def begun() -> Step:
            inner = Step((count, size[0] * size[1]), step.device, kernel=step.kernel, dtype=step.dtype)
            inner.show(size)
            return inner

        return step.once(("window", count, size), begun)


@computes(image_grid.GridVision)
class GridVision(Vision):
    """Images of any size to vectors that replace placeholders, and to those added after the text's first blocks."""

    part: image_grid.GridVision
    projector: MLPProjector | PooledProjector | ConvolvedProjector

    def __init__(self, part: image_grid.GridVision, path: str) -> None:
        super().__init__(part, path)
        if part.mergers:
            self.mergers = nn.ModuleList(module(one, f"{path}.mergers.{i}") for i, one in enumerate(part.mergers))

    def seen(self, images: Tensor | Patches, kernel: Kernel) -> Seen:
        """Returns the vectors of all images, in order; raises InputError for images that do not fit."""
        groups = self.grouped(images) if isinstance(images, Patches) else [self.of_pixels(images)]
        found: dict[int, list[Tensor]] = {}
        grids: dict[int, tuple[int, int, int]] = {}
        left = self.part.projector.left
        for alike in groups:
            made = [x.split(alike.frames) for x in self.run(alike.patches, alike.grid, kernel)]
            for i, (which, frames) in enumerate(zip(alike.which, alike.frames, strict=True)):
                found[which] = [x[i].flatten(0, 1) for x in made]
                grids[which] = (frames, left(alike.grid[0]), left(alike.grid[1]))
        kinds = [torch.cat([found[i][kind] for i in range(len(found))]) for kind in range(1 + len(self.part.taps))]
        return Seen(kinds[0], tuple(grids[i] for i in range(len(grids))), tuple(kinds[1:]))

    def of_pixels(self, pixels: Tensor) -> Alike:
        """Returns images of one size, given as pixels; raises InputError for an incomplete square of patches."""
        embedding = self.tower.embedding
        assert isinstance(embedding, GridPatches)
        pixels = embedding.images(pixels)
        grid, n, merge = embedding.grid(pixels), len(pixels), self.part.projector.merge
        if grid[0] % merge or grid[1] % merge:
            allowed = f"multiples of {merge * embedding.part.patch_size} pixels"
            raise InputError("wrong image size", field="images", value=tuple(pixels.shape), allowed=allowed)
        return Alike([*range(n)], [1] * n, embedding.patches(pixels), grid)

    def grouped(self, images: Patches) -> list[Alike]:
        """Returns the images by size; raises InputError for patches that do not fit their grids."""
        merge, width = self.part.projector.merge, self.part.tower.embedding.d_patch
        sizes = [frames * rows * columns for frames, rows, columns in images.grids]
        for grid in images.grids:
            if min(grid) < 1 or grid[1] % merge or grid[2] % merge:
                allowed = f"frames, rows and columns above 0, the latter two multiples of {merge}"
                raise InputError("wrong image grid", field="images", value=grid, allowed=allowed)
        if tuple(images.values.shape) != (sum(sizes), width) or not sizes:
            allowed = f"({sum(sizes)}, {width}), the patches of {len(sizes)} images"
            raise InputError("wrong patches", field="images", value=tuple(images.values.shape), allowed=allowed)
        by_grid: dict[Grid, list[int]] = {}
        for i, (_, rows, columns) in enumerate(images.grids):
            by_grid.setdefault((rows, columns), []).append(i)
        each = images.values.split(sizes)
        return [
            Alike(
                which,
                [images.grids[i][0] for i in which],
                row_by_row(torch.cat([each[i] for i in which]).view(-1, grid[0] * grid[1], width), grid, merge),
                grid,
            )
            for grid, which in by_grid.items()
        ]

    def run(self, patches_FPD: Tensor, grid: Grid, kernel: Kernel) -> list[Tensor]:
        """Returns the projected output of the tower (F, tokens, M), and that of each of its tapped blocks."""
        step, tapped = self.tower.over(len(patches_FPD), grid, kernel), []
        with row_products(self.tower.dtype, self.tower.device, step.batch * step.tokens):
            x = self.tower.entered(patches_FPD, step)
            for i, block in enumerate(self.tower.blocks):
                x = block(x, step)
                if i in self.part.taps:
                    tapped.append(self.mergers[len(tapped)](x, grid))
            return [self.projector(self.tower.normed(x), grid), *tapped]

    def put(self, x_BTM: Tensor, tokens_BT: Tensor, made_NPM: Tensor, step: Step) -> Tensor:
        """Returns the embedded text with placeholders replaced by the images' vectors (P, M), in order.

        Raises InputError unless each text has as many placeholders as its images need, adjacent where RoPE reads
        where in an image they lie, or they attend to each other: elsewhere other tokens may stand between an image's
        rows.
        """
        places = tokens_BT == self.part.placeholder
        step.places_BT = places if step.valid_BT is None else places & step.valid_BT
        if not tokens_BT.is_meta:
            if step.adjacent:
                self.locate(step.places_BT, step)
            elif self.part.both_ways:
                self.runs(step.places_BT, step)
            else:
                self.count(step.places_BT, step)
        self.see_both_ways(step.places_BT, [math.prod(grid) for grid in step.grids], step)
        return x_BTM.masked_scatter(step.places_BT[..., None], made_NPM.to(x_BTM.dtype))

    def add(self, x_BTM: Tensor, made_PM: Tensor, step: Step) -> Tensor:
        """Returns the stream with vectors added where the placeholders are."""
        assert step.places_BT is not None
        return x_BTM + torch.zeros_like(x_BTM).masked_scatter(step.places_BT[..., None], made_PM.to(x_BTM.dtype))

    def locate(self, places_BT: Tensor, step: Step) -> None:
        """Gives the step the coordinates of its tokens, and its cache how far the next is from the row's length."""
        coordinates = torch.zeros(3, step.batch, step.tokens, dtype=torch.long, device=step.device)
        runs, shifts = self.runs(places_BT, step), []
        for row, images in enumerate(runs):
            tokens = step.lengths[row] - step.past[row]
            here, end = text_positions(images, tokens, step.past[row] + step.shifts[row], step.device)
            if step.valid_BT is None:
                coordinates[:, row] = here
            else:
                coordinates[:, row, step.valid_BT[row]] = here
            shifts.append(end - step.lengths[row])
        step.coordinates_3BT = coordinates
        if step.cache is not None:
            step.cache.shifts = tuple(shifts)

    def runs(self, places_BT: Tensor, step: Step) -> list[list[tuple[int, tuple[int, int, int]]]]:
        """Returns for each row its images: the first token of each among the row's valid ones, and its grid."""
        rows, left = [], [*step.grids]
        for row, places in enumerate(places_BT):
            marked = (places if step.valid_BT is None else places[step.valid_BT[row]]).nonzero()[:, 0].tolist()
            images = []
            while marked and left:
                grid = left.pop(0)
                n = grid[0] * grid[1] * grid[2]
                if marked[:n] != [*range(marked[0], marked[0] + n)]:
                    raise self.miscounted(places_BT, step)
                images.append((marked[0], grid))
                del marked[:n]
            rows.append(images)
            if marked:
                raise self.miscounted(places_BT, step)
        if left:
            raise self.miscounted(places_BT, step)
        return rows

    def count(self, places_BT: Tensor, step: Step) -> None:
        """Raises InputError unless each row has the placeholders of whole images, and all together those of all."""
        sizes = iter(frames * rows * columns for frames, rows, columns in step.grids)
        for held in places_BT.sum(1).tolist():
            while held > 0:
                held -= next(sizes, held + 1)  # too many placeholders leave less than none
            if held:
                raise self.miscounted(places_BT, step)
        if next(sizes, None) is not None:
            raise self.miscounted(places_BT, step)

    def miscounted(self, places_BT: Tensor, step: Step) -> InputError:
        """Returns the error for other placeholders than the images need."""
        sizes = [frames * rows * columns for frames, rows, columns in step.grids]
        allowed = f"runs of {', '.join(map(str, sizes[:8]))} of token {self.part.placeholder}, one per image"
        counts = places_BT.sum(1).tolist()
        return InputError("wrong number of image placeholders", field="tokens", value=counts, allowed=allowed)

    def carry_on(self, step: Step) -> None:
        """Gives a step without images the coordinates of a text after images."""
        if any(step.shifts):
            shifts_B1 = torch.tensor(step.shifts, device=step.device)[:, None]
            step.coordinates_3BT = (step.positions_BT + shifts_B1).expand(3, -1, -1)

"""Images cut into tiles, and texts that read them by cross-attention.

Shapes: images N, tiles of an image I, patches P of a tile, tokens L of a tile, batch of texts B, text tokens T, vectors
of an image S, model width M.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.kernels.rows import row_products
from asbuilt.nn.linear import PartModule
from asbuilt.nn.registry import computes, module
from asbuilt.nn.step import Step
from asbuilt.nn.tile_embedding import TileEmbedding
from asbuilt.nn.vision import PatchEmbedding, Seen, Vision
from asbuilt.spec import tiles as spec
from asbuilt.spec.part import Kernel


@dataclass(frozen=True)
class Tiles:
    """Images cut into tiles, as processors give them: `values` (N, I, C, H, W), and each one's rows and columns.

    The tiles of an image stand row by row; those after the last are not read.
    """

    values: Tensor
    tilings: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.tilings)

    def to(self, device: torch.device) -> Tiles:
        """Returns the tiles on a device."""
        return Tiles(self.values.to(device), self.tilings)


@computes(spec.TilePositions)
class TilePositions(PartModule):
    """(1 - tanh(g)) p[i] + tanh(g) e[r, t, i]."""

    positions: Tensor
    weight: Tensor
    gate: Tensor

    def __init__(self, part: spec.TilePositions, path: str) -> None:
        super().__init__(part, path)
        self.part = part

    def forward(self, step: Step) -> Tensor:
        """Returns (N, I, L, M)."""
        assert step.tilings_N is not None, "the images have no tiles"
        part, gate = self.part, self.gate.tanh()
        found = self.weight[step.tilings_N].view(-1, part.n_tiles, part.n_positions, part.d_model)
        return (1 - gate) * self.positions + gate * found


@computes(spec.TilePatches)
class TilePatches(PatchEmbedding):
    """The tokens of all tiles of an image, normed, each tile padded with zeros."""

    part: spec.TilePatches  # pyright: ignore[reportIncompatibleVariableOverride]
    tiles: TileEmbedding
    positions: TilePositions

    def __init__(self, part: spec.TilePatches, path: str) -> None:
        super().__init__(part, path)
        for name in ("tiles", "positions", "norm"):
            self.add_module(name, module(getattr(part, name), f"{path}.{name}"))

    def given(self, images: Tensor | Tiles) -> Tiles:
        """Returns images (N, C, H, W) or (B, n, C, H, W) as images of one tile, and tiles as they are.

        Raises InputError for other shapes, and for tilings that the model does not know.
        """
        part = self.part
        if not isinstance(images, Tiles):
            pixels = super().images(images)
            return self.given(Tiles(pixels[:, None], ((1, 1),) * len(pixels)))
        size, shape = (part.channels, part.image_size, part.image_size), tuple(images.values.shape)
        for tiling in images.tilings:
            if tiling not in part.tilings:
                raise InputError("unknown tiling", field="images", value=tiling, allowed=str(part.tilings))
        most = max((rows * columns for rows, columns in images.tilings), default=0)
        if len(shape) != 5 or shape[2:] != size or shape[0] != len(images) or not most <= shape[1] <= part.n_tiles:
            allowed = f"({len(images)}, {most} to {part.n_tiles} tiles, {size[0]}, {size[1]}, {size[2]})"
            raise InputError("wrong image size", field="images", value=shape, allowed=allowed)
        return images

    def images(self, pixels: Tensor | Tiles) -> Tensor:
        """Returns the pixels of all tiles (N * I, C, H, W), absent ones zeros."""
        given = self.given(pixels)
        values, n = given.values, self.part.n_tiles
        values = F.pad(values, (0, 0) * 3 + (0, n - values.shape[1]))
        absent_NI = ~present(given.tilings, n, values.device)
        return values.masked_fill(absent_NI[:, :, None, None, None], 0).flatten(0, 1)

    def show(self, images: Any, step: Step) -> None:  # noqa: ANN401  # as the method it overrides
        """Tells a pass over images the numbers of their tilings, and which tokens are padding or of absent tiles."""
        part, tilings = self.part, self.given(images).tilings
        numbers = [part.tilings.index(tiling) + 1 for tiling in tilings]
        step.tilings_N = torch.tensor(numbers, device=step.device)
        present_NI = present(tilings, part.n_tiles, step.device)
        places = torch.arange(part.n_padded, device=step.device) < part.n_places
        step.padding_BT = ~(present_NI[:, :, None] & places).flatten(1)

    def forward(self, pixels_NCHW: Tensor, step: Step) -> Tensor:
        """Returns (N, I * L, M), L the tokens of a tile with its padding."""
        part = self.part
        patches = self.patches(pixels_NCHW.to(self.weight.dtype))
        if part.centred:
            patches = 2 * patches - 1
        x_NIPM = F.linear(patches, self.weight.flatten(1), self.bias).unflatten(0, (-1, part.n_tiles))
        x_NIPM = x_NIPM + self.tiles.rows(step)
        assert self.class_token is not None
        token = self.class_token.expand(*x_NIPM.shape[:2], 1, -1)
        x = self.get_submodule("norm")(torch.cat((token, x_NIPM), 2) + self.positions(step))
        return F.pad(x, (0, 0, 0, part.n_padded - part.n_places)).flatten(1, 2)


def present(tilings: tuple[tuple[int, int], ...], n_tiles: int, device: torch.device) -> Tensor:
    """Returns which tiles of each image are its own, (N, I)."""
    counts = torch.tensor([rows * columns for rows, columns in tilings], device=device)
    return torch.arange(n_tiles, device=device) < counts[:, None]


@computes(spec.TiledVision)
class TiledVision(Vision):
    """Images in tiles to vectors that cross-attention reads."""

    part: spec.TiledVision

    @property
    def embedding(self) -> TilePatches:
        """The tower's."""
        found = self.tower.embedding
        assert isinstance(found, TilePatches)
        return found

    def seen(self, images: Tensor | Tiles, kernel: Kernel) -> Seen:
        """Returns the vectors of each image (N, S, M), and its tiling; raises InputError for images that do not fit."""
        given = self.embedding.given(images)
        pixels, step = self.tower.opened(given, kernel)  # type: ignore[arg-type]  # pyright: ignore
        tapped: dict[int, Tensor] = {}
        with row_products(self.tower.dtype, self.tower.device, step.batch * step.tokens):
            x = self.tower.entered(pixels, step)
            for i, block in enumerate(self.tower.blocks):
                x = block(x, step)
                if i in self.part.taps:
                    tapped[i] = self.unpadded(x)
            x = self.unpadded(self.tower.normed(x))
            if tapped:
                x = torch.cat((x, torch.stack([tapped[i] for i in self.part.taps], -1).flatten(2)), -1)
            made = self.projector(x)
        return Seen(made, tuple((1, rows, columns) for rows, columns in given.tilings))

    def unpadded(self, x_NTM: Tensor) -> Tensor:
        """Returns (N, S, M), without the padding of each tile."""
        part = self.embedding.part
        return x_NTM.unflatten(1, (part.n_tiles, part.n_padded))[:, :, : part.n_places].flatten(1, 2)

    def put(self, x_BTM: Tensor, tokens_BT: Tensor, made_NPM: Tensor, step: Step) -> Tensor:
        """Gives the step the images as a source, one for each text, and returns the text unchanged.

        Raises InputError unless each text has one placeholder, in its first pass.
        """
        places = self.places(tokens_BT, len(made_NPM))
        if any(step.past):
            raise InputError("not in a text's first pass", field="images", fix="give an image with the first tokens")
        part = self.embedding.part
        valid_NI = present(tuple(grid[1:] for grid in step.grids), part.n_tiles, step.device)
        valid_BS = valid_NI.repeat_interleave(part.n_places, 1)
        after = places.cumsum(1) > 0
        step.after_BT, step.source_BSM = after.to(x_BTM.dtype), made_NPM.to(x_BTM.dtype)
        step.source_mask = (valid_BS[:, None] | ~after[:, :, None])[:, None]
        if step.cache is not None:
            step.cache.source_tokens, step.cache.source_valid_BS = made_NPM.shape[1], valid_BS
        return x_BTM

    def check(self, places: Tensor, count: int) -> None:
        """Raises InputError unless each text has one image and one placeholder."""
        counts = places.sum(1).tolist()
        if count != len(counts) or any(found != 1 for found in counts):
            raise InputError(
                "wrong number of image placeholders",
                field="tokens",
                value=counts,
                allowed=f"one of token {self.part.placeholder} in each text, and one image for it; got {count} images",
            )

    def carry_on(self, step: Step) -> None:
        """Lets a step read the image that its cache holds; without one it passes over what would."""
        cached = step.cache is not None and step.cache.source_valid_BS is not None
        step.sourceless = not cached
        if step.cache is not None and step.cache.source_valid_BS is not None:
            step.source_mask = step.cache.source_valid_BS[:, None, None]

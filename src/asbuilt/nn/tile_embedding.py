"""Learned vectors of tiles. Shapes: images N, tiles of an image I, tokens of all tiles T, model width M."""

from __future__ import annotations

from torch import Tensor

from asbuilt.nn.linear import PartModule
from asbuilt.nn.registry import computes
from asbuilt.nn.step import Step
from asbuilt.spec import tile_embedding


@computes(tile_embedding.TileEmbedding)
class TileEmbedding(PartModule):
    """tanh(g) e[r, t]."""

    weight: Tensor
    gate: Tensor

    def __init__(self, part: tile_embedding.TileEmbedding, path: str) -> None:
        super().__init__(part, path)
        self.part = part

    def rows(self, step: Step) -> Tensor:
        """Returns one vector for each tile, (N, I, 1, M)."""
        assert step.tilings_N is not None, "the images have no tiles"
        found = self.weight[step.tilings_N].view(-1, self.part.n_tiles, 1, self.part.d_model)
        return found * self.gate.tanh()

    def forward(self, x_NTM: Tensor, step: Step) -> Tensor:
        """Returns (N, T, M), the same vector for all tokens of a tile."""
        each = x_NTM.shape[1] // self.part.n_tiles
        return self.rows(step).expand(-1, -1, each, -1).flatten(1, 2)

"""Images cut into tiles, which one tower reads together, and which a text reads by cross-attention: Llama 3.2 Vision.

Dubey et al. 2024, Llama 3 (arXiv 2407.21783), section 7. An image has a tiling of so many rows and columns of tiles;
what is left of the most tiles is absent, yet takes part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from asbuilt.spec.norms import Norm
from asbuilt.spec.part import Part, Pass, Product, Weight, require, require_sizes
from asbuilt.spec.tile_embedding import TileEmbedding
from asbuilt.spec.vision import ClassToken, MLPProjector, PatchEmbedding, Vision


@dataclass(frozen=True, kw_only=True)
class TilePositions(Part):
    """(1 - tanh(g)) p[i] + tanh(g) e[r, t, i] for token i of tile t of an image whose tiling has the number r."""

    kind = "embedding"
    d_model: int
    """Width of the stream."""
    n_positions: int
    """Tokens of a tile."""
    n_tilings: int
    """Tilings that an image may have."""
    n_tiles: int
    """Tiles of an image, absent ones included."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_positions", "n_tilings", "n_tiles")

    def holds(self) -> dict[str, Weight]:
        """p (n_positions, d_model), the table e (n_tilings + 1, n_tiles * n_positions * d_model), and g, 0 at first."""
        places = (self.n_positions, self.d_model)
        tiles = (self.n_tilings + 1, self.n_tiles * self.n_positions * self.d_model)
        return {
            "positions": Weight(shape=places, role="table"),
            "weight": Weight(shape=tiles, role="table"),
            "gate": Weight(shape=(1,), role="gain", init="zeros"),
        }


@dataclass(frozen=True, kw_only=True)
class TilePatches(PatchEmbedding):
    """The tokens of all tiles of an image, one tile after the other: norm(positions + [class token, W x + tiles]).

    An absent tile is one of zeros. Each tile is padded with zeros to a `multiple` of tokens. Neither those nor the
    tokens of absent tiles attend to each other; all others attend to them.
    """

    tiled: ClassVar[bool] = True
    class_token: ClassToken = "first"
    """Position of the learned class token: before the patches of each tile."""
    tilings: tuple[tuple[int, int], ...]
    """The rows and columns of tiles that an image may have, in the order of the tables' rows, from 1 on."""
    n_tiles: int
    """Tiles of an image, absent ones included."""
    multiple: int = 8
    """Number of which each tile's tokens are padded to a multiple."""
    tiles: TileEmbedding
    """Vectors added to a tile's patches."""
    positions: TilePositions
    """Vectors added to each token of each tile."""
    norm: Norm
    """Norm of the sum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes(self, "n_tiles", "multiple")
        given = isinstance(self.tilings, tuple) and len(self.tilings) > 0
        whole = given and all(
            isinstance(one, tuple) and len(one) == 2 and all(type(n) is int and n > 0 for n in one)
            for one in self.tilings
        )
        most = f"pairs of rows and columns of at most n_tiles = {self.n_tiles} tiles, each once"
        fits = whole and all(rows * columns <= self.n_tiles for rows, columns in self.tilings)
        require(self, "tilings", fits and len({*self.tilings}) == len(self.tilings), most)
        require(self, "class_token", self.class_token == "first", "first, for tiles")
        require(self, "mask_token", not self.mask_token, "false, for tiles")
        require(self, "n_registers", self.n_registers == 0, "0, for tiles")
        alike = {"d_model": self.d_model, "n_tilings": len(self.tilings), "n_tiles": self.n_tiles}
        require(self, "tiles", self.tiles == TileEmbedding(**alike), f"one of {alike}")
        places = TilePositions(n_positions=self.n_places, **alike)
        require(self, "positions", self.positions == places, f"one of n_positions = {self.n_places}, {alike}")
        require(self, "norm", self.norm.d == self.d_model, f"a norm over d_model = {self.d_model}")

    @property
    def n_places(self) -> int:
        """Tokens of a tile that are seen: its patches and a class token."""
        return self.n_patches + 1

    @property
    def n_padded(self) -> int:
        """Tokens of a tile, padding included."""
        return -(-self.n_places // self.multiple) * self.multiple

    @property
    def n_tokens(self) -> int:
        """Tokens of an image: of all its tiles, padding included."""
        return self.n_tiles * self.n_padded

    def multiplies(self, run: Pass) -> tuple[Product, ...]:
        """One product for all patches of all tiles."""
        return tuple(replace(product, a=product.a * self.n_tiles) for product in super().multiplies(run))

    def child_run(self, name: str, run: Pass) -> Pass:
        """The norm processes all tiles without their padding."""
        return replace(run, tokens=self.n_tiles * self.n_places) if name == "norm" else run


@dataclass(frozen=True, kw_only=True)
class TiledVision(Vision):
    """One image of each text, whose projected vectors cross-attention reads, for tokens from a `placeholder` on.

    The projector reads the tower's output joined with that of its blocks in `taps`: after the d_model numbers of the
    output, number by number one of each block. Tokens before the placeholder attend to all vectors, those of absent
    tiles too; from it on to those of the image's tiles. A text without an image passes over all blocks that read one.
    """

    crosses: ClassVar[bool] = True
    keep_class: bool = True
    """Whether class tokens are projected too: they are."""
    taps: tuple[int, ...] = ()
    """Blocks of the tower whose output is joined with the last."""

    def __post_init__(self) -> None:
        require(self, "taps", isinstance(self.taps, tuple), "numbers of blocks")
        super().__post_init__()
        n = self.tower.n_layers
        whole = all(type(i) is int and 0 <= i < n for i in self.taps)
        require(self, "taps", whole, f"numbers from 0 to {n - 1}")
        require(self, "tower", isinstance(self.tower.embedding, TilePatches), "a model of tiles")
        for name in ("both_ways", "layers"):
            require(self, name, not getattr(self, name), "unset for tiles")
        require(self, "keep_class", self.keep_class, "true for tiles")
        plain = isinstance(self.projector, MLPProjector) and self.projector.joined == 1 and self.projector.norm is None
        require(self, "projector", plain, "maps of one vector each, without a norm")

    @property
    def d_seen(self) -> int:
        """Numbers of the tower's output and of all taps."""
        return self.tower.d_model * (1 + len(self.taps))

    @property
    def n_selected(self) -> int:
        """Tokens of all tiles, without padding."""
        embedding = self.tower.embedding
        assert isinstance(embedding, TilePatches)
        return embedding.n_tiles * embedding.n_places

    @property
    def n_tokens(self) -> int:
        """1, the placeholder."""
        return 1

    @property
    def n_made(self) -> int:
        """Vectors per image."""
        return self.n_selected

"""Learned vectors for the tiles into which an image is cut, chosen by the shape of the tiling: Llama 3.2 Vision."""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.spec.part import Part, Weight, require_sizes


@dataclass(frozen=True, kw_only=True)
class TileEmbedding(Part):
    """tanh(g) e[r, t] for each token of tile t of an image whose tiling has the number r; row 0 is of no image.

    As the body of a branch it adds them to the stream, whose numbers it does not read.
    """

    kind = "embedding"
    d_model: int
    """Width of the stream."""
    n_tilings: int
    """Tilings that an image may have."""
    n_tiles: int
    """Tiles of an image, absent ones included."""

    def __post_init__(self) -> None:
        require_sizes(self, "d_model", "n_tilings", "n_tiles")

    def holds(self) -> dict[str, Weight]:
        """The table e (n_tilings + 1, n_tiles * d_model), and g, 0 at first."""
        shape = (self.n_tilings + 1, self.n_tiles * self.d_model)
        return {"weight": Weight(shape=shape, role="table"), "gate": Weight(shape=(1,), role="gain", init="zeros")}

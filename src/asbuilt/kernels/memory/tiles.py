"""What images cut into tiles save and need."""

from __future__ import annotations

from asbuilt.kernels.memory.registry import Memory, Saved, memory, memory_of
from asbuilt.kernels.memory.tile_embedding import TILINGS
from asbuilt.kernels.memory.vision import VisionMemory
from asbuilt.spec.part import Pass
from asbuilt.spec.tiles import TiledVision, TilePatches, TilePositions


@memory_of(TilePositions)
class TilePositionsMemory(Memory[TilePositions]):
    """Memory of a lookup and of the sum of two kinds of positions."""

    def _size(self, run: Pass) -> int:
        part = self.part
        return run.batch * part.n_tiles * part.n_positions * part.d_model

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The numbers of the tilings, the positions by tile, and the two numbers that multiply."""
        return (
            Saved(name=TILINGS, size=run.batch, width="int64", shared=True),
            Saved(name="by tile", size=self._size(run)),
            Saved(name="gate", size=1, divided="none"),
            Saved(name="rest", size=1, divided="none"),
        )

    def peak_bytes(self, run: Pass) -> int:
        """The positions by tile, those times the gate, and the sum."""
        return 3 * self._size(run) * run.width


@memory_of(TilePatches)
class TilePatchesMemory(Memory[TilePatches]):
    """Memory of a convolution over the patches of all tiles, and of what is added to them."""

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """The patches."""
        part = self.part
        return (Saved(name="input", size=run.batch * part.n_tiles * part.n_patches * part.d_patch),)

    def peak_bytes(self, run: Pass) -> int:
        """The patches and their embeddings; or these, positions and their sum; or the norm beside its input."""
        part = self.part
        tiles = run.batch * part.n_tiles
        made, pixels = tiles * part.n_patches * part.d_model, tiles * part.n_patches * part.d_patch
        placed, padded = tiles * part.n_places * part.d_model, tiles * part.n_padded * part.d_model
        placing = memory(part.positions).peak_bytes(run) + (made + placed) * run.width
        norming = memory(part.norm).peak_bytes(part.child_run("norm", run)) + (made + 2 * placed) * run.width
        return max((made + max(pixels, made)) * run.width, placing, norming, (2 * placed + padded) * run.width)


@memory_of(TiledVision)
class TiledVisionMemory(VisionMemory):
    """Memory of a tower and its projector, beside the output of its taps."""

    part: TiledVision

    def saves(self, run: Pass) -> tuple[Saved, ...]:
        """Nothing: no vectors stand in the text."""
        return ()

    def peak_bytes(self, run: Pass) -> int:
        """The tower beside its taps; or the projector beside all that are joined."""
        part = self.part
        one = run.batch * part.n_selected * part.tower.d_model * run.width
        taps = len(part.taps)
        towering = memory(part.tower).peak_bytes(part.child_run("tower", run)) + taps * one
        projected = memory(part.projector).peak_bytes(part.child_run("projector", run))
        return max(towering, (1 + 3 * taps) * one, (1 + taps) * one + projected)

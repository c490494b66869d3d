"""What linear maps keep and need beside their inputs and results, which the part whose maps they are declares."""

from __future__ import annotations

import math
from typing import TypeVar

from asbuilt.kernels.memory.registry import Memory, Saved, memory, memory_of
from asbuilt.spec.linear import Linear, Lora, Map, Mapped, Packed
from asbuilt.spec.part import Pass

M = TypeVar("M", bound=Mapped)
L = TypeVar("L", bound=Map)


class MapMemory(Memory[L]):
    """Memory of a map; the defaults are those of a plain one."""

    def keeps(self, name: str, rows: int) -> tuple[Saved, ...]:
        """Returns what autograd keeps beside the input of the map `name`: nothing."""
        return ()

    def peak_beside(self, run: Pass, rows: int) -> int:
        """Returns the bytes alive at once beside what a plain map needs: none."""
        return 0


@memory_of(Linear)
class LinearMemory(MapMemory[Linear]):
    """Memory of a plain map."""


# Numbers that are expanded from blocks at once: enough that calls cost little, few enough for a processor's cache.
TILE = 1 << 19
# Bytes for each of them while they are expanded to float32, by format, as kernels/packed.py does it.
EXPANDING = {
    "q4_0": 5.01,
    "q4_1": 5.01,
    "q5_0": 5.2,
    "q5_1": 5.2,
    "q8_0": 4.2,
    "q2_k": 5.51,
    "q3_k": 7.35,
    "q4_k": 5.51,
    "q5_k": 6.51,
    "q6_k": 6.26,
    "mxfp4": 8.01,
}


def expanding_bytes(format: str, size: int, width: int) -> int:
    """Returns the bytes alive at once while blocks expand to `size` numbers of `width`, theirs included."""
    cast = 0 if width == 4 else width
    return math.ceil(size * max(EXPANDING.get(format, 4.0), 4 + cast))


def tile_rows(d_in: int) -> int:
    """Returns how many rows of so many numbers are expanded at once."""
    return max(1, TILE // d_in)


def product_beside(format: str, d_out: int, d_in: int, rows: int, width: int) -> int:
    """Returns what a product of `rows` rows with blocks needs beside input and result: a tile, then what it gives."""
    n = min(d_out, tile_rows(d_in))
    return max(expanding_bytes(format, n * d_in, width), n * (d_in + rows) * width)


@memory_of(Packed)
class PackedMemory(MapMemory[Packed]):
    """Memory of a map whose matrix is blocks; the backward pass expands them again, so that nothing more is kept."""

    def peak_beside(self, run: Pass, rows: int) -> int:
        """A tile of rows as it is expanded, or beside its results."""
        plain = self.part.plain
        return product_beside(self.part.format, plain.d_out, plain.d_in, rows, run.width)


@memory_of(Lora)
class LoraMemory(MapMemory[Lora]):
    """Memory of a map with an adapter beside it."""

    def keeps(self, name: str, rows: int) -> tuple[Saved, ...]:
        """What B reads; A reads what the map does."""
        part = self.part
        return (*of_map(part.base).keeps(name, rows), Saved(name=f"{name} lora_b input", size=rows * part.rank))

    def peak_beside(self, run: Pass, rows: int) -> int:
        """x A^T, and what B makes of it beside what the map does, before and after it is scaled."""
        part = self.part
        return of_map(part.base).peak_beside(run, rows) + rows * (part.rank + 2 * part.plain.d_out) * run.width


def of_map(part: Map) -> MapMemory[Map]:
    """Returns the memory of a map."""
    found = memory(part)
    assert isinstance(found, MapMemory), type(part)
    return found


class MappedMemory(Memory[M]):
    """Memory of a part whose linear maps are children."""

    def maps_keep(self, run: Pass) -> tuple[Saved, ...]:
        """Returns what autograd keeps for what is around the maps, beside what the plain ones need."""
        part = self.part
        return tuple(s for name, one in part.maps.items() for s in of_map(one).keeps(name, part.map_rows(name, run)))

    def peak_beside(self, run: Pass) -> int:
        """Returns the most bytes alive at once for what is around a map, beside what the plain ones need."""
        part = self.part
        rows = ((one, part.map_rows(name, run)) for name, one in part.maps.items())
        return max((of_map(one).peak_beside(run, n) for one, n in rows), default=0)

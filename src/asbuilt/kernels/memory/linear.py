"""What linear maps save and need besides their inputs and results, which their owner declares."""

from __future__ import annotations

import math
from typing import TypeVar

from asbuilt.kernels.memory.registry import Divided, Memory, Saved, memory, memory_of
from asbuilt.spec.linear import Linear, Lora, Map, Mapped, Packed
from asbuilt.spec.part import Pass

M = TypeVar("M", bound=Mapped)
L = TypeVar("L", bound=Map)


class MapMemory(Memory[L]):
    """Memory of a linear map; the defaults are those of a plain or a clipped one."""

    def keeps(self, name: str, rows: int) -> tuple[Saved, ...]:
        """Returns what autograd saves besides the input of the map `name`: what lies between the clamps, if clipped."""
        plain = self.part.plain
        if not plain.clipped:
            return ()
        divided: dict[bool, Divided] = {True: "width", False: "tokens"}
        return (
            Saved(name=f"{name} clamped", size=rows * plain.d_in, divided=divided[plain.split == "in"]),
            Saved(name=f"{name} unclamped", size=rows * plain.d_out, divided=divided[plain.split == "out"]),
            Saved(name=f"{name} bounds", size=len(plain.buffers()), width="wide", divided="none"),
        )

    def peak_beside(self, run: Pass, rows: int) -> int:
        """Returns the peak bytes beyond those of a plain map: of a clipped one its clamped input and first result."""
        plain = self.part.plain
        return rows * (plain.d_in + plain.d_out) * run.width if plain.clipped else 0


@memory_of(Linear)
class LinearMemory(MapMemory[Linear]):
    """Memory of a plain linear map."""


# Numbers that are dequantised at once: enough to amortise calls, few enough for a CPU cache.
TILE = 1 << 19
# Bytes per number while dequantising to float32, by format, as in kernels/blocks.py and kernels/codebooks.py.
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
    "nvfp4": 9.26,
    "iq4_nl": 9.01,
    "iq4_xs": 9.39,
    "iq3_xxs": 12.26,
    "iq3_s": 13.01,
    "iq2_xxs": 12.26,
    "iq2_xs": 13.01,
    "iq2_s": 12.51,
    "iq1_s": 8.78,
    "iq1_m": 9.15,
    "tq1_0": 8.04,
    "tq2_0": 5.04,
    "int4_zero": 5.01,
    "int4_wide": 5.01,
    "int8_wide": 4.2,
    "nvfp4_wide": 9.26,
}


def expanding_bytes(format: str, size: int, width: int) -> int:
    """Returns the peak bytes of dequantising `size` numbers of `width`, result included."""
    cast = 0 if width == 4 else width
    return math.ceil(size * max(EXPANDING.get(format, 4.0), 4 + cast))


def tile_rows(d_in: int) -> int:
    """Returns how many rows of `d_in` numbers are dequantised at once."""
    return max(1, TILE // d_in)


def product_beside(format: str, d_out: int, d_in: int, rows: int, width: int) -> int:
    """Returns what a product of `rows` rows with packed weights needs besides input and result: a tile, its output."""
    n = min(d_out, tile_rows(d_in))
    return max(expanding_bytes(format, n * d_in, width), n * (d_in + rows) * width)


@memory_of(Packed)
class PackedMemory(MapMemory[Packed]):
    """Memory of a packed map; the backward pass dequantises again, so nothing more is saved."""

    def peak_beside(self, run: Pass, rows: int) -> int:
        """A tile of rows while it is dequantised, or beside its results."""
        plain = self.part.plain
        beside = product_beside(self.part.format, plain.d_out, plain.d_in, rows, run.width)
        return super().peak_beside(run, rows) + beside


@memory_of(Lora)
class LoraMemory(MapMemory[Lora]):
    """Memory of a linear map with an adapter."""

    def keeps(self, name: str, rows: int) -> tuple[Saved, ...]:
        """B's input; A has the same input as the map."""
        part = self.part
        return (*of_map(part.base).keeps(name, rows), Saved(name=f"{name} lora_b input", size=rows * part.rank))

    def peak_beside(self, run: Pass, rows: int) -> int:
        """x A^T, and B's output beside the map's, before and after scaling."""
        part = self.part
        return of_map(part.base).peak_beside(run, rows) + rows * (part.rank + 2 * part.plain.d_out) * run.width


def of_map(part: Map) -> MapMemory[Map]:
    """Returns the memory of a linear map."""
    found = memory(part)
    assert isinstance(found, MapMemory), type(part)
    return found


class MappedMemory(Memory[M]):
    """Memory of a part whose linear maps are children."""

    @property
    def plain(self) -> bool:
        """Whether all maps are plain ones, without wrappers."""
        return all(isinstance(one, Linear) and not one.clipped for one in self.part.maps.values())

    def maps_keep(self, run: Pass) -> tuple[Saved, ...]:
        """Returns what autograd saves for wrappers of the maps, beyond the plain ones."""
        part = self.part
        return tuple(s for name, one in part.maps.items() for s in of_map(one).keeps(name, part.map_rows(name, run)))

    def peak_beside(self, run: Pass) -> int:
        """Returns the peak bytes of wrappers of the maps, beyond the plain ones."""
        part = self.part
        rows = ((one, part.map_rows(name, run)) for name, one in part.maps.items())
        return max((of_map(one).peak_beside(run, n) for one, n in rows), default=0)

"""What linear maps keep and need beside their inputs and results, which the part whose maps they are declares."""

from __future__ import annotations

from typing import TypeVar

from asbuilt.kernels.memory.registry import Memory, Saved, memory, memory_of
from asbuilt.spec.linear import Linear, Lora, Map, Mapped
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

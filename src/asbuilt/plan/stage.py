"""Pipeline stages: which blocks each holds, and whether it also holds the parts before or after them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Pipeline stage `number` of `pp`: how often it has each kind of block; `count` stages are equal."""

    number: int
    pp: int
    blocks: tuple[tuple[int, int], ...]
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether it holds the parts before the blocks."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether it holds the parts after the blocks: the head, and the loss in training."""
        return self.number == self.pp - 1


def every_stage(order: Sequence[int], pp: int) -> Iterator[Stage]:
    """Yields the stages of blocks of the kinds in `order`, as even as possible; the first ones have one more block."""
    each, rest = divmod(len(order), pp)
    start = 0
    for number in range(pp):
        end = start + each + (number < rest)
        yield Stage(number=number, pp=pp, blocks=tuple(Counter(order[start:end]).items()))
        start = end


def stages(order: Sequence[int], pp: int) -> list[Stage]:
    """Returns the distinct stages with their counts: of equal ones, the first."""
    found: dict[tuple[bool, bool, frozenset[tuple[int, int]]], Stage] = {}
    for stage in every_stage(order, pp):
        key = (stage.first, stage.last, frozenset(stage.blocks))
        before = found.get(key)
        found[key] = stage if before is None else replace(before, count=before.count + 1)
    return list(found.values())

"""Pipeline stages: which blocks each holds, and whether it holds what comes before or after them too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Pipeline stage `number` of `pp`: how often it has each kind of block; `count` stages are alike."""

    number: int
    pp: int
    blocks: tuple[tuple[int, int], ...]
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether it holds what comes before the blocks."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether it holds what comes after the blocks: the head, and in training the loss."""
        return self.number == self.pp - 1


def every_stage(order: Sequence[int], pp: int) -> Iterator[Stage]:
    """Yields the stages of blocks of the kinds in `order`: as even as can be, the first ones with one more block."""
    each, rest = divmod(len(order), pp)
    start = 0
    for number in range(pp):
        end = start + each + (number < rest)
        yield Stage(number=number, pp=pp, blocks=tuple(Counter(order[start:end]).items()))
        start = end


def stages(order: Sequence[int], pp: int) -> list[Stage]:
    """Returns the stages that differ, with how many there are: of those that hold the same, the first one."""
    found: dict[tuple[bool, bool, frozenset[tuple[int, int]]], Stage] = {}
    for stage in every_stage(order, pp):
        key = (stage.first, stage.last, frozenset(stage.blocks))
        before = found.get(key)
        found[key] = stage if before is None else replace(before, count=before.count + 1)
    return list(found.values())

"""Families whose layers are of several kinds: finding parts of one kind, keys that only matter where it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.key import Group, Key, Value, Values, written
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.spec import Attention, Block, Branch, FeedForward, Mixer, Norm, Parallel, Part

Kind = type[Part] | tuple[type[Part], ...]


def every(parts: Parts, kind: Kind) -> Iterator[Part]:
    """Yields the bodies of a kind in the blocks, in order, also those that stand beside another."""
    for block in dict.fromkeys(parts.model.blocks):
        for branch in block.branches:
            body = branch.body
            beside = (body.attention, body.ffn) if isinstance(body, Parallel) else (body,)
            yield from (one for one in beside if isinstance(one, kind))


def first(kind: Kind, field: str = "") -> Callable[[Parts], Any]:
    """Returns what gives the first part of a kind, or a field of it by its path; it raises InputError for none."""

    def found(parts: Parts) -> Any:  # noqa: ANN401
        part = next(every(parts, kind), None)
        if part is None:
            kinds = kind if isinstance(kind, tuple) else (kind,)
            needed = " or ".join(one.__name__ for one in kinds)
            raise InputError(f"{parts.family} needs {needed} in some block", field="blocks")
        return attrgetter(field)(part) if field else part

    return found


class Where:
    """Keys that matter only where `used` says so of what was read, and the spec has a part of this `kind`.

    Elsewhere they may be missing, and are carried.
    """

    def __init__(self, kind: Kind, used: Callable[[Values], bool], *keys: Key) -> None:
        self.kind, self.used, self.keys = kind, used, keys

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the keys."""
        for key in self.keys:
            key.read(reader, values)
        if not self.used(values):
            for name in _names(self.keys):
                reader.unused(name, "no layer is of the kind that it is about")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys, if there is such a part."""
        return written(self.keys, parts) if any(every(parts, self.kind)) else {}


class OnlyWhere(Where):
    """The same, where the keys are not even read elsewhere: defaults that fit no model of these sizes are no fault."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the keys where they matter."""
        if self.used(values):
            super().read(reader, values)
            return
        for name in _names(self.keys):
            reader.unused(name, "no layer is of the kind that it is about")


def _names(keys: tuple[Key, ...]) -> Iterator[str]:
    for key in keys:
        if isinstance(key, Value):
            yield from (key.key, *key.also)
        elif isinstance(key, Group):
            yield from _names(key.keys)
        else:
            yield from getattr(key, "keys", None) or filter(None, (getattr(key, "key", ""),))


def block(mixer: Mixer, ffn: FeedForward, norm: Norm, scale: float = 1.0) -> Block:
    """Returns a layer: attention or another mixer, in a branch of its own name, and a feed-forward.

    Norms stand before both, and what they give is multiplied by `scale`.
    """
    bodies = {"attention" if isinstance(mixer, Attention) else "mixer": mixer, "ffn": ffn}
    return Block(branches=tuple(Branch(name=name, body=body, norm=norm, scale=scale) for name, body in bodies.items()))


class Periodic:
    """Which layers are of a kind: those `offset` after each multiple of a `period`; `has` tells it of a block.

    The keys are carried, since several ways of saying it are the same.
    """

    def __init__(
        self, period: tuple[str, int], offset: tuple[str, int], into: str, has: Callable[[Block], bool]
    ) -> None:
        self.period, self.offset, self.into, self.has = period, offset, into, has

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the layers."""
        (period_key, period), (offset_key, offset) = self.period, self.offset
        period = reader.size(period_key, default=period)
        offset = reader.size(offset_key, default=offset, least=0)
        reader.require(offset_key, offset < period, f"less than {period_key} = {period}")
        for key in (period_key, offset_key):
            reader.irrelevant(key, "the blocks say it")
        values[self.into] = tuple(i % period == offset for i in range(values["n_layers"]))

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys that were carried, if they mean these layers, or the shortest period that does."""
        wanted = [self.has(block) for block in parts.model.blocks]
        said = [parts.carried.get(key, usual) for key, usual in (self.period, self.offset)]
        if [i % said[0] == said[1] for i in range(len(wanted))] == wanted:
            return {}
        pairs = ((period, offset) for period in range(1, len(wanted) + 2) for offset in range(period))
        same = ((p, o) for p, o in pairs if [i % p == o for i in range(len(wanted))] == wanted)
        found = next(same, None)
        if found is None:
            raise InputError(f"{parts.family} needs these layers at equal distances", field="blocks")
        return {self.period[0]: found[0], self.offset[0]: found[1]}

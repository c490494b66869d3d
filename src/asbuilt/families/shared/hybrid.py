"""Families whose layers are of several kinds: finding parts of one kind, keys that only matter where it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

from asbuilt.errors import InputError
from asbuilt.families.shared.key import Group, Key, Value, Values, written
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.spec import Parallel, Part

P = TypeVar("P", bound=Part)
Kind = type[Part] | tuple[type[Part], ...]


def every(parts: Parts, kind: Kind) -> Iterator[Part]:
    """Yields the bodies of a kind in the blocks, in order, also those that stand beside another."""
    for block in dict.fromkeys(parts.model.blocks):
        for branch in block.branches:
            body = branch.body
            beside = (body.attention, body.ffn) if isinstance(body, Parallel) else (body,)
            yield from (one for one in beside if isinstance(one, kind))


def first(kind: type[P], field: str = "") -> Callable[[Parts], Any]:
    """Returns what gives the first part of a kind, or a field of it by its path; it raises InputError for none."""

    def found(parts: Parts) -> Any:  # noqa: ANN401
        part = next(every(parts, kind), None)
        if part is None:
            raise InputError(f"{parts.family} needs {kind.__name__} in some block", field="blocks")
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


def _names(keys: tuple[Key, ...]) -> Iterator[str]:
    for key in keys:
        if isinstance(key, Value):
            yield from (key.key, *key.also)
        elif isinstance(key, Group):
            yield from _names(key.keys)
        else:
            yield from getattr(key, "keys", ())

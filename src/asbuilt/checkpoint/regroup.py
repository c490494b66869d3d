"""Reads one format's entries for those of another, which may group the same weights otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asbuilt.checkpoint.load import Contents
from asbuilt.families.shared.table import Entry

if TYPE_CHECKING:
    from torch import Tensor


class Regrouped:
    """The weights of a checkpoint, each read once, and kept until the entry that wants it asks."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._entry = {path: entry for entry in contents.entries for path in entry.paths}
        self._read: dict[str, Tensor] = {}

    def read(self, wanted: Entry) -> list[Tensor]:
        """Returns the tensors of the entry's paths."""
        for path in wanted.paths:
            if path not in self._read:
                entry = self._entry[path]
                self._read |= dict(zip(entry.paths, self._contents.read(entry), strict=True))
        return [self._read.pop(path) for path in wanted.paths]

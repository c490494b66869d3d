"""Converts a checkpoint folder or GGUF file to a checkpoint folder, tensor by tensor, without building the model."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from asbuilt.checkpoint.load import Contents, as_source, stored_dtype
from asbuilt.checkpoint.save import MAX_SHARD_BYTES, Progress, write_folder
from asbuilt.checkpoint.source import Source
from asbuilt.errors import InputError
from asbuilt.families.shared.table import Entry

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def convert(
    source: Source | str | Path,
    out: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Writes the folder `out` with the weights, config, tokenizer and generation settings of `source`.

    It is written in the layout of its published family, or in asbuilt's own if no family can express the model. `dtype`
    None keeps each tensor's dtype (as buffers always do), and for a GGUF file or packed weights means that of `load`.
    Only the entry being written is in memory and, if the two formats group tensors differently, those read but not yet
    written. Raises InputError as `load` and `save` do; whatever is raised, nothing is left behind.
    """
    if Path(out).suffix.lower() == ".gguf":
        raise InputError("GGUF files can be read but not written", field="OUT", value=str(out), fix="give a folder")
    source = as_source(source)
    contents = Contents(source)
    common = contents.dtype(dtype)
    own = _own_dtypes(contents) if source.gguf is None and contents.packed is None else {}
    numbers = [e for e in contents.entries if not (source.own and e.packed)]
    cast = {path: common for e in numbers for path in e.paths if path not in contents.buffers or not own}
    write_folder(
        out,
        spec=source.spec,
        family=source.family or None,
        carried=source.reading.carried,
        config_dtype=str(common).removeprefix("torch."),
        dtypes=own if own and dtype is None else own | cast,
        read=_Regrouped(contents).read,
        beside=source,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )


def _own_dtypes(contents: Contents) -> dict[str, torch.dtype]:
    """Returns the stored dtype of each path's tensor."""
    import torch

    dtypes = {}
    for entry in contents.entries:
        own = {getattr(torch, stored_dtype(contents.headers[name]) or "uint8") for name in entry.names}
        dtypes |= dict.fromkeys(entry.paths, functools.reduce(torch.promote_types, own))
    return dtypes


class _Regrouped:
    """Reads one format's entries for those of another, which may group the same paths differently."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._entry = {path: entry for entry in contents.entries for path in entry.paths}
        self._read: dict[str, Tensor] = {}

    def read(self, wanted: Entry) -> list[Tensor]:
        for path in wanted.paths:
            if path not in self._read:
                entry = self._entry[path]
                self._read |= dict(zip(entry.paths, self._contents.read(entry), strict=True))
        return [self._read.pop(path) for path in wanted.paths]

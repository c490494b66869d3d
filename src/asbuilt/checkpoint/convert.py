"""Converts a checkpoint folder or GGUF file to a checkpoint folder, tensor by tensor, without building the model."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from asbuilt.checkpoint.gguf_write import is_gguf, write_gguf
from asbuilt.checkpoint.load import Contents, as_source, stored_dtype
from asbuilt.checkpoint.merge import adding
from asbuilt.checkpoint.regroup import Regrouped
from asbuilt.checkpoint.save import MAX_SHARD_BYTES, Progress, write_folder
from asbuilt.checkpoint.source import Source
from asbuilt.checkpoint.wanted import Formats
from asbuilt.errors import InputError

if TYPE_CHECKING:
    import torch


def convert(
    source: Source | str | Path,
    out: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: float | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] = lambda text: None,
    adapter: str | Path | None = None,
) -> list[Path]:
    """Writes `source` as the folder or GGUF file `out`, tokenizer and generation settings included; returns the files.

    A name ending in .gguf is written as `write_gguf` does, and `dtype` may then be a block format too. A folder is
    written in the layout of its published family, or in asbuilt's own if no family can express the model. `dtype` None
    keeps each tensor's dtype (as buffers always do), and for a folder of a GGUF file or packed weights means that of
    `load`. `note` is called with what a GGUF file cannot express. Adapters of the folder `adapter`, in PEFT's layout,
    are added to their matrices.
    Only the entry being written is in memory and, if the two formats group tensors differently, those read but not yet
    written. Raises InputError as `load` and `save` do; whatever is raised, nothing is left behind.
    """
    source = as_source(source)
    if is_gguf(out):
        if adapter is not None:
            fix = "write a folder with the adapters first, and convert that"
            raise InputError("adapters are merged into folders alone", field="adapter", value=str(adapter), fix=fix)
        formats = Formats(common=None if dtype is None else str(dtype).removeprefix("torch."))
        most = float("inf") if max_shard_bytes is None else max_shard_bytes
        return write_gguf(source, out, formats, most, progress, note).files
    contents = Contents(source, adapter=adapter)
    add, regrouped = adding(contents.spec, contents.adapter), Regrouped(contents)
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
        read=lambda entry: [*map(add, entry.paths, regrouped.read(entry))],
        beside=source,
        max_shard_bytes=MAX_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes,
        progress=progress,
    )
    return sorted(Path(out).iterdir())


def _own_dtypes(contents: Contents) -> dict[str, torch.dtype]:
    """Returns the stored dtype of each path's tensor."""
    import torch

    dtypes = {}
    for entry in contents.entries:
        own = {getattr(torch, stored_dtype(contents.headers[name]) or "uint8") for name in entry.names}
        dtypes |= dict.fromkeys(entry.paths, functools.reduce(torch.promote_types, own))
    return dtypes

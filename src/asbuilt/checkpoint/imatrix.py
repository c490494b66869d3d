"""llama.cpp's importance matrices: GGUF files with sums of the squared inputs of a model's maps (tools/imatrix).

Of a tensor NAME the file has `NAME.in_sum2`, (I) or, of stacks of experts, (E, I), and `NAME.counts`, the rows that
were summed. Here they are means, by the path of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from asbuilt.checkpoint.gguf import read_tensor
from asbuilt.checkpoint.gguf_write import file_entries
from asbuilt.checkpoint.save import ROOM, files_aside
from asbuilt.checkpoint.source import Source
from asbuilt.errors import InputError, near
from asbuilt.formats.gguf import GGUFFile, read_header
from asbuilt.formats.gguf_write import Planned, write
from asbuilt.spec import stored_weights

if TYPE_CHECKING:
    from torch import Tensor

KIND, SUMS, COUNTS = "imatrix", ".in_sum2", ".counts"


def read_imatrix(path: Path, source: Source) -> dict[str, Tensor]:
    """Returns the mean squares (I), of stacks of experts (E, I), of the inputs of a model's maps, by weights' paths.

    An expert that no row went through has ones. Raises InputError for another kind of file, names and sizes that are
    not the model's, and sums that no squares give.
    """
    file = read_header(path)
    if file.metadata.get("general.type") != KIND:
        said = file.metadata.get("general.type")
        raise InputError("is no importance matrix", field=f"{path}: general.type", value=said, allowed=KIND)
    entries = file_entries(source)
    shapes = {where: weight.shape for where, weight, _ in stored_weights(source.spec)}
    found: dict[str, Tensor] = {}
    for name in file.tensors:
        stem = name.removesuffix(SUMS)
        if stem == name:
            continue
        if stem not in entries:
            raise InputError("names no tensor of the model", field=str(path), value=stem, fix=near(stem, entries))
        mean = _mean(file, stem)
        for where in entries[stem].paths:
            shape: tuple[int, ...] = shapes[where]
            wanted = shape[:-2] + shape[-1:]
            if math.prod(wanted) != mean.numel():
                said = tuple(mean.shape)
                raise InputError("of another size", field=f"{path}: {name}", value=said, allowed=f"{wanted}")
            found[where] = mean.view(wanted)
    if not found:
        raise InputError("has no sums", field=str(path), allowed=f"tensors NAME{SUMS}")
    return found


def _mean(file: GGUFFile, stem: str) -> Tensor:
    """Returns the means (n, I) of a tensor's sums."""
    import torch

    sums, counts = read_tensor(file, stem + SUMS).float(), read_tensor(file, stem + COUNTS).float().flatten()
    where = f"{file.path}: {stem}"
    if len(counts) == 0 or sums.numel() % len(counts):
        raise InputError("counts and sums disagree", field=where, value=(tuple(sums.shape), len(counts)))
    for values in (sums, counts):
        if not bool(((values >= 0) & values.isfinite()).all()):
            raise InputError("no sums of squares", field=where, value=float(values.min()), allowed="numbers from 0")
    mean = sums.view(len(counts), -1) / counts.clamp(min=1)[:, None]
    return torch.where(counts[:, None] > 0, mean, 1.0)


def write_imatrix(path: Path, source: Source, importance: Mapping[str, Tensor], text: str, tokens: int) -> None:
    """Writes the means as sums over so many tokens of the text of that name.

    Raises InputError for a file that is there, and a full disk; whatever is raised, nothing is left behind.
    """
    import torch

    held = {}
    for name, entry in file_entries(source).items():
        some = [importance[where] for where in entry.paths if where in importance]
        if len(some) == len(entry.paths) and len({one.shape for one in some}) == 1:
            mean = torch.stack(some).mean(0)
            mean = mean[None] if mean.ndim == 1 else mean
            held[name + SUMS] = (mean * tokens).float()
            held[name + COUNTS] = torch.full((len(mean), 1), float(tokens))
    planned = [Planned(name=name, type="F32", shape=tuple(tensor.shape)) for name, tensor in held.items()]
    said = {"general.type": KIND, "imatrix.datasets": [text], "imatrix.chunk_count": 1, "imatrix.chunk_size": tokens}

    def data(tensor: Planned) -> Iterator[memoryview]:
        yield held[tensor.name].contiguous().numpy().data.cast("B")

    with files_aside(path, [path.name], sum(one.nbytes for one in planned) + ROOM) as partial:
        write(partial, path.name, said, [planned], data)

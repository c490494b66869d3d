"""Tensors of GGUF files whose headers were read: their bytes, expanded if they are blocks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from asbuilt.dtypes import BLOCKS, GGUF_FLOATS, GGUF_READABLE
from asbuilt.errors import InputError, near, one_of
from asbuilt.files import open_regular
from asbuilt.formats.gguf import GGUFFile, GGUFTensor

if TYPE_CHECKING:
    import numpy
    import torch

EXPONENT = 0x7C00  # of a float16; all ones for infinities and NaN


def read_tensor(file: GGUFFile, name: str, rows: slice = slice(None)) -> torch.Tensor:
    """Returns a tensor, or the given rows of its first dimension; only their bytes are read.

    F32, F16 and BF16 keep their dtype, block formats are dequantised to float32. Raises InputError for
    an unknown name, an unsupported type, and a file that has changed since its header was read.
    """
    import torch

    from asbuilt.kernels.codebooks import expand

    tensor = _find(file, name)
    shape, start, nbytes = _window(tensor, rows)
    raw = torch.from_numpy(_read_bytes(file.holder(tensor), start, nbytes))
    if tensor.type in GGUF_FLOATS:
        return raw.view(getattr(torch, GGUF_FLOATS[tensor.type])).reshape(shape)
    return _finite(expand(raw, tensor.type.lower()), tensor, file).reshape(shape)


def read_blocks(file: GGUFFile, name: str) -> torch.Tensor:
    """Returns a tensor's blocks as they lie in the file, (..., bytes of a row) in uint8.

    Raises InputError as `read_tensor` does, and where a block's scale is no finite number.
    """
    import torch

    from asbuilt.kernels.codebooks import expand

    tensor = _find(file, name)
    made = torch.empty(tensor.nbytes, dtype=torch.uint8)  # aligned as the kernels like it: nothing copies it again
    raw = made.numpy()
    _read_into(file.holder(tensor), tensor.offset, raw)
    if not _scales_are_finite(raw, tensor.type.lower()):
        _finite(expand(made, tensor.type.lower()), tensor, file)  # names the block
    return made.view(*tensor.shape[:-1], -1)


def _scales_are_finite(raw: numpy.ndarray, format: str) -> bool:
    """Returns what `kernels.packed.finite` does, by one thread, from the bits of the scales: exponents below 31."""
    import torch

    from asbuilt.kernels.packed import SCALES, finite

    if format not in SCALES:
        return finite(torch.from_numpy(raw), format)
    blocks = raw.reshape(-1, BLOCKS[format][1])
    halves = (blocks[:, at : at + 2].view("<u2") for at in SCALES[format])
    return all(bool(((half & EXPONENT) != EXPONENT).all()) for half in halves)


def _find(file: GGUFFile, name: str) -> GGUFTensor:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise InputError("no such tensor", field=str(file.path), value=name, fix=near(name, file.tensors))
    if tensor.type not in GGUF_READABLE:
        raise InputError(
            f"{name} has a type that is not supported",
            field=str(file.path),
            value=tensor.type,
            allowed=one_of(GGUF_READABLE),
        )
    return tensor


def _window(tensor: GGUFTensor, rows: slice) -> tuple[tuple[int, ...], int, int]:
    """Returns shape, first byte and bytes of the rows; a vector is read whole, to keep its blocks intact."""
    if rows == slice(None):
        return tensor.shape, tensor.offset, tensor.nbytes
    if len(tensor.shape) < 2 or rows.step not in (None, 1):
        raise InputError(
            f"rows of {tensor.name} {tensor.shape}", value=rows, allowed="a contiguous range of a matrix's rows"
        )
    first, last, _ = rows.indices(tensor.shape[0])
    n, row_bytes = max(0, last - first), tensor.nbytes // tensor.shape[0]
    return (n, *tensor.shape[1:]), tensor.offset + first * row_bytes, n * row_bytes


def _read_bytes(path: Path, start: int, nbytes: int) -> numpy.ndarray:
    import numpy as np

    raw = np.empty(nbytes, dtype=np.uint8)
    _read_into(path, start, raw)
    return raw


def _read_into(path: Path, start: int, raw: numpy.ndarray) -> None:
    """Fills the bytes from a file. Read, not mapped: if a mapped file is truncated meanwhile, the process is killed."""
    view, read = memoryview(raw), 0  # type: ignore[arg-type]
    try:
        with open_regular(path) as file:
            file.seek(start)
            while read < len(raw) and (more := file.readinto(view[read:])):  # type: ignore[attr-defined]  # pyright: ignore
                read += more
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", field=str(path)) from error
    if read != len(raw):
        raise InputError(f"the header declares {start + len(raw)} bytes, the file has {start + read}", field=str(path))


def _finite(values: torch.Tensor, tensor: GGUFTensor, file: GGUFFile) -> torch.Tensor:
    """Returns the values; raises InputError if a block's scale makes them infinite or NaN."""
    if not bool((ok := values.isfinite()).all()):
        block = int(ok.int().argmin()) // BLOCKS[tensor.type.lower()][0]
        raise InputError(
            f"{tensor.name[:80]}: block {block} has a scale that is not finite",
            field=str(file.holder(tensor)),
            fix="the file is corrupt: download it again",
        )
    return values

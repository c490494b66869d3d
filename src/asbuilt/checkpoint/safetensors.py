"""The data of safetensors files: read by the `safetensors` library, one tensor at a time, from a memory map."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from asbuilt.errors import InputError, shorten
from asbuilt.files import require_regular
from asbuilt.formats.safetensors import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor


class Reader:
    """Reads the data of tensors from their headers, mapping each file on first use."""

    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        self._tensors = tensors
        self._open: dict[Path, Any] = {}

    def __call__(self, name: str) -> Tensor:
        """Returns the tensor, still backed by the file; raises InputError if the file has changed since."""
        from safetensors import SafetensorError, safe_open

        tensor = self._tensors[name]
        try:
            if tensor.path not in self._open:
                require_regular(tensor.path)
                self._open[tensor.path] = safe_open(tensor.path, framework="pt")
            read = self._open[tensor.path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{shorten(name)} cannot be read: {error}", field=str(tensor.path)) from error
        if tuple(read.shape) != tensor.shape:
            raise InputError(f"{shorten(name)} has changed since its header was read", field=str(tensor.path))
        return read

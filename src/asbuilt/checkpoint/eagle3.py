"""Draft layers of EAGLE-3 folders: the description, and the module with its weights."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from asbuilt.checkpoint.load import WHOLE, require_range, stored_dtype
from asbuilt.checkpoint.safetensors import Reader
from asbuilt.checkpoint.source import CONFIG
from asbuilt.errors import InputError
from asbuilt.families import load_config_file
from asbuilt.families.llama import FAMILY
from asbuilt.families.shared.eagle3 import Eagle3, is_eagle3, names, read
from asbuilt.formats.safetensors import StoredTensor, read_folder
from asbuilt.spec import stored_weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from asbuilt.nn.fused_predictor import FusedPredictor


def holds_eagle3(model: str | Path) -> bool:
    """Returns whether a path is a folder of such a draft layer."""
    config = Path(model) / CONFIG
    return "\0" not in str(model) and config.is_file() and is_eagle3(load_config_file(config))


class Eagle3Folder:
    """A folder of a draft layer: `read` is what its config states; names and shapes are checked when it is opened.

    Raises InputError naming the key or the tensors at fault.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.read: Eagle3 = read(load_config_file(self.folder / CONFIG), str(self.folder / CONFIG), FAMILY)
        self.names = names(self.read.part, self.headers)
        for path, weight, _ in stored_weights(self.read.part):
            if path in self.names:
                self._check(self.headers[self.names[path]], weight.shape, self.names[path], whole=weight.whole)

    @cached_property
    def headers(self) -> dict[str, StoredTensor]:
        """The stored tensors."""
        return read_folder(self.folder)

    def _check(self, held: StoredTensor, shape: tuple[int, ...], name: str, *, whole: bool) -> None:
        if held.shape != shape:
            raise InputError(f"{name} has another shape", field=str(self.folder), value=held.shape, allowed=str(shape))
        if not (held.dtype in WHOLE if whole else stored_dtype(held)):
            raise InputError(f"{name} is of an unsupported type", field=str(self.folder), value=held.dtype)

    @property
    def shares_embedding(self) -> bool:
        """Whether it stores no embedding, and reads that of the other model."""
        return "embedding.weight" not in self.names

    def nbytes(self, width: int) -> int:
        """Returns the bytes of the module with numbers of `width` bytes."""
        return sum(math.prod(weight.shape) * width for _, weight, _ in stored_weights(self.read.part))

    def load(self, dtype: torch.dtype, device: torch.device, table: Tensor | None) -> FusedPredictor:
        """Returns the module; `table` is the other model's embedding, for a folder without one."""
        import torch

        from asbuilt.nn.fused_predictor import FusedPredictor

        built = cast(FusedPredictor, FusedPredictor(self.read.part, "").to(device=device, dtype=dtype).eval())
        tensors = dict(built.named_parameters()) | {"offsets": built.offsets}
        stored = Reader(self.headers)
        found = {path: stored(name) for path, name in self.names.items()}
        if self.shares_embedding:
            shape = tuple(tensors["embedding.weight"].shape)
            if table is None or tuple(table.shape) != shape:
                raise InputError(
                    "the draft layer stores no embedding, and the model's has another shape",
                    field="draft",
                    value=None if table is None else tuple(table.shape),
                    allowed=str(shape),
                )
            found["embedding.weight"] = table
        with torch.no_grad():
            for path, tensor in found.items():
                if tensors[path].is_floating_point():
                    require_range(tensor, dtype, path)
                tensors[path].copy_(tensor)
        self._check_offsets(built)
        return built

    def _check_offsets(self, built: FusedPredictor) -> None:
        """Raises InputError for offsets of tokens that are not in the vocabulary, or of one token twice."""
        import torch

        tokens = (torch.arange(len(built.offsets), device=built.offsets.device) + built.offsets).tolist()
        if len(set(tokens)) < len(tokens) or not all(0 <= token < built.n_vocab for token in tokens):
            raise InputError("d2t does not map to distinct tokens of the vocabulary", field=str(self.folder))

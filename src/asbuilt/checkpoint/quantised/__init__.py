"""Checkpoints of quantised weights, read as if they were plain: each packed matrix under its plain name and shape.

Which matrices are packed, and how, is found in the headers of the files: a matrix in 8-bit floats has a scale beside
it, one of GPTQ a `qweight` in its place. The config decides only what the tensors leave open, such as the zero points'
convention. The files are untrusted: shapes and dtypes that do not fit together are refused before any data is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from asbuilt.checkpoint.quantised import floats, integers, tables
from asbuilt.checkpoint.quantised.find import Finder, Module
from asbuilt.checkpoint.safetensors import Reader
from asbuilt.errors import InputError
from asbuilt.formats.safetensors import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

# The end of a name that only packed matrices have beside them, or in their place; what finds their parts.
FOUND_BY: tuple[tuple[str, Callable[[Finder, str], Module | None]], ...] = (
    (".qweight", integers.grouped),
    (".weight.absmax", tables.four_bits),
    (".SCB", tables.eight_bits),
    ("_packed", integers.compressed),
    (".scales", integers.affine),
    ("_scale_inv", floats.scaled),
    ("_scale", floats.scaled),
    (".scale", floats.scaled),
)
# Scales of activations and of the cache: they change how products are computed, not the weights.
OF_ACTIVATIONS = (
    *(f"{one}_{part}" for one in ("input", "output") for part in ("scale", "zero_point", "global_scale")),
    *(f"{one}_{part}" for one in ("k", "v", "q", "kv", "prob", "prob_output") for part in ("scale", "zero_point")),
    "activation_scale",
    "weight_format",
)
UNSCALED = ("F8_E4M3", "F8_E5M2")


class Expanded:
    """The tensors of a checkpoint, packed matrices expanded: their `headers`, and their data by name."""

    def __init__(self, stored: Mapping[str, StoredTensor], said: Mapping[str, Any], where: str) -> None:
        self._read = Reader(dict(stored))
        finder = Finder(stored, said, self._read)
        self._modules = {module.name: module for module in _modules(finder)}
        if not self._modules:
            raise not_packed(said)
        kept = {name: one for name, one in of_weights(stored).items() if name not in finder.taken}
        for name, one in kept.items():
            if one.dtype in UNSCALED:
                raise InputError("an 8-bit float without a scale", field=f"{where}: {name}", value=one.dtype)
        self.headers = kept | {name: _header(module) for name, module in self._modules.items()}
        self._biases = finder.biases & kept.keys()

    def __call__(self, name: str) -> Tensor:
        """Returns a tensor: a packed matrix in float32, any other as stored."""
        module = self._modules.get(name)
        return self._read(name) if module is None else module.expand(self._read)

    def formats(self, name: str) -> tuple[str, ...]:
        """Returns the block formats that hold a matrix exactly, the smallest first; none for another tensor."""
        module = self._modules.get(name)
        return () if module is None else module.formats(self._read)

    def blocks(self, name: str, format: str) -> Tensor:
        """Returns a matrix as blocks (..., bytes) of one of these formats."""
        return self._modules[name].blocks(self._read, format)

    def without_zero_biases(self, named: Collection[str]) -> dict[str, StoredTensor]:
        """Returns the headers without biases that the model does not have: AutoGPTQ adds some, all of them zero."""
        added = {name for name in self._biases - set(named) if not self._read(name).any()}
        return {name: one for name, one in self.headers.items() if name not in added}


def holds_packed(stored: Mapping[str, StoredTensor], said: Mapping[str, Any]) -> bool:
    """Returns whether any matrix is packed in a way that is read."""
    return next(iter(_modules(Finder(stored, said, Reader(dict(stored))))), None) is not None


def _modules(finder: Finder) -> list[Module]:
    found = []
    for name in finder.stored:
        for end, make in FOUND_BY:
            if name.endswith(end) and name not in finder.taken:
                module = make(finder, name.removesuffix(end))
                if module is not None:
                    found.append(module)
                    break
    return found


def of_weights(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors but for scales of activations and of the cache."""
    return {name: one for name, one in stored.items() if not _of_activations(one)}


def _of_activations(tensor: StoredTensor) -> bool:
    end = tensor.name.rpartition(".")[2]
    return (end in OF_ACTIVATIONS or end.endswith("_input_scale")) and len(tensor.shape) <= 1


def _header(module: Module) -> StoredTensor:
    return StoredTensor(
        name=module.name,
        shape=module.shape,
        dtype="F32",
        path=module.of.path,
        offset=module.of.offset,
        nbytes=4 * math.prod(module.shape),
    )


def not_packed(said: Mapping[str, Any]) -> InputError:
    """Returns the InputError for weights that are packed in a way that is not read, or not packed at all."""
    return InputError(
        "no weights are packed in a way that can be loaded",
        field="quantization_config.quant_method",
        value=said.get("quant_method"),
        fix="use the unquantised checkpoint, or a GGUF file; `asbuilt plan` does without the weights",
    )

"""Writing quantised checkpoint folders: matrices of linear maps in 8 or 4 bits, as published ones have them.

`fp8` is as DeepSeek's (a scale for 128 x 128 numbers, or fewer), the others compressed-tensors': `int8` with a scale
per row, `int4` with one per group of a row, `nvfp4` and `mxfp4`. Embeddings, heads, routers, norms, biases, and what is
not stored by rows or does not divide into groups stay as they are, and are listed in the config.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asbuilt.checkpoint.gguf_write import Off, Row, Summary
from asbuilt.checkpoint.load import Contents, as_source
from asbuilt.checkpoint.packed import by_rows
from asbuilt.checkpoint.regroup import Regrouped
from asbuilt.checkpoint.save import MAX_SHARD_BYTES, Place, Progress, write_folder
from asbuilt.checkpoint.source import Source
from asbuilt.checkpoint.wanted import matching
from asbuilt.dtypes import short_name
from asbuilt.errors import InputError, near, one_of
from asbuilt.families import tensor_table
from asbuilt.families.shared.table import Entry
from asbuilt.spec import Model, stored_weights
from asbuilt.spec.linear import maps_by_path

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Numbers of a row that share a scale in int4, rows and columns in fp8: the largest that divides all matrices, in fp8
# the first where none does. transformers 5.24 takes tiles cut off at the ends for smaller whole ones.
GROUPS = (128, 64, 32)
DIVIDES = {"int8": 1, "fp8": 1, "nvfp4": 16, "mxfp4": 32}
FOLDER_FORMATS = ("fp8", "int8", "int4", "nvfp4", "mxfp4")


def folder_format(name: str, what: str = "format") -> str:
    """Returns our name of a format of folders; raises InputError naming `what`."""
    found = short_name(name)
    if found not in FOLDER_FORMATS:
        allowed, fix = one_of(FOLDER_FORMATS), near(found, FOLDER_FORMATS)
        raise InputError("is not written to a folder", field=what, value=name, allowed=allowed, fix=fix)
    return found


class Packer:
    """Rounds the tensors of one folder, and says what its config says of that."""

    def __init__(
        self, format: str, spec: Model, family: str, kept: Sequence[str], importance: Mapping[str, Tensor]
    ) -> None:
        self.format, self.summary, self._importance = format, Summary(), importance
        shapes = {path: weight.shape for path, weight, _ in stored_weights(spec)}
        self._kinds = {path: owner.kind for path, _, owner in stored_weights(spec)}
        self._entries: dict[str, Entry] = {}
        found, others = {}, []
        maps = {path for path in maps_by_path(spec) if self._kinds.get(path) not in ("router", "head", None)}
        maps -= {path for glob in kept for path in matching(glob, list(shapes))}
        for entry in tensor_table(family, spec).entries:
            ours = maps.issuperset(entry.paths) and by_rows(entry.layout, {}) is not None
            stored = entry.layout.stored_shapes([shapes[path] for path in entry.paths])
            for name, shape in zip(entry.names, stored, strict=True):
                self._entries[name] = entry
                if len(shape) == 2 and name.endswith(".weight"):
                    found[name] = tuple(shape)
                    others += [] if ours and self._divides(shape[1]) else [name]
        self._packed = {name: shape for name, shape in found.items() if name not in set(others)}
        if not self._packed:
            allowed = "matrices of linear maps that are stored by rows, of a length that divides"
            raise InputError("has nothing to be rounded", field="format", value=format, allowed=allowed)
        columns = [shape[1] for shape in self._packed.values()]
        self.group = next((n for n in GROUPS if all(one % n == 0 for one in columns)), GROUPS[-1])
        sizes = [*columns, *(shape[0] for shape in self._packed.values())]
        side = next((n for n in GROUPS if all(one % n == 0 for one in sizes)), GROUPS[0])
        self.block = (side, side)
        self.ignored = sorted(name.removesuffix(".weight") for name in others)

    def _divides(self, columns: int) -> bool:
        """Returns whether rows divide into the format's groups."""
        return columns % DIVIDES.get(self.format, GROUPS[-1]) == 0

    def config(self) -> dict[str, Any]:
        """Returns the `quantization_config`."""
        if self.format == "fp8":
            said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
            return said | {"weight_block_size": list(self.block), "modules_to_not_convert": self.ignored}
        weights = {"symmetric": True, "dynamic": False, "observer": "minmax", **self._scheme()}
        layout = {"int8": "int-quantized", "int4": "pack-quantized"}.get(self.format, f"{self.format}-pack-quantized")
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group | {"format": layout}},
            "ignore": self.ignored,
        }

    def _scheme(self) -> dict[str, Any]:
        match self.format:
            case "int8":
                return {"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None}
            case "int4":
                return {"num_bits": 4, "type": "int", "strategy": "group", "group_size": self.group}
            case "nvfp4":
                return {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
            case _:
                return {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}

    def kind(self, path: str) -> str:
        """Returns the kind of part that a weight is of."""
        return self._kinds[path]

    def places(self, place: Place) -> Iterator[Place]:
        """Yields the tensors that a tensor is stored as; counts their bytes."""
        held = list(self._places(place)) if place.name in self._packed else [place]
        self.summary.after[self._kinds[self._entries[place.name].paths[0]]] += sum(one.nbytes for one in held)
        yield from held

    def _places(self, place: Place) -> Iterator[Place]:
        import torch

        rows, columns = place.shape
        per = {"nvfp4": 16, "mxfp4": 32}.get(self.format, self.group)
        scale, group = self._scale(place.dtype), (rows, columns // per)
        tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
        match self.format:
            case "int8":
                tensors = {"weight": (torch.int8, place.shape), "weight_scale": (scale, (rows, 1))}
            case "int4":
                tensors = {"weight_packed": (torch.int32, (rows, columns // 8)), "weight_scale": (scale, group)}
                tensors["weight_shape"] = (torch.int64, (2,))
            case "fp8":
                grid = (math.ceil(rows / self.block[0]), math.ceil(columns / self.block[1]))
                tensors = {"weight": (torch.float8_e4m3fn, place.shape), "weight_scale_inv": (torch.float32, grid)}
            case "nvfp4":
                tensors = {"weight_packed": (torch.uint8, (rows, columns // 2))}
                tensors |= {"weight_scale": (torch.float8_e4m3fn, group), "weight_global_scale": (torch.float32, (1,))}
            case _:
                tensors = {"weight_packed": (torch.uint8, (rows, columns // 2)), "weight_scale": (torch.uint8, group)}
        for end, (dtype, shape) in tensors.items():
            yield Place(name=place.name.removesuffix("weight") + end, dtype=dtype, shape=shape)

    @staticmethod
    def _scale(dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of scales that are numbers: that of the weights if it has 16 bits."""
        import torch

        return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32

    def __call__(self, name: str, tensor: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the tensors that a tensor, otherwise stored in `dtype`, is stored as, by name."""
        if name not in self._packed:
            return {name: tensor}
        from asbuilt.kernels import rounding

        x, weighs = tensor.detach().to("cpu").float(), self._weighs(name)
        if not bool(x.isfinite().all()):
            raise InputError("holds NaN or infinite numbers", field=name)
        match self.format:
            case "int4":
                made, now = rounding.int4(x, self.group, self._scale(dtype), weighs)
            case "int8":
                made, now = rounding.int8(x, self._scale(dtype))
            case "fp8":
                made, now = rounding.fp8(x, self.block)
            case _:
                made, now = getattr(rounding, self.format)(x)
        off = Off(weighs)
        off.add(x, now, weighs)
        nbytes, paths = sum(one.numel() * one.itemsize for one in made.values()), tuple(self._entries[name].paths)
        said = {"error": off.error, "output_error": off.output_error}
        self.summary.types[self.format] += 1
        self.summary.rows.append(Row(paths=paths, type=self.format, nbytes=nbytes, **said))
        base = name.removesuffix("weight")
        return {base + end: one for end, one in made.items()}

    def _weighs(self, name: str) -> Tensor | None:
        """Returns the importance of a matrix's columns (I), of an expert's its own; None where it is not known."""
        entry = self._entries[name]
        some = [self._importance[path] for path in entry.paths if path in self._importance]
        if len(some) < len(entry.paths):
            return None
        mean = sum(some[1:], some[0]) / len(some)
        if mean.ndim == 2:
            mean = mean[entry.names.index(name)] if len(entry.names) == len(mean) else mean.mean(0)
        return mean if tuple(mean.shape) == self._packed[name][1:] else None


def write_packed(
    source: Source | str | Path,
    out: str | os.PathLike[str],
    format: str,
    *,
    kept: Sequence[str] = (),
    importance: Mapping[str, Tensor] | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> Summary:
    """Writes `source` as the folder `out`, its matrices rounded to `format`, and returns what was written.

    `kept` are globs of the paths of weights that stay as they are. Raises InputError as `convert` does, and for a model
    of no published family, numbers that are NaN or infinite, and one without a matrix to be rounded; whatever is
    raised, nothing is left behind.
    """
    source = as_source(source)
    if not source.family:
        raise InputError("is of no published family, whose layout such folders have", field="MODEL", value=source.name)
    contents = Contents(source)
    packer = Packer(folder_format(format), source.spec, source.family, kept, importance or {})
    common = contents.dtype(None)
    for entry in contents.entries:
        held = sum(contents.headers[name].nbytes for name in entry.names)
        packer.summary.before[packer.kind(entry.paths[0])] += held
    write_folder(
        out,
        spec=source.spec,
        family=source.family,
        carried=source.reading.carried,
        config_dtype=str(common).removeprefix("torch."),
        dtypes={path: common for entry in contents.entries for path in entry.paths},
        read=Regrouped(contents).read,
        beside=source,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
        pack=packer,
    )
    packer.summary.files = sorted(Path(out).iterdir())
    return packer.summary

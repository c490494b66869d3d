"""Low-rank adapters in the layout of the PEFT library: a folder with adapter_config.json and adapter_model.safetensors.

Modules have the names of the published family, each with `lora_A.weight` (r, in) and `lora_B.weight` (out, r). A module
that a file keeps as one and the model as several maps (q, k and v) has one A, which each of them then has.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asbuilt.checkpoint.packed import by_rows
from asbuilt.checkpoint.safetensors import Reader
from asbuilt.errors import InputError, shorten
from asbuilt.families import load_config_file
from asbuilt.families.shared.table import Entry, Layout, Same, TensorTable, Transpose, as_stored
from asbuilt.formats.safetensors import StoredTensor, read_header
from asbuilt.spec import Lora, Model
from asbuilt.spec.linear import Map, maps_by_path, transform_maps
from asbuilt.spec.part import is_finite

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BEGIN, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
LISTED = 5
USED = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
# Which modules have adapters is read off the tensors; the rest is about training, or about where the base came from.
IRRELEVANT = {
    "target_modules": "the tensors say it",
    "exclude_modules": "the tensors say it",
    "layers_to_transform": "the tensors say it",
    "layers_pattern": "the tensors say it",
    "auto_mapping": "names the class of the base",
    "base_model_name_or_path": "the base is given",
    "revision": "the base is given",
    "fan_in_fan_out": "says how the base stores its matrices",
    "inference_mode": "about training",
    "init_lora_weights": "about training",
    "lora_dropout": "about training",
    "task_type": "about training",
    "loftq_config": "about how it began",
    "peft_version": "who wrote it",
    "megatron_core": "about another library",
    "qalora_group_size": "read where use_qalora is set",
    "bias": "refused unless none",
}
SUFFIX = re.compile(r"[\w.]{1,200}")


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter for a model: the spec with it, and its tensors by path."""

    spec: Model
    tensors: Mapping[str, Tensor]


def read_adapter(folder: str | os.PathLike[str], spec: Model, table: TensorTable) -> Adapter:
    """Returns the adapter in `folder` for a model, whose modules a published family's `table` names.

    Raises InputError for a folder without a LoRA, an unread key that affects the computation, a module that the model
    lacks or that cannot have an adapter, and tensors that do not fit.
    """
    place = Path(folder)
    config = load_config_file(place / CONFIG)
    where = str(place / CONFIG)
    _require_plain(config, where)
    stored = read_header(place / WEIGHTS)
    modules = _modules(stored, str(place / WEIGHTS))
    reader = Reader(stored)
    maps: dict[str, tuple[int, float]] = {}
    tensors: dict[str, Tensor] = {}
    for entry, names in _entries(modules, spec, table, str(place / WEIGHTS)):
        ranks = [stored[f"{BEGIN}{name}{A}"].shape[0] for name in names]
        found = {(rank, _alpha(config, name, rank, where)) for name, rank in zip(names, ranks, strict=True)}
        if len(found) > 1:
            raise InputError("experts of one stack have several ranks or alphas", field=where, value=names[0])
        ((rank, alpha),) = found
        made = _loaded(
            entry.layout, [reader(f"{BEGIN}{n}{A}") for n in names], [reader(f"{BEGIN}{n}{B}") for n in names]
        )
        for path, (a, b) in zip(entry.paths, made, strict=True):
            begin = path.removesuffix("weight") if path.endswith(".weight") else f"{path}_"
            maps[path] = (rank, alpha)
            tensors |= {f"{begin}lora_a": a, f"{begin}lora_b": b}
    adapted = _adapted(spec, maps)
    _require_shapes(adapted, tensors, str(place / WEIGHTS))
    return Adapter(spec=adapted, tensors=tensors)


def _require_plain(config: Mapping[str, Any], where: str) -> None:
    """Raises InputError unless the config is that of plain low-rank adapters."""
    if config.get("peft_type") != "LORA":
        raise InputError("no LoRA", field=f"{where}: peft_type", value=config.get("peft_type"), allowed="LORA")
    if config.get("bias", "none") != "none":
        raise InputError(
            "biases of the base are trained too", field=f"{where}: bias", value=config["bias"], allowed="none"
        )
    for key, value in config.items():
        if key not in USED and key not in IRRELEVANT and value not in (None, False, {}, []):
            raise InputError("changes what is computed, and is not read", field=f"{where}: {key}", value=value)
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict) or not all(isinstance(p, str) and SUFFIX.fullmatch(p) for p in patterns):
            raise InputError(
                "not names of modules", field=f"{where}: {key}", value=patterns, allowed="ends of names, no expressions"
            )


def _modules(stored: Mapping[str, StoredTensor], where: str) -> list[str]:
    """Returns the names of the modules that have an A and a B; raises InputError for any other tensor."""
    named = (name for name in stored if name.startswith(BEGIN) and name.endswith((A, B)))
    names = [name for name in named if len(stored[name].shape) == 2]
    others = [shorten(name) for name in stored if name not in set(names)]
    modules = list(dict.fromkeys(name.removeprefix(BEGIN).removesuffix(A).removesuffix(B) for name in names))
    alone = [shorten(name) for name in modules if not {f"{BEGIN}{name}{A}", f"{BEGIN}{name}{B}"} <= stored.keys()]
    if others or alone or not modules:
        what = f"{', '.join((others or alone)[:LISTED])}" if others or alone else "no tensor"
        raise InputError(
            "not the tensors of low-rank adapters of linear maps",
            field=where,
            value=what,
            allowed=f"{BEGIN}MODULE{A} and {BEGIN}MODULE{B}",
        )
    return modules


def _entries(modules: Sequence[str], spec: Model, table: TensorTable, where: str) -> list[tuple[Entry, list[str]]]:
    """Returns the tensors of the model's file that the modules hold, with the modules."""
    places = maps_by_path(spec)
    named = {f"{name}.weight" for name in modules}
    found, left = [], set(named)
    for entry in as_stored(table, named).entries:
        if named.isdisjoint(entry.names):
            continue
        if not named.issuperset(entry.names) or not places.keys() >= {*entry.paths} or rows_of(entry.layout) is None:
            refused = next(name for name in entry.names if name in named)
            raise InputError("cannot have an adapter here", field=where, value=refused.removesuffix(".weight"))
        found.append((entry, [name.removesuffix(".weight") for name in entry.names]))
        left -= set(entry.names)
    if left:
        listed = ", ".join(shorten(name.removesuffix(".weight")) for name in sorted(left)[:LISTED])
        raise InputError("are no modules of this model", field=where, value=listed)
    return found


def rows_of(layout: Layout) -> Layout | None:
    """Returns how a layout of a matrix moves the rows of B (out, r); None where it moves more than rows."""
    return by_rows(layout, {Transpose: Same()})  # B is stored outputs first, whatever the matrix is


def _loaded(layout: Layout, a: list[Tensor], b: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns A and B of each of the model's maps: B by rows, A of all that share one."""
    rows = rows_of(layout)
    assert rows is not None
    made = rows.load(b)
    shared = rows.load(a) if len(a) > 1 else a * len(made)
    return list(zip(shared, made, strict=True))


def _alpha(config: Mapping[str, Any], module: str, rank: int, where: str) -> float:
    """Returns alpha, with which A and B count alpha / rank; raises InputError where the rank is another."""
    said = _of_module(config, "r", "rank_pattern", module, where)
    if said != rank:
        raise InputError(
            "is not the rank of the tensors", field=f"{where}: r", value=said, allowed=f"{rank} for {module}"
        )
    alpha = float(_of_module(config, "lora_alpha", "alpha_pattern", module, where))
    return alpha * math.sqrt(rank) if config.get("use_rslora") else alpha


def _of_module(config: Mapping[str, Any], key: str, patterns: str, module: str, where: str) -> float:
    """Returns a module's setting: of the first pattern that its name ends with, else of `key`."""
    said = (config.get(patterns) or {}).items()
    value = next((value for end, value in said if module == end or module.endswith(f".{end}")), config.get(key))
    if not is_finite(value) or not isinstance(value, int | float) or value <= 0:
        raise InputError("not a number", field=f"{where}: {key}", value=value, allowed="above 0")
    return value


def _adapted(spec: Model, maps: Mapping[str, tuple[int, float]]) -> Model:
    """Returns the model with adapters on the matrices at these paths."""

    def with_adapter(path: str, one: Map) -> Map:
        if path not in maps:
            return one
        if isinstance(one, Lora):
            raise InputError("already has an adapter", field="adapter", value=path)
        rank, alpha = maps[path]
        return Lora(base=one, rank=rank, alpha=alpha)

    return transform_maps(spec, with_adapter)


def _require_shapes(spec: Model, tensors: Mapping[str, Tensor], where: str) -> None:
    from asbuilt.spec import weights

    shapes = {path: weight.shape for path, weight, _ in weights(spec)}
    for path, tensor in tensors.items():
        if shapes[path] != tuple(tensor.shape) or not tensor.is_floating_point():
            raise InputError(
                f"the adapter at {path} does not fit",
                field=where,
                value=f"{tensor.dtype} {tuple(tensor.shape)}",
                allowed=str(shapes[path]),
            )

"""Writing a model's low-rank adapters in the layout of the PEFT library."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asbuilt.checkpoint.adapter import BEGIN, CONFIG, WEIGHTS, A, B, rows_of
from asbuilt.checkpoint.save import aside
from asbuilt.errors import InputError
from asbuilt.families import tensor_table
from asbuilt.families.shared.table import Entry, Layout
from asbuilt.spec import Lora, without_adapters
from asbuilt.spec.linear import Map, maps_by_path

if TYPE_CHECKING:
    from torch import Tensor

    from asbuilt.nn.model import Model as Built


def save_adapter(model: Built, folder: str | os.PathLike[str], *, family: str, base: str | None = None) -> None:
    """Writes the model's adapters as a folder that PEFT loads beside a base model of the family, which `base` names.

    Maps that the family stores as one matrix, such as q, k and v, get one adapter of their ranks together. Raises
    InputError for a model without adapters, a family that cannot name its modules, adapters that PEFT's layout has no
    place for, and a folder that exists and is not empty. Whatever is raised, nothing is left behind.
    """
    from safetensors.torch import save as safetensors

    from asbuilt.nn import stored_tensors

    spec, held = model.spec, stored_tensors(model)
    maps = maps_by_path(spec)
    if not any(isinstance(one, Lora) for one in maps.values()):
        raise InputError("has no adapters", field="model", value=spec.name, fix="asbuilt.spec.adapted gives it some")
    tensors, found = {}, {}
    for entry in tensor_table(family, without_adapters(spec)).entries:
        own = {path: maps[path] for path in entry.paths if path in maps}
        if not any(isinstance(one, Lora) for one in own.values()):
            continue
        scale = _scale(own)
        for name, a, b in _stored(entry, own, held):
            module = name.removesuffix(".weight")
            tensors |= {f"{BEGIN}{module}{A}": a.contiguous().cpu(), f"{BEGIN}{module}{B}": b.contiguous().cpu()}
            found[module] = (a.shape[0], scale * a.shape[0])
    config = _config(found, base)
    written = safetensors(tensors, metadata={"format": "pt"})
    with aside(Path(folder), len(written) + (1 << 20)) as partial:
        (partial / WEIGHTS).write_bytes(written)
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _scale(maps: Mapping[str, Map]) -> float:
    """Returns alpha / rank of the adapters of maps that are stored together; raises InputError for several ranks."""
    kinds = {(one.rank, one.alpha) for one in maps.values() if isinstance(one, Lora)}
    if len(kinds) > 1:
        raise InputError("are stored as one, and have several ranks or alphas", field="model", value=", ".join(maps))
    ((rank, alpha),) = kinds
    return alpha / rank


def _stored(entry: Entry, maps: Mapping[str, Map], held: Mapping[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """Returns name, A and B of each stored module."""
    rows, one, whole = rows_of(entry.layout), len(entry.names) == 1, len(maps) == len(entry.paths)
    loras = [path for path, found in maps.items() if isinstance(found, Lora)]
    if rows is None or not whole or (len(loras) < len(maps) and not one):
        raise InputError("PEFT's layout has no place for these adapters", field="model", value=", ".join(entry.paths))
    begins = {path: path.removesuffix("weight") if path.endswith(".weight") else f"{path}_" for path in loras}
    a, b = ({path: held[f"{begins[path]}{leaf}"].detach() for path in loras} for leaf in ("lora_a", "lora_b"))
    first, *others = a.values()
    if not one:
        return list(zip(entry.names, rows.save([*a.values()]), rows.save([*b.values()]), strict=True))
    if len(loras) == len(maps) and all(other.equal(first) for other in others):
        return [(entry.names[0], first, rows.save([*b.values()])[0])]
    return [(entry.names[0], *_side_by_side(rows, {path: one.plain.d_out for path, one in maps.items()}, a, b))]


def _side_by_side(
    rows: Layout, widths: Mapping[str, int], a: Mapping[str, Tensor], b: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns one A and B of maps that are stored as one matrix, of these widths: their ranks one after another.

    The rows of each map multiply its own rows of A, and zeros the others, so that n adapters of rank r are one of rank
    n r; a map without an adapter has zeros alone.
    """
    import torch

    every = torch.cat(list(a.values()))
    rank, at, wide = len(every) // len(a), 0, []
    for path, width in widths.items():
        made = every.new_zeros((width, len(every)))
        if path in b:
            made[:, at : at + rank] = b[path]
            at += rank
        wide.append(made)
    return every, rows.save(wide)[0]


def _config(modules: Mapping[str, tuple[int, float]], base: str | None) -> dict[str, Any]:
    """Returns adapter_config.json: the most frequent rank and alpha, and what differs from them by module."""
    (rank, alpha), _ = Counter(modules.values()).most_common(1)[0]
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {module: own for module, (own, _) in modules.items() if own != rank},
        "alpha_pattern": {module: own for module, (_, own) in modules.items() if own != alpha},
        "target_modules": sorted(modules),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }

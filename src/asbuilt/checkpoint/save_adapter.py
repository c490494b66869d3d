"""Writing a model's low-rank adapters in the layout of the PEFT library."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asbuilt.checkpoint.adapter import BEGIN, CONFIG, WEIGHTS, A, B, rows_of
from asbuilt.checkpoint.save import aside
from asbuilt.errors import InputError
from asbuilt.families import tensor_table
from asbuilt.families.shared.table import Entry
from asbuilt.spec import Lora, without_adapters
from asbuilt.spec.linear import maps_by_path

if TYPE_CHECKING:
    from torch import Tensor

    from asbuilt.nn.model import Model as Built


def save_adapter(model: Built, folder: str | os.PathLike[str], *, family: str, base: str | None = None) -> None:
    """Writes the model's adapters as a folder that PEFT loads beside a base model of the family, which `base` names.

    Raises InputError for a model without adapters, a family that cannot name its modules, adapters that PEFT's layout
    has no place for, and a folder that exists and is not empty. Whatever is raised, nothing is left behind.
    """
    from safetensors.torch import save as safetensors

    from asbuilt.nn import stored_tensors

    spec, held = model.spec, stored_tensors(model)
    loras = {path: one for path, one in maps_by_path(spec).items() if isinstance(one, Lora)}
    if not loras:
        raise InputError("has no adapters", field="model", value=spec.name, fix="asbuilt.spec.adapted gives it some")
    tensors, found = {}, {}
    for entry in tensor_table(family, without_adapters(spec)).entries:
        own = [loras.get(path) for path in entry.paths]
        if own == [None] * len(own):
            continue
        for name, a, b in _stored(entry, own, held):
            module = name.removesuffix(".weight")
            tensors |= {f"{BEGIN}{module}{A}": a.contiguous().cpu(), f"{BEGIN}{module}{B}": b.contiguous().cpu()}
            found[module] = own[0]
    config = _config({module: lora for module, lora in found.items() if lora is not None}, base)
    written = safetensors(tensors, metadata={"format": "pt"})
    with aside(Path(folder), len(written) + (1 << 20)) as partial:
        (partial / WEIGHTS).write_bytes(written)
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _stored(entry: Entry, loras: Sequence[Lora | None], held: Mapping[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """Returns name, A and B of each stored module; raises InputError where several maps of one have several As."""
    rows, shown = rows_of(entry.layout), ", ".join(entry.paths)
    begins = [path.removesuffix("weight") if path.endswith(".weight") else f"{path}_" for path in entry.paths]
    if rows is None or None in loras:
        raise InputError("PEFT's layout has no place for these adapters", field="model", value=shown)
    if len({(lora.rank, lora.alpha) for lora in loras if lora is not None}) > 1:
        raise InputError("are stored as one, and have several ranks or alphas", field="model", value=shown)
    a, b = ([held[f"{begin}{leaf}"].detach() for begin in begins] for leaf in ("lora_a", "lora_b"))
    if len(entry.names) == 1 and any(not other.equal(a[0]) for other in a):
        raise InputError(
            "are stored as one, with one A for all", field="model", value=shown, fix="save it in our own form"
        )
    every = a[:1] if len(entry.names) == 1 else rows.save(a)
    return list(zip(entry.names, every, rows.save(b), strict=True))


def _config(loras: Mapping[str, Lora], base: str | None) -> dict[str, Any]:
    """Returns adapter_config.json: the most frequent rank and alpha, and what differs from them by module."""
    (rank, alpha), _ = Counter((lora.rank, lora.alpha) for lora in loras.values()).most_common(1)[0]
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {module: lora.rank for module, lora in loras.items() if lora.rank != rank},
        "alpha_pattern": {module: lora.alpha for module, lora in loras.items() if lora.alpha != alpha},
        "target_modules": sorted(loras),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }

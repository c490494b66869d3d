"""NVIDIA's Model Optimizer: an algorithm by name for all modules, or one for each named layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asbuilt.packing import FIELD, listed
from asbuilt.plan.stored.cache import published_cache
from asbuilt.plan.stored.rules import (
    FLOAT,
    LARGEST_GROUP,
    MXFP4,
    MXFP8,
    Named,
    Packing,
    Rule,
    an_object,
    grouped,
    of_name,
    require_few,
    tiled,
    whole,
)

ALGORITHMS: dict[str, tuple[Callable[[int], Rule], str | None]] = {
    "FP8": (lambda group: grouped(8, scale=0, whole=2 * FLOAT), "fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": (lambda group: grouped(8, scale=FLOAT), "fp8"),
    "FP8_PB_WO": (lambda group: tiled(128, 128), None),
    "MXFP8": (lambda group: MXFP8, "fp8"),
    "NVFP4": (lambda group: grouped(4, group or 16, scale=1, whole=2 * FLOAT), "fp4"),
    "W4A16_NVFP4": (lambda group: grouped(4, group or 16, scale=1, whole=FLOAT), None),
    "MXFP4": (lambda group: MXFP4, None),
    "W4A16_MXFP4": (lambda group: MXFP4, None),
    "W4A8_MXFP4_FP8": (lambda group: grouped(4, 32, scale=1, whole=FLOAT), None),
    "W4A8_NVFP4_FP8": (lambda group: grouped(4, group or 16, scale=1, whole=2 * FLOAT), None),
    "W4A16_AWQ": (lambda group: grouped(4, group or 128), None),
    "INT4_AWQ": (lambda group: grouped(4, group or 128), None),
    "W4A8_AWQ": (lambda group: grouped(4, group or 128, whole=2 * FLOAT), None),
    "W8A16": (lambda group: grouped(8), None),
    "W8A8_SQ_PER_CHANNEL": (lambda group: grouped(8, scale=FLOAT), "int8"),
    "INT8_SQ": (lambda group: grouped(8, scale=FLOAT), "int8"),
}


def modelopt(said: Mapping[str, Any]) -> Packing:
    """One algorithm for all modules that are not left out, or one per named layer."""
    kv, note = published_cache(said)
    if said.get("quantized_layers") is None:
        name, rule, compute = _algorithm(said)
        return Packing(method=f"modelopt {name}", rule=rule, compute=compute, kv=kv, note=note)
    names, named, computes = by_layer(said)
    return Packing(
        method=f"modelopt {' + '.join(names)}",
        named=named,
        compute=computes.pop() if len(computes) == 1 else None,
        kv=kv,
        note=note,
    )


def by_layer(said: Mapping[str, Any]) -> tuple[list[str], tuple[Named, ...], set[str | None]]:
    """Returns the names of the algorithms of `quantized_layers`, the modules of each, and what products run at."""
    layers = an_object(said["quantized_layers"] or None, "quantized_layers", "an object of layers")
    found: dict[tuple[str, int], list[str]] = {}
    for layer, own in layers.items():
        own = own if isinstance(own, dict) else {}
        found.setdefault((str(own.get("quant_algo")), _group(own)), []).append(layer)
    require_few(len(found), "quantized_layers")
    rules = [
        (tuple(listed(names, FIELD)), _algorithm({"quant_algo": name, "group_size": group or None}))
        for (name, group), names in found.items()
    ]
    return (
        sorted({name for _, (name, _, _) in rules}),
        tuple(Named(patterns=names, rule=rule, required=True) for names, (_, rule, _) in rules),
        {compute for _, (_, _, compute) in rules},
    )


def _group(said: Mapping[str, Any]) -> int:
    return 0 if said.get("group_size") is None else whole(said, "group_size", None, 1, LARGEST_GROUP)


def _algorithm(said: Mapping[str, Any]) -> tuple[str, Rule, str | None]:
    make, compute = of_name(said.get("quant_algo"), ALGORITHMS, "quant_algo")
    return said["quant_algo"], make(_group(said)), compute

"""torchao: a config class by name, for all linear maps or by the names of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asbuilt.errors import InputError
from asbuilt.packing import FIELD
from asbuilt.plan.stored.rules import (
    FLOAT,
    LARGEST_GROUP,
    MXFP4,
    MXFP8,
    SCALE,
    Named,
    Packing,
    Rule,
    an_object,
    grouped,
    of_name,
    require_few,
    whole,
)

Made = tuple[Rule, str | None]


def _group(said: Mapping[str, Any], default: int = 128) -> int:
    return whole(said, "group_size", default, 1, LARGEST_GROUP)


def _eight(said: Mapping[str, Any]) -> Rule:
    return grouped(8, -1 if said.get("group_size") is None else _group(said))


def _float8(said: Mapping[str, Any]) -> Rule:
    """A float32 for each row, or for the matrix (`PerTensor`, the default)."""
    rows = "PerRow" in str(said.get("granularity"))
    return grouped(8, scale=FLOAT) if rows else grouped(8, scale=0, whole=FLOAT)


def _intx(said: Mapping[str, Any]) -> Rule:
    """Numbers of a few bits, each in a byte, with a scale and a zero point per row or group."""
    granularity = said.get("weight_granularity", said.get("granularity"))
    sizes = granularity.get("_data", {}) if isinstance(granularity, dict) else {}
    sizes = sizes if isinstance(sizes, dict) else {}
    return grouped(8, -1 if sizes.get("group_size") is None else _group(sizes), zeros=1)


# By the name of the config's class; older configs have the name of a function.
KINDS: dict[str, Callable[[Mapping[str, Any]], Made]] = {
    "Int4WeightOnlyConfig": lambda said: (grouped(4, _group(said), zeros=SCALE), None),
    "Int8WeightOnlyConfig": lambda said: (_eight(said), None),
    "Int8DynamicActivationInt8WeightConfig": lambda said: (_eight(said), "int8"),
    "Int8DynamicActivationInt4WeightConfig": lambda said: (grouped(8, _group(said, 32), zeros=1), None),
    "IntxWeightOnlyConfig": lambda said: (_intx(said), None),
    "Int8DynamicActivationIntxWeightConfig": lambda said: (_intx(said), None),
    "Float8WeightOnlyConfig": lambda said: (grouped(8, scale=FLOAT), None),
    "Float8DynamicActivationFloat8WeightConfig": lambda said: (_float8(said), "fp8"),
    "Float8DynamicActivationInt4WeightConfig": lambda said: (grouped(4, 128, zeros=SCALE), None),
    "MXFPInferenceConfig": lambda said: (MXFP4 if "float4" in str(said.get("weight_dtype")) else MXFP8, None),
    "NVFP4InferenceConfig": lambda said: (grouped(4, 16, scale=1, whole=FLOAT), "fp4"),
}
OLDER = {
    "int4_weight_only": "Int4WeightOnlyConfig",
    "int8_weight_only": "Int8WeightOnlyConfig",
    "int8_dynamic_activation_int8_weight": "Int8DynamicActivationInt8WeightConfig",
    "int8_dynamic_activation_int4_weight": "Int8DynamicActivationInt4WeightConfig",
    "float8_weight_only": "Float8WeightOnlyConfig",
    "float8_dynamic_activation_float8_weight": "Float8DynamicActivationFloat8WeightConfig",
}
BY_NAME = ("ModuleFqnToConfig", "FqnToConfig")
DEFAULT = "_default"


def torchao(said: Mapping[str, Any]) -> Packing:
    """One class for all linear maps, or one for each named module, `_default` for the others."""
    kind = said.get("quant_type")
    if isinstance(kind, str):
        rule, compute = _made({"_type": OLDER.get(kind, kind), "_data": said.get("quant_type_kwargs") or {}})
        return Packing(method="torchao", rule=rule, compute=compute)
    own = an_object(an_object(kind, "quant_type").get("default"), "quant_type.default")
    if own.get("_type") not in BY_NAME:
        rule, compute = _made(own)
        return Packing(method="torchao", rule=rule, compute=compute, tables=_tables(said), heads=_tables(said))
    found = an_object(_data(own).get("module_fqn_to_config", _data(own).get("fqn_to_config")), "module_fqn_to_config")
    require_few(len(found), "module_fqn_to_config")
    made = {name: (None, None) if one is None else _made(an_object(one, name)) for name, one in found.items()}
    named = tuple(Named(patterns=(name,), rule=rule) for name, (rule, _) in made.items() if name != DEFAULT)
    computes = {compute for rule, compute in made.values() if rule is not None}
    return Packing(
        method="torchao",
        rule=made.get(DEFAULT, (None, None))[0],
        named=named,
        compute=computes.pop() if len(computes) == 1 else None,
    )


def _tables(said: Mapping[str, Any]) -> bool:
    return said.get("include_input_output_embeddings") is True


def _data(said: Mapping[str, Any]) -> Mapping[str, Any]:
    return an_object(said.get("_data", {}), "quant_type._data")


def _made(said: Mapping[str, Any]) -> Made:
    if said.get("_type") in BY_NAME:
        raise InputError("nested too deeply", field=f"{FIELD}.quant_type", value=said["_type"])
    return of_name(said.get("_type"), KINDS, "quant_type")(_data(said))

"""AMD's Quark: one scheme for all linear maps, others by patterns of names."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from asbuilt.errors import InputError
from asbuilt.packing import FIELD
from asbuilt.plan.stored.rules import (
    FLOAT,
    LARGEST_GROUP,
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

BITS = {
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "int8": 8,
    "uint8": 8,
    "int4": 4,
    "uint4": 4,
    "fp4": 4,
    "fp6_e2m3": 6,
    "fp6_e3m2": 6,
    "int3": 3,
    "int2": 2,
}


def quark(said: Mapping[str, Any]) -> Packing:
    """`global_quant_config` for all that is not named in `layer_quant_config`, nor excluded."""
    layers = an_object(said.get("layer_quant_config") or {}, "layer_quant_config", "an object of patterns")
    require_few(len(layers), "layer_quant_config")
    rule, compute = _scheme(an_object(said.get("global_quant_config") or {}, "global_quant_config"))
    if said.get("layer_type_quant_config"):
        raise InputError(
            "plans do not support classes with packings of their own",
            field=f"{FIELD}.layer_type_quant_config",
            value=said["layer_type_quant_config"],
            fix="name a format, such as --dtype fp8",
        )
    named = tuple(
        Named(patterns=(name,), rule=_scheme(an_object(own, "layer_quant_config"))[0]) for name, own in layers.items()
    )
    kv = "fp8" if "fp8" in str(said.get("kv_cache_quant_config") or "") else None
    note = f"the cache in {kv}, as published, unless --kv-dtype says otherwise" if kv else ""
    return Packing(method="quark", rule=rule, named=named, compute=compute, kv=kv, note=note)


def _scheme(said: Mapping[str, Any]) -> tuple[Rule | None, str | None]:
    """Returns the rule of the weights, None if plain, and the precision of products."""
    own = said.get("weight")
    if own is None:
        return None, None
    weight = an_object(own, "weight")
    bits = of_name(weight.get("dtype"), BITS, "weight.dtype")
    eight = {"fp8_e4m3": "fp8", "fp4": "fp4", "int8": "int8"} if said.get("input_tensors") else {}
    return _rule(weight, bits), eight.get(str(weight.get("dtype")))


def _rule(weight: Mapping[str, Any], bits: int) -> Rule:
    zeros = Fraction(bits, 8) if weight.get("symmetric") is False else 0
    scheme = weight.get("qscheme") or "per_tensor"
    schemes = {"per_tensor": grouped(bits, scale=0, whole=FLOAT), "per_channel": grouped(bits, scale=FLOAT)}
    if scheme != "per_group":
        return of_name(scheme, {**schemes, "per_group": None}, "weight.qscheme")
    power = weight.get("scale_format") == "e8m0"
    return grouped(bits, whole(weight, "group_size", None, 1, LARGEST_GROUP), zeros=zeros, scale=1 if power else SCALE)

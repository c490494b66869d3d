"""The ways of packing that a quantization_config names by `quant_method`, each read into a `Packing`.

Keys that would change the bytes are read or refused by name; those that say how activations are quantised are not
looked at, except where they tell what products run at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from asbuilt.errors import InputError, near, one_of
from asbuilt.families.shared.reader import is_number
from asbuilt.packing import FIELD, packs_weights
from asbuilt.plan.stored.cache import published_cache
from asbuilt.plan.stored.compressed import compressed
from asbuilt.plan.stored.mlx import metal, mlx
from asbuilt.plan.stored.modelopt import by_layer, modelopt
from asbuilt.plan.stored.quark import quark
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
    by_block,
    grouped,
    of_name,
    require_few,
    whole,
)
from asbuilt.plan.stored.torchao import torchao
from asbuilt.plan.stored.words import auto_round, awq, gptq

# Keys that, if not empty, store weights sparsely.
SPARSE = "sparsity_config"


def read_packing(said: Mapping[str, Any]) -> Packing:
    """Returns how a quantization_config packs weights; raises InputError naming what is not supported."""
    method = _method(said)
    if method not in METHODS:
        raise InputError(
            "plans do not support this quantisation",
            field=f"{FIELD}.quant_method",
            value=said.get("quant_method"),
            allowed=one_of(METHODS),
            fix=near(str(method)[:80], METHODS) or "name a format, such as --dtype fp8",
        )
    if said.get(SPARSE) and not _dense(said[SPARSE]):
        raise InputError(
            "plans do not support sparse weights",
            field=f"{FIELD}.{SPARSE}",
            value=said[SPARSE],
            fix="name a format, such as --dtype int4:128",
        )
    if not packs_weights(said):
        kv, note = published_cache(said)
        return Packing(method=f"{method}, of the cache alone", kv=kv, note=note)
    return METHODS[method](said)


def _dense(value: object) -> bool:
    """Returns whether this is compressed-tensors' marker for no sparsity."""
    return isinstance(value, dict) and value.get("format") == "dense"


def _method(said: Mapping[str, Any]) -> str | None:
    """Returns the method, as named or inferred from the other keys."""
    method = said.get("quant_method")
    if method is not None:
        return method.lower() if isinstance(method, str) else None
    if said.get("quant_algo") is not None or "quantized_layers" in said:
        return "modelopt"
    if "load_in_4bit" in said or "load_in_8bit" in said:
        return "bitsandbytes"
    if "config_groups" in said:
        return "compressed-tensors"
    return "mlx" if {"group_size", "bits"} <= said.keys() else None


def _fp8(said: Mapping[str, Any]) -> Packing:
    """One float32 scale per block, or per matrix if no block size is given.

    DeepSeek-V4's experts are MXFP4 (`expert_dtype`), beside scales that are powers of two of 8 bits. NVIDIA has
    packed those again, by `quantized_layers`: what it exempts is exempt from that, and stays in fp8.
    """
    four = said.get("expert_dtype") is not None
    if four and said["expert_dtype"] not in ("fp4", "fp8"):
        raise InputError(field=f"{FIELD}.expert_dtype", value=said["expert_dtype"], allowed="fp4 or fp8")
    packing = Packing(
        method="fp8",
        compute="fp8",
        rule=by_block(said.get("weight_block_size"), scale=1 if four else FLOAT),
        experts=MXFP4 if said.get("expert_dtype") == "fp4" else None,
    )
    mixed = str(said.get("quant_algo")) == "MIXED_PRECISION" and said.get("quantized_layers")
    if mixed:
        names, named, _ = by_layer(said)
        return replace(packing, method=f"fp8 + {' + '.join(names)}", named=named, whole=True, compute=None)
    if said.get("quant_algo") is not None or "quantized_layers" in said:
        raise InputError(
            "two packings at once",
            field=f"{FIELD}.quant_algo",
            value=said.get("quant_algo"),
            allowed="quant_method fp8 alone, or modelopt",
        )
    return packing


def _fbgemm(said: Mapping[str, Any]) -> Packing:
    return Packing(method="fbgemm_fp8", compute="fp8", rule=grouped(8, scale=FLOAT))


def _mxfp4(said: Mapping[str, Any]) -> Packing:
    return Packing(method="mxfp4", rule=MXFP4)


def _bitsandbytes(said: Mapping[str, Any]) -> Packing:
    """4 bits with a float32 per 64 numbers, itself in 8 bits if doubly quantised; or 8 bits with scales per row."""
    if said.get("load_in_4bit") is True:
        double = said.get("bnb_4bit_use_double_quant") is True
        scale = Fraction(1, 64) + Fraction(FLOAT, 64 * 256) if double else Fraction(FLOAT, 64)
        return Packing(method="bitsandbytes", rule=lambda weight: weight.size * (Fraction(1, 2) + scale))
    return Packing(method="bitsandbytes", compute="int8", rule=grouped(8, scale=FLOAT))


def _hqq(said: Mapping[str, Any]) -> Packing:
    """A scale and a zero point of 16 bits per group; three bits are packed ten to an int32 (Badri and Shaji 2023)."""

    def rule(own: object) -> Rule:
        own = an_object(own, "quant_config")
        sizes = an_object(own.get("weight_quant_params", own), "weight_quant_params")
        for key in ("scale_quant_params", "zero_quant_params"):
            if own.get(key):
                raise InputError("scales that are packed too are not supported", field=f"{FIELD}.{key}", value=own[key])
        bits = of_name(str(sizes.get("nbits")), HQQ_BITS, "nbits")
        group = -1 if sizes.get("group_size") is None else whole(sizes, "group_size", None, 8, LARGEST_GROUP)
        return grouped(bits, group, zeros=SCALE)

    found = an_object(said.get("quant_config"), "quant_config")
    if "weight_quant_params" in found or "nbits" in found:
        return Packing(method="hqq", rule=rule(found))
    require_few(len(found), "quant_config")  # by the ends of names
    named = tuple(Named(patterns=(name,), rule=rule(own), required=True) for name, own in found.items())
    return Packing(method="hqq", named=named)


HQQ_BITS = {"8": 8, "4": 4, "3": Fraction(32, 10), "2": 2, "1": 1}


def _quanto(said: Mapping[str, Any]) -> Packing:
    """8 bits with a scale per row, or fewer with a scale and a shift per 128 numbers."""
    few: Callable[[int], Rule] = lambda bits: grouped(bits, 128, zeros=SCALE)  # noqa: E731
    kinds = {"float8": grouped(8), "int8": grouped(8), "int4": few(4), "int2": few(2)}
    return Packing(method="quanto", rule=of_name(said.get("weights", "int8"), kinds, "weights"))


def _eetq(said: Mapping[str, Any]) -> Packing:
    return Packing(method="eetq", rule=of_name(said.get("weights", "int8"), {"int8": grouped(8)}, "weights"))


def _bitnet(said: Mapping[str, Any]) -> Packing:
    """-1, 0 and 1 in two bits, with a scale per matrix (Ma et al. 2024, arXiv 2402.17764); `online`: not packed yet."""
    packed = grouped(2, scale=0, whole=SCALE)
    modes = {"offline": packed, "online": None}
    return Packing(method="bitnet", rule=of_name(said.get("quantization_mode", "offline"), modes, "quantization_mode"))


def _exllama(said: Mapping[str, Any]) -> Packing:
    """So many bits a number on average, scales included, of the head its own (ExLlamaV2 and V3)."""
    bits, head = (_average(said, key) for key in ("bits", "head_bits"))
    named = (Named(patterns=("lm_head",), rule=grouped(head, scale=0)),)
    return Packing(method=str(said["quant_method"]).lower(), rule=grouped(bits, scale=0), named=named, vision=False)


def _average(said: Mapping[str, Any], key: str) -> Fraction:
    value = said.get(key, 0)
    if not is_number(value) or not 1 <= value <= 16:
        raise InputError(field=f"{FIELD}.{key}", value=value, allowed="1 to 16")
    return Fraction(value)


def _mxfp8(said: Mapping[str, Any]) -> Packing:
    return Packing(method="mxfp8", rule=MXFP8, compute="fp8")


METHODS: dict[str, Callable[[Mapping[str, Any]], Packing]] = {
    "gptq": gptq,
    "awq": awq,
    "auto-round": auto_round,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": compressed,
    "modelopt": modelopt,
    "mlx": mlx,
    "metal": metal,
    "torchao": torchao,
    "hqq": _hqq,
    "quark": quark,
    "quanto": _quanto,
    "eetq": _eetq,
    "bitnet": _bitnet,
    "exl2": _exllama,
    "exl3": _exllama,
}

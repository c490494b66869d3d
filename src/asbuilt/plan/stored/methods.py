"""The ways of packing that a quantization_config names by `quant_method`, each read into a `Packing`.

Keys that would change the bytes are read or refused by name; those that say how activations are quantised are not
looked at, except where they tell what products run at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from asbuilt.errors import InputError, near, one_of
from asbuilt.families.shared.patterns import REGEX
from asbuilt.packing import FIELD, listed
from asbuilt.plan.stored.compressed import compressed
from asbuilt.plan.stored.modelopt import by_layer, modelopt
from asbuilt.plan.stored.quark import quark
from asbuilt.plan.stored.rules import (
    FLOAT,
    INDEX,
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
    of_a_row,
    of_name,
    require_few,
    whole,
)
from asbuilt.plan.stored.torchao import torchao

# Keys that, if not empty, store weights sparsely.
SPARSE = "sparsity_config"
PLAIN_BITS = (16, 32)  # modules of so many bits are not packed


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


def _gptq(said: Mapping[str, Any]) -> Packing:
    """Scales and zero points per group of a row, and the group index of each column.

    `dynamic` has other bits for modules, by regular expressions of which the first that matches counts; those that
    begin with `-:` are not packed.
    """

    def rule(own: Mapping[str, Any]) -> Rule:
        bits = whole(own, "bits", 4, 2, 8)
        inside = grouped(bits, of_a_row(own), zeros=Fraction(bits, 8))
        return lambda weight: _sum(inside(weight), INDEX * weight.size // math.prod(weight.shape[-2:-1]))

    dynamic = an_object(said.get("dynamic") or {}, "dynamic", "an object of patterns")
    require_few(len(dynamic), "dynamic")
    named = [_dynamic(pattern, own, said, rule) for pattern, own in dynamic.items()]
    inside = said.get("modules_in_block_to_quantize")
    usual = rule(said)
    if inside:
        names = [one for group in listed(inside, f"{FIELD}.modules_in_block_to_quantize") for one in _names(group)]
        named.append(Named(patterns=tuple(names), rule=usual, required=True))
    return Packing(
        method="gptq",
        heads=said.get("lm_head") is True,
        vision=False,
        rule=None if inside else usual,
        named=tuple(named),
    )


def _sum(nbytes: Fraction | None, more: int) -> Fraction | None:
    return None if nbytes is None else nbytes + more


def _names(group: object) -> list[Any]:
    return [group] if isinstance(group, str) else listed(group, f"{FIELD}.modules_in_block_to_quantize")


def _dynamic(pattern: str, own: object, said: Mapping[str, Any], rule: Callable[[Mapping[str, Any]], Rule]) -> Named:
    expression = REGEX + pattern.removeprefix("+:").removeprefix("-:")
    if pattern.startswith("-:"):
        return Named(patterns=(expression,), rule=None)
    return Named(patterns=(expression,), rule=rule({**said, **an_object(own, "dynamic")}))


def _awq(said: Mapping[str, Any]) -> Packing:
    bits = whole(said, "bits" if "bits" in said else "w_bit", 4, 2, 8)
    zeros = Fraction(bits, 8) if said.get("zero_point", True) is not False else 0
    group = of_a_row({"group_size": said.get("q_group_size", 128), **said})
    return Packing(method="awq", vision=False, rule=grouped(bits, group, zeros=zeros))


def _auto_round(said: Mapping[str, Any]) -> Packing:
    """Integers as GPTQ's, or microscaling formats; `extra_config` has other bits for modules, by name or expression."""

    def rule(own: Mapping[str, Any]) -> Rule | None:
        kind = str(own.get("data_type") or "int").lower()
        if own.get("bits") in PLAIN_BITS:
            return None
        bits = whole(own, "bits", 4, 2, 8)
        if kind.startswith("mx"):
            return MXFP4 if bits == 4 else grouped(bits, 32, scale=1)
        if kind.startswith("nv"):
            return grouped(bits, 16, scale=1, whole=FLOAT)
        if kind != "int":
            raise InputError("not supported", field=f"{FIELD}.data_type", value=kind, allowed="int, mx_fp or nv_fp")
        return grouped(bits, of_a_row(own), zeros=Fraction(bits, 8))

    extra = an_object(said.get("extra_config") or {}, "extra_config", "an object of modules")
    named = _by_rules(
        [
            (name if re.fullmatch(r"[\w.*]+", name) else f"{REGEX}.*{name}", rule({**said, **an_object(own, name)}))
            for name, own in extra.items()
        ]
    )
    return Packing(method="auto-round", vision=False, rule=rule(said), named=named)


def _by_rules(said: list[tuple[str, Rule | None]]) -> tuple[Named, ...]:
    """Returns the modules of each rule; many modules share few rules, and are matched together."""
    plain = tuple(name for name, rule in said if rule is None)
    return (
        *((Named(patterns=plain, rule=None),) if plain else ()),
        *(Named(patterns=(name,), rule=rule) for name, rule in said if rule is not None),
    )


def _mlx(said: Mapping[str, Any]) -> Packing:
    """Every matrix and table of which rows are whole groups; modules by name have a packing of their own, or none.

    mlx's `affine` has a scale and a bias of 16 bits per group, the others an 8-bit scale alone.
    """
    named: dict[tuple[Any, ...], list[str]] = {}
    plain: list[str] = []
    for name, own in said.items():
        if own is False:
            plain.append(_unstacked(name))
        elif isinstance(own, dict) and name not in ("quantization", FIELD):
            key = tuple(own.get(part, said.get(part)) for part in ("bits", "group_size", "mode"))
            named.setdefault(tuple(map(repr, key)), []).append(_unstacked(name))
    require_few(len(named), "bits")
    rules = [Named(patterns=tuple(plain), rule=None)] if plain else []
    for names in named.values():
        own = next(said[name] for name in said if isinstance(said[name], dict) and _unstacked(name) == names[0])
        rules.append(Named(patterns=tuple(names), rule=_affine({**_scalars(said), **own})))
    return Packing(method="mlx", rule=_affine(said), named=tuple(rules), heads=True, tables=True)


def _scalars(said: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in said.items() if not isinstance(value, dict)}


def _unstacked(name: str) -> str:
    """mlx holds the experts of a layer in one stack; files of others have a module for each."""
    return name.replace("switch_mlp", "experts.*")


def _affine(said: Mapping[str, Any]) -> Rule:
    modes = {"affine": None, "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
    mode = of_name(said.get("mode") or "affine", modes, "mode")
    if mode is None:
        group = whole(said, "group_size", None, 8, LARGEST_GROUP)
        inside = grouped(whole(said, "bits", None, 2, 8), group, zeros=SCALE)
    else:
        group = mode[1]
        inside = grouped(*mode, scale=1)
    return lambda weight: None if weight.shape[-1] % group else inside(weight)


def _metal(said: Mapping[str, Any]) -> Packing:
    return Packing(method="metal", rule=_affine({"bits": 4, "group_size": 64, **said}))


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


def _mxfp8(said: Mapping[str, Any]) -> Packing:
    return Packing(method="mxfp8", rule=MXFP8, compute="fp8")


METHODS: dict[str, Callable[[Mapping[str, Any]], Packing]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": compressed,
    "modelopt": modelopt,
    "mlx": _mlx,
    "metal": _metal,
    "torchao": torchao,
    "hqq": _hqq,
    "quark": quark,
    "quanto": _quanto,
    "eetq": _eetq,
    "bitnet": _bitnet,
}

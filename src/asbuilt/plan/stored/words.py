"""Integers of a few bits in groups of a row: GPTQ, AWQ and auto-round."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.patterns import REGEX
from asbuilt.packing import FIELD, listed
from asbuilt.plan.stored.rules import (
    FLOAT,
    INDEX,
    MXFP4,
    Named,
    Packing,
    Rule,
    an_object,
    grouped,
    of_a_row,
    require_few,
    whole,
)

PLAIN_BITS = (16, 32)  # modules of so many bits are not packed


def gptq(said: Mapping[str, Any]) -> Packing:
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


def awq(said: Mapping[str, Any]) -> Packing:
    """Scales and zero points per group of a row; older configs call the keys `w_bit` and `q_group_size`."""
    bits = whole(said, "bits" if "bits" in said else "w_bit", 4, 2, 8)
    zeros = Fraction(bits, 8) if said.get("zero_point", True) is not False else 0
    group = of_a_row({"group_size": said.get("q_group_size", 128), **said})
    return Packing(method="awq", vision=False, rule=grouped(bits, group, zeros=zeros))


def auto_round(said: Mapping[str, Any]) -> Packing:
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

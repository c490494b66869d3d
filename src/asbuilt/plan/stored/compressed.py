"""compressed-tensors: groups of modules, by class, name or regular expression, each with a scheme of its own."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from asbuilt.errors import InputError
from asbuilt.packing import FIELD, listed
from asbuilt.plan.stored.cache import published_cache
from asbuilt.plan.stored.rules import (
    FLOAT,
    LARGEST_GROUP,
    SCALE,
    Named,
    Packing,
    Rule,
    an_object,
    by_block,
    grouped,
    require_few,
    whole,
)

ALLOWED = "tensor, channel, block, group or tensor_group"


def compressed(said: Mapping[str, Any]) -> Packing:
    """A rule per group of modules, either named or all linear maps."""
    groups = an_object(said.get("config_groups") or None, "config_groups", "an object of groups")
    require_few(len(groups), "config_groups")
    usual, named, computes = None, list[Named](), set[str | None]()
    for group in groups.values():
        own = an_object(group, "config_groups", "an object of groups")
        rule, compute = _strategy({"format": said.get("format"), **own})
        computes.add(compute)
        targets = listed(own.get("targets", ["Linear"]), f"{FIELD}.targets")
        if "Linear" in targets:
            if usual is not None:
                raise InputError("two rules for all linear maps", field=f"{FIELD}.config_groups", value=len(groups))
            usual = rule
        elif targets:
            named.append(Named(patterns=tuple(targets), rule=rule, required=True))
    kv, note = published_cache(said)
    return Packing(
        method="compressed-tensors",
        rule=usual,
        named=tuple(named),
        heads=usual is not None,
        compute=computes.pop() if len(computes) == 1 else None,
        kv=kv,
        note=note,
    )


def _strategy(group: Mapping[str, Any]) -> tuple[Rule, str | None]:
    """Returns the rule of one group's weights, and the precision of its products."""
    said = an_object(group.get("weights"), "weights")
    bits, strategy = whole(said, "num_bits", 8, 2, 8), said.get("strategy") or "tensor"
    zeros = Fraction(bits, 8) if said.get("symmetric") is False else 0
    compute = None
    if group.get("input_activations") is not None:
        compute = {("float", 8): "fp8", ("int", 8): "int8", ("float", 4): "fp4"}.get((str(said.get("type")), bits))
    if strategy == "tensor":
        return grouped(bits, scale=0, whole=SCALE), compute
    if strategy == "channel":
        return grouped(bits, zeros=zeros), compute
    if strategy == "block":
        return by_block(said.get("block_structure")), compute
    if strategy not in ("group", "tensor_group"):
        raise InputError("not supported", field=f"{FIELD}.strategy", value=strategy, allowed=ALLOWED)
    size = whole(said, "group_size", None, 1, LARGEST_GROUP)
    if strategy == "tensor_group":  # NVFP4: 8-bit scales, and a float32 each for the matrix and its activations
        return grouped(bits, size, scale=1, whole=2 * FLOAT if compute else FLOAT), compute
    power = said.get("scale_dtype") == "torch.uint8" or str(group.get("format")).startswith("mxfp")
    scale = 1 if power else SCALE  # a power of two
    return grouped(bits, size, zeros=zeros, scale=scale), compute

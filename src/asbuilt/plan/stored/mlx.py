"""mlx's formats: in groups of a row, of every matrix and table, or as single layers state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asbuilt.packing import FIELD
from asbuilt.plan.stored.rules import LARGEST_GROUP, SCALE, Named, Packing, Rule, grouped, of_name, require_few, whole


def mlx(said: Mapping[str, Any]) -> Packing:
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


def metal(said: Mapping[str, Any]) -> Packing:
    """The same of linear maps alone, as transformers packs them for Apple's GPUs."""
    return Packing(method="metal", rule=_affine({"bits": 4, "group_size": 64, **said}))

"""The bytes of a packed weight: numbers of a few bits, with scales per group, row, tile or matrix.

A config is untrusted: whatever is not a size within bounds is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from asbuilt.errors import InputError, near, one_of
from asbuilt.families.shared.reader import is_whole
from asbuilt.packing import FIELD
from asbuilt.spec.part import Weight

# From a weight to its bytes; None where its shape is not packed.
Rule = Callable[[Weight], Fraction | None]
SCALE, FLOAT, INDEX = 2, 4, 4  # bytes of a 16-bit scale, a float32 scale, and an int32
LARGEST_GROUP = 2**16
MOST_RULES = 64  # each is matched against all modules


@dataclass(frozen=True, kw_only=True)
class Named:
    """The modules that `patterns` name are packed by `rule`, None if plain; `required`: they must be in the model."""

    patterns: tuple[Any, ...]
    rule: Rule | None
    required: bool = False


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How modules are packed: by `named` patterns, the rest of attention and feed-forward by `rule`, None if plain.

    `heads`, `tables` and `vision` tell whether heads, embeddings and what sees or hears are packed by `rule` too;
    `experts` packs routed experts instead. `whole` tells that exempt modules are exempt only from what is named.
    `compute` is the precision of products, None for that of activations; `kv` is the dtype that the cache is published
    for; `note` is added to the plan's.
    """

    method: str
    rule: Rule | None = None
    experts: Rule | None = None
    named: tuple[Named, ...] = ()
    heads: bool = False
    tables: bool = False
    vision: bool = True
    whole: bool = False
    compute: str | None = None
    kv: str | None = None
    note: str = ""


def grouped(
    bits: int | Fraction, group: int = -1, *, zeros: Fraction | int = 0, scale: int = SCALE, whole: int = 0
) -> Rule:
    """Returns a rule: `bits` a number, a scale and `zeros` bytes a `group` of a row (-1: all), `whole` a matrix."""

    def nbytes(weight: Weight) -> Fraction:
        inside = weight.shape[-1]
        groups = weight.size // inside * math.ceil(inside / (inside if group == -1 else group))
        return weight.size * Fraction(bits) / 8 + groups * (scale + zeros) + whole * math.prod(weight.shape[:-2])

    return nbytes


def tiled(rows: int, columns: int, scale: int = FLOAT) -> Rule:
    """Returns a rule: eight bits per number, and a scale per tile, including those at the edges."""

    def nbytes(weight: Weight) -> Fraction:
        *stack, out, inside = weight.shape
        scales = math.prod(stack) * math.ceil(out / rows) * math.ceil(inside / columns)
        return Fraction(weight.size + scale * scales)

    return nbytes


def by_block(block: object, key: str = "weight_block_size", scale: int = FLOAT) -> Rule:
    """Returns the rule of 8-bit floats with a scale per block, or per matrix without blocks."""
    if block is None:
        return grouped(8, scale=0, whole=FLOAT)
    if not isinstance(block, list) or len(block) != 2 or not all(is_whole(n) and 0 < n <= LARGEST_GROUP for n in block):
        raise InputError(field=f"{FIELD}.{key}", value=block, allowed="two whole numbers")
    return tiled(block[0], block[1], scale)


# Microscaling formats have an 8-bit scale per 32 numbers (OCP MX v1.0); NVFP4 has an 8-bit scale per 16 numbers and a
# float32 per matrix. With fp8 and NVFP4 activations a matrix has a float32 for those too.
MXFP4, MXFP8 = grouped(4, 32, scale=1), grouped(8, 32, scale=1)


def whole(said: Mapping[str, Any], key: str, default: int | None, least: int, most: int) -> int:
    """Returns a whole number within bounds; raises InputError naming the key for anything else."""
    value = said.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not (least <= value <= most):
        raise InputError(field=f"{FIELD}.{key}", value=value, allowed=f"{least} to {most}")
    return value


def of_a_row(said: Mapping[str, Any]) -> int:
    """Returns how many numbers of a row share a scale; -1 for all of them."""
    return -1 if said.get("group_size") == -1 else whole(said, "group_size", 128, 1, LARGEST_GROUP)


def require_few(rules: int, key: str) -> None:
    """Raises InputError for more rules than can be matched."""
    if rules > MOST_RULES:
        raise InputError("too many packings", field=f"{FIELD}.{key}", value=rules, allowed=f"at most {MOST_RULES}")


def an_object(value: object, key: str, allowed: str = "an object") -> Mapping[str, Any]:
    """Returns a JSON object; raises InputError naming the key for anything else."""
    if not isinstance(value, dict):
        raise InputError(field=f"{FIELD}.{key}", value=value, allowed=allowed)
    return value


def of_name(name: object, choices: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401
    """Returns the choice of this name; raises InputError naming the key and the choices."""
    if not isinstance(name, str) or name not in choices:
        raise InputError(
            "plans do not support this quantisation",
            field=f"{FIELD}.{key}",
            value=name,
            allowed=one_of(choices),
            fix=near(str(name)[:80], choices),
        )
    return choices[name]

"""Weights as a config's quantization_config says they are stored: bits, scales, zero points, and what is left plain.

A config is a stranger's: its patterns are matched piece by piece, never run as regular expressions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from asbuilt.cost.dtypes import dtype as find_dtype
from asbuilt.errors import InputError, near
from asbuilt.families import tensor_table
from asbuilt.plan.devices import known
from asbuilt.plan.precision import QUANTISED_KINDS, Precision
from asbuilt.spec import Model, weights
from asbuilt.spec.part import Part, Weight

Rule = Callable[[Weight], Fraction]
FIELD = "quantization_config"
EXEMPT = ("modules_to_not_convert", "ignore", "llm_int8_skip_modules")
SCALE, FLOAT, INDEX = 2, 4, 4  # bytes of a 16-bit scale, of a float32 one, of an int32
LONGEST_PATTERN, MOST_STARS, MOST_PATTERNS = 200, 4, 20_000
PLAIN_PATTERN = re.compile(r"[\w.*-]*")


def quantised(spec: Model, said: Mapping[str, Any] | None, dtype: str | None, family: str) -> Precision:
    """Returns the precision of weights that are stored as `said`, the rest in `dtype`.

    Embeddings, heads, routers, norms and biases stay plain, and so do the modules that `said` exempts. Raises
    InputError for a way of packing that is not known, naming it.
    """
    if said is None:
        raise InputError("the model's description says nothing of packed weights", field="dtype", value="quantised",
                         fix="name a format, such as --dtype int4:128")  # fmt: skip
    method = said.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in said or "load_in_8bit" in said else None)
    if method not in RULES:
        raise InputError("weights packed so cannot be planned", field=f"{FIELD}.quant_method", value=method,
                         allowed=", ".join(RULES), fix=near(str(method)[:80], RULES))  # fmt: skip
    rule, compute = RULES[method](said)
    plain = find_dtype(dtype or "bf16")
    exempt = _exempt(spec, said, family)
    order, sums, counts = known(spec).census.order, dict[str, Fraction](), dict[str, int]()
    for path, weight, owner in weights(spec):
        packed = len(weight.shape) > 1 and owner.kind in QUANTISED_KINDS and path not in exempt
        nbytes = rule(weight) if packed and weight.role in ("matrix", "stream_matrix") else plain.nbytes(weight)
        key = _in_census(path, order)
        sums[key], counts[key] = sums.get(key, Fraction(0)) + nbytes, counts.get(key, 0) + 1

    def held(path: str, weight: Weight, owner: Part) -> Fraction:
        """The mean over the layers that a part stands for, should some of them be exempt and others not."""
        return sums[path] / counts[path]

    activation = plain.name if plain.name in ("fp32", "bf16", "fp16") else "bf16"
    note = f"as {FIELD} says: {method}; embeddings, head, routers, norms, biases and exempt modules in {plain.name}"
    return Precision(name=f"quantised ({method})", activation=activation, compute=compute or activation, held=held,
                     note=note)  # fmt: skip


def _in_census(path: str, order: Mapping[str, tuple[int, ...]]) -> str:
    field, _, rest = path.partition(".")
    if field not in order:
        return path
    number, _, rest = rest.partition(".")
    return f"{field}.{order[field][int(number)]}.{rest}"


def _whole(said: Mapping[str, Any], key: str, default: int | None, least: int, most: int) -> int:
    value = said.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not (least <= value <= most):
        raise InputError("not allowed", field=f"{FIELD}.{key}", value=value, allowed=f"{least} to {most}")
    return value


def _grouped(bits: int, group: int, *, zeros: bool, scale: int = SCALE) -> Rule:
    """Numbers of `bits`, and for each `group` of a row (all of it where -1) a scale and perhaps a zero point."""

    def nbytes(weight: Weight) -> Fraction:
        inside = weight.shape[-1]
        groups = weight.size // inside * math.ceil(inside / (inside if group == -1 else group))
        return Fraction(weight.size * bits, 8) + groups * (scale + (Fraction(bits, 8) if zeros else 0))

    return nbytes


def _gptq(said: Mapping[str, Any]) -> tuple[Rule, str | None]:
    grouped = _grouped(_whole(said, "bits", 4, 2, 8), _whole(said, "group_size", 128, -1, 2**16), zeros=True)
    # beside scales and zero points, to which group each column belongs
    return lambda weight: grouped(weight) + INDEX * weight.size // math.prod(weight.shape[-2:-1]), None


def _awq(said: Mapping[str, Any]) -> tuple[Rule, str | None]:
    zeros = said.get("zero_point", True) is not False
    bits = _whole(said, "bits" if "bits" in said else "w_bit", 4, 2, 8)
    return _grouped(bits, _whole(said, "group_size", 128, -1, 2**16), zeros=zeros), None


def _fp8(said: Mapping[str, Any]) -> tuple[Rule, str | None]:
    """One float32 scale for each block, or for the whole matrix where no block is said."""
    block = said.get("weight_block_size")
    if block is None:
        return lambda weight: Fraction(weight.size + FLOAT * math.prod(weight.shape[:-2])), "fp8"
    sizes = isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n <= 2**16 for n in block)
    if not sizes:
        raise InputError("not allowed", field=f"{FIELD}.weight_block_size", value=block, allowed="two whole numbers")

    def nbytes(weight: Weight) -> Fraction:
        *stacked, out, inside = weight.shape
        scales = math.prod(stacked) * math.ceil(out / block[0]) * math.ceil(inside / block[1])
        return Fraction(weight.size + FLOAT * scales)

    return nbytes, "fp8"


def _mxfp4(said: Mapping[str, Any]) -> tuple[Rule, str | None]:
    """Blocks of 32 numbers of 4 bits with one scale of 8 (OCP microscaling formats, v1.0)."""
    return lambda weight: weight.size * Fraction(17, 32), None


def _bitsandbytes(said: Mapping[str, Any]) -> tuple[Rule, str | None]:
    """4 bits with a float32 for each 64 numbers, that one itself in 8 bits where doubly quantised; 8 bits by row."""
    if said.get("load_in_4bit") is True:
        double = said.get("bnb_4bit_use_double_quant") is True
        scale = Fraction(1, 64) + Fraction(FLOAT, 64 * 256) if double else Fraction(FLOAT, 64)
        return lambda weight: weight.size * (Fraction(1, 2) + scale), None
    return lambda weight: Fraction(weight.size + FLOAT * (weight.size // weight.shape[-1])), "int8"


def _compressed(said: Mapping[str, Any]) -> tuple[Rule, str | None]:
    """compressed-tensors: one rule for all linear maps; more rules than one are refused."""
    groups = said.get("config_groups")
    groups = groups if isinstance(groups, dict) else {}
    rules = [g.get("weights") for g in groups.values() if isinstance(g, dict)]
    rules = [rule for rule in rules if isinstance(rule, dict)]
    if not rules or any(rule != rules[0] for rule in rules):
        raise InputError("one rule for all weights is planned", field=f"{FIELD}.config_groups", value=len(rules))
    rule = rules[0]
    bits, strategy = _whole(rule, "num_bits", 8, 2, 8), rule.get("strategy") or "tensor"
    zeros = rule.get("symmetric") is False
    sizes = {"tensor": None, "channel": -1, "group": rule.get("group_size")}
    if strategy not in sizes:
        raise InputError("not planned", field=f"{FIELD}.strategy", value=strategy, allowed=", ".join(sizes))
    activated = any(isinstance(g, dict) and g.get("input_activations") for g in groups.values())
    compute = {"float": "fp8", "int": "int8"}.get(str(rule.get("type"))) if activated and bits == 8 else None
    if strategy == "tensor":
        return lambda weight: Fraction(weight.size * bits, 8) + SCALE * math.prod(weight.shape[:-2]), compute
    group = -1 if strategy == "channel" else _whole(rule, "group_size", None, 1, 2**16)
    return _grouped(bits, group, zeros=zeros), compute


def _fbgemm(said: Mapping[str, Any]) -> tuple[Rule, str | None]:
    return _grouped(8, -1, zeros=False, scale=FLOAT), "fp8"


RULES: dict[str, Callable[[Mapping[str, Any]], tuple[Rule, str | None]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
}


def _exempt(spec: Model, said: Mapping[str, Any], family: str) -> set[str]:
    """Returns the paths of weights whose modules, as the checkpoint names them, are exempt by a pattern."""
    patterns = list(_patterns(said))
    if not patterns:
        return set()
    names: dict[str, set[str]] = {}
    for entry in tensor_table(family, spec).entries:
        for name in entry.names:
            names.setdefault(name.removesuffix(".weight"), set()).update(entry.paths)
    exact = {pattern for pattern in patterns if "*" not in pattern}
    others = [pattern.split("*") for pattern in patterns if "*" in pattern]
    return {
        path
        for name, paths in names.items()
        if _within(name, exact) or any(_matches(name, pieces) for pieces in others)
        for path in paths
    }


def _patterns(said: Mapping[str, Any]) -> Iterator[str]:
    for key in EXEMPT:
        found = said.get(key) or []
        if not isinstance(found, list) or len(found) > MOST_PATTERNS:
            raise InputError("not a list of names", field=f"{FIELD}.{key}", value=found)
        for pattern in found:
            yield _pattern(pattern, key)


def _pattern(said: object, key: str) -> str:
    """Returns a name in which * stands for anything; of regular expressions only `.*`, `\\.`, `\\d+`, ^ and $."""
    pattern = said if isinstance(said, str) and len(said) <= LONGEST_PATTERN else "("
    if pattern.startswith("re:"):
        pattern = pattern[3:].removeprefix("^").removesuffix("$").replace(r"\d+", ".*").replace(r"\.", "\0")
        pattern = pattern.replace(".*", "*").replace("\0", ".")
    if not PLAIN_PATTERN.fullmatch(pattern) or pattern.count("*") > MOST_STARS:
        raise InputError("not a pattern that is understood", field=f"{FIELD}.{key}", value=said,
                         allowed="a module's name, with * or .* for any")  # fmt: skip
    return pattern


def _within(name: str, exact: set[str]) -> bool:
    """Whether some of the name's pieces, one after the other, are an exempt name."""
    pieces = name.split(".")
    return any(".".join(pieces[i:j]) in exact for i in range(len(pieces)) for j in range(i + 1, len(pieces) + 1))


def _matches(name: str, pieces: list[str]) -> bool:
    """Whether the name starts with the first piece, the others follow in order, and the last ends a name in it."""
    if not name.startswith(pieces[0]):
        return False
    at = len(pieces[0])
    for piece in pieces[1:-1]:
        found = name.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    last = pieces[-1]
    return not last or f"{last}." in name[at:] or name[at:].endswith(last)

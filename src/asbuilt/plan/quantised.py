"""The stored formats of weights: by a config's quantization_config, in a GGUF file, or as a mixture.

A config is untrusted: unknown packings are refused by name, and so are keys that would change the counts.
`asbuilt.packing` determines which modules are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from asbuilt.cost.dtypes import dtype as find_dtype
from asbuilt.cost.folded import Held
from asbuilt.cost.mixtures import find_mixture
from asbuilt.dtypes import GGUF_FLOATS, TRAINED, short_name
from asbuilt.errors import InputError, near, one_of
from asbuilt.families import Reading, gguf_table
from asbuilt.families.shared.patterns import matched
from asbuilt.families.shared.reader import is_whole
from asbuilt.packing import FIELD, QUANTISED_KINDS, holding, left_out, listed, modules
from asbuilt.plan.devices import known
from asbuilt.plan.precision import Precision, precision
from asbuilt.spec import Model, stored_weights, weights
from asbuilt.spec.part import Part, Weight

if TYPE_CHECKING:
    from asbuilt.formats.gguf import GGUFFile

Rule = Callable[[Weight], Fraction]
QUANTISED = "quantised"
SCALE, FLOAT, INDEX = 2, 4, 4  # bytes of a 16-bit scale, a float32 scale, and an int32
# Keys that, if not empty, pack some modules differently from the rest, or weights sparsely.
CHANGING = ("dynamic", "modules_in_block_to_quantize", "sparsity_config", "extra_config")
LARGEST_GROUP = 2**16
MOST_RULES = 64  # each is matched against all modules
NOTHING = "the model has no quantization_config"


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How modules are packed: by `named` patterns, the rest of attention and feed-forward by `rule`, None if plain.

    `heads`, `tables` and `vision` tell whether heads, embeddings and the vision part are packed by `rule` too.
    `compute` is the precision of products, None for that of activations; `note` is added to the plan's.
    """

    method: str
    rule: Rule | None = None
    named: tuple[tuple[tuple[str, ...], Rule], ...] = ()
    heads: bool = False
    tables: bool = False
    vision: bool = True
    compute: str | None = None
    note: str = ""


def quantised(
    spec: Model, said: Mapping[str, Any] | None, dtype: str | None, family: str, *, text: bool = False
) -> Precision:
    """Returns the precision of weights packed according to `said`, the rest in `dtype`; `text` is the text model's.

    Norms, biases and left-out modules are not packed; routers, embeddings and heads only if `said` packs them. Raises
    InputError naming an unknown packing.
    """
    if said is None:
        raise InputError(NOTHING, field="dtype", value=QUANTISED, fix="name a format, such as --dtype int4:128")
    packing = replace(read_packing(said), vision=False) if text else read_packing(said)
    plain = find_dtype(dtype or "bf16")
    names = modules(family, spec)
    rules = _assigned(packing, said, names)

    def nbytes(path: str, weight: Weight, owner: Part) -> Fraction:
        """Returns the mean over the modules of a weight: some experts of a stack may be left out."""
        if len(weight.shape) < 2 or weight.role not in ("matrix", "table"):
            return plain.nbytes(weight)
        usual = packing.rule if _usual(packing, path, owner, weight) else None
        found = [rules.get(name, usual) for name in names[path]]
        parts = (plain.nbytes(weight) if rule is None else rule(weight) for rule in found)
        return sum(parts, Fraction(0)) / len(found)

    activation = plain.name if plain.name in TRAINED else "bf16"
    note = f"by {FIELD}: {packing.method}; the rest and left-out modules in {plain.name}"
    return Precision(
        name=f"{QUANTISED} ({packing.method})",
        activation=activation,
        compute=packing.compute or activation,
        held=_averaged(spec, nbytes),
        note="; ".join(filter(None, (note, packing.note))),
    )


def mixed(spec: Model, name: str, family: str = "") -> Precision:
    """Returns the precision of this name: one of `precision`, or a file type of llama.cpp, a mixture such as q4_k_m."""
    found = find_mixture(name)
    if found is None:
        return precision(name)
    return Precision(
        name=found[0],
        activation="bf16",
        compute="bf16",
        held=_averaged(spec, holding(family, spec, name)),
        note="the mixture of formats that llama.cpp's quantiser writes for this file type",
    )


def published(reading: Reading, file: GGUFFile | None = None) -> Precision | None:
    """Returns the precision in which a model's weights are published, None if they are not quantised.

    It is that of a GGUF file, a config, or a file beside it. Raises InputError as `quantised` does.
    """
    if file is not None:
        return _of_gguf(file, reading.spec, reading.family)
    if reading.quantization is None:
        return None
    return quantised(reading.spec, reading.quantization, reading.dtype, reading.family, text=reading.text_packed)


def _of_gguf(file: GGUFFile, spec: Model, family: str) -> Precision:
    sizes = {path: weight.size for path, weight, _ in stored_weights(spec)}
    held: dict[str, Fraction] = {}
    for entry in gguf_table(family, spec, file.tensors).entries:
        missing = next((name for name in entry.names if name not in file.tensors), None)
        if missing is not None:
            raise InputError("missing tensor", field=f"{file.path}: {missing}")
        stored = sum(file.tensors[name].nbytes for name in entry.names)
        whole = sum(sizes[path] for path in entry.paths)
        held |= {path: Fraction(stored * sizes[path], whole) for path in entry.paths}
    types = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    plain = short_name(GGUF_FLOATS.get(types.pop(), "bf16")) if len(types) == 1 else "bf16"
    return Precision(
        name="as stored",
        activation=plain,
        compute=plain,
        note="the formats in the GGUF file",
        held=_averaged(spec, lambda path, weight, owner: held[path]),
    )


def _averaged(spec: Model, nbytes: Held) -> Held:
    """Returns the mean over the layers that share a part of the census, since their packing may differ."""
    order, sums, counts = known(spec).census.order, dict[str, Fraction](), dict[str, int]()
    for path, weight, owner in weights(spec):
        key = _in_census(path, order)
        sums[key], counts[key] = sums.get(key, Fraction(0)) + nbytes(path, weight, owner), counts.get(key, 0) + 1
    return lambda path, weight, owner: sums[path] / counts[path]


def _in_census(path: str, order: Mapping[str, tuple[int, ...]]) -> str:
    field, _, rest = path.partition(".")
    if field not in order:
        return path
    number, _, rest = rest.partition(".")
    return f"{field}.{order[field][int(number)]}.{rest}"


def _usual(packing: Packing, path: str, owner: Part, weight: Weight) -> bool:
    """Returns whether the general rule applies to this weight."""
    if path.startswith("vision.") and not packing.vision:
        return False
    if weight.role == "table":
        return packing.tables
    return owner.kind in QUANTISED_KINDS or (owner.kind == "head" and packing.heads)


def _assigned(packing: Packing, said: Mapping[str, Any], held: Mapping[str, tuple[str, ...]]) -> dict[str, Rule | None]:
    """Returns the rules of named modules: None for those that are left out."""
    names = [name for found in held.values() for name in found]
    rules: dict[str, Rule | None] = {}
    for patterns, rule in packing.named:
        found = matched(patterns, names, FIELD)
        if not found:
            raise InputError(
                "matches no module of this model",
                field=FIELD,
                value=patterns[0],
                fix="name a format, such as --dtype fp8",
            )
        rules |= dict.fromkeys(found - rules.keys(), rule)
    return rules | dict.fromkeys(left_out(said, names))


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
    for key in CHANGING:
        if said.get(key) and not _dense(said[key]):
            raise InputError(
                "plans do not support modules with different packings given this way",
                field=f"{FIELD}.{key}",
                value=said[key],
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


def _whole(said: Mapping[str, Any], key: str, default: int | None, least: int, most: int) -> int:
    value = said.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not (least <= value <= most):
        raise InputError(field=f"{FIELD}.{key}", value=value, allowed=f"{least} to {most}")
    return value


def _of_a_row(said: Mapping[str, Any]) -> int:
    """Returns how many numbers of a row share a scale; -1 for all of them."""
    return -1 if said.get("group_size") == -1 else _whole(said, "group_size", 128, 1, LARGEST_GROUP)


def _grouped(bits: int, group: int = -1, *, zeros: Fraction | int = 0, scale: int = SCALE, whole: int = 0) -> Rule:
    """Returns a rule: `bits` a number, a scale and `zeros` bytes a `group` of a row (-1: all), `whole` a matrix."""

    def nbytes(weight: Weight) -> Fraction:
        inside = weight.shape[-1]
        groups = weight.size // inside * math.ceil(inside / (inside if group == -1 else group))
        return Fraction(weight.size * bits, 8) + groups * (scale + zeros) + whole * math.prod(weight.shape[:-2])

    return nbytes


def _tiled(rows: int, columns: int) -> Rule:
    """Returns a rule: eight bits per number, and a float32 scale per tile, including those at the edges."""

    def nbytes(weight: Weight) -> Fraction:
        *stacked, out, inside = weight.shape
        scales = math.prod(stacked) * math.ceil(out / rows) * math.ceil(inside / columns)
        return Fraction(weight.size + FLOAT * scales)

    return nbytes


def _gptq(said: Mapping[str, Any]) -> Packing:
    bits = _whole(said, "bits", 4, 2, 8)
    grouped = _grouped(bits, _of_a_row(said), zeros=Fraction(bits, 8))

    def rule(weight: Weight) -> Fraction:
        """Adds the group index of each column to scales and zero points."""
        return grouped(weight) + INDEX * weight.size // math.prod(weight.shape[-2:-1])

    return Packing(method="gptq", heads=said.get("lm_head") is True, vision=False, rule=rule)


def _awq(said: Mapping[str, Any]) -> Packing:
    bits = _whole(said, "bits" if "bits" in said else "w_bit", 4, 2, 8)
    zeros = Fraction(bits, 8) if said.get("zero_point", True) is not False else 0
    return Packing(method="awq", vision=False, rule=_grouped(bits, _of_a_row(said), zeros=zeros))


def _auto_round(said: Mapping[str, Any]) -> Packing:
    bits = _whole(said, "bits", 4, 2, 8)
    return Packing(method="auto-round", vision=False, rule=_grouped(bits, _of_a_row(said), zeros=Fraction(bits, 8)))


def _mlx(said: Mapping[str, Any]) -> Packing:
    """Packs every matrix and table, with a scale and a bias of 16 bits per group."""
    if said.get("mode") not in (None, "affine"):
        raise InputError("not supported", field=f"{FIELD}.mode", value=said["mode"], allowed="affine")
    rule = _grouped(_whole(said, "bits", None, 2, 8), _whole(said, "group_size", None, 8, LARGEST_GROUP), zeros=SCALE)
    if any(isinstance(value, dict) for value in said.values()):
        raise InputError("plans do not support layers with different packings", field=FIELD, value="mlx")
    return Packing(method="mlx", rule=rule, heads=True, tables=True)


def _fp8(said: Mapping[str, Any]) -> Packing:
    """One float32 scale per block, or per matrix if no block size is given."""
    if said.get("quant_algo") is not None or "quantized_layers" in said:
        raise InputError(
            "two packings at once",
            field=f"{FIELD}.quant_algo",
            value=said.get("quant_algo"),
            allowed="quant_method fp8 alone, or modelopt",
        )
    return Packing(method="fp8", compute="fp8", rule=_by_block(said.get("weight_block_size")))


def _by_block(block: object) -> Rule:
    if block is None:
        return _grouped(8, scale=0, whole=FLOAT)
    if not isinstance(block, list) or len(block) != 2 or not all(is_whole(n) and 0 < n <= LARGEST_GROUP for n in block):
        raise InputError(field=f"{FIELD}.weight_block_size", value=block, allowed="two whole numbers")
    return _tiled(*block)


def _fbgemm(said: Mapping[str, Any]) -> Packing:
    return Packing(method="fbgemm_fp8", compute="fp8", rule=_grouped(8, scale=FLOAT))


def _mxfp4(said: Mapping[str, Any]) -> Packing:
    return Packing(method="mxfp4", rule=MXFP4)


def _bitsandbytes(said: Mapping[str, Any]) -> Packing:
    """4 bits with a float32 per 64 numbers, itself in 8 bits if doubly quantised; or 8 bits with scales per row."""
    if said.get("load_in_4bit") is True:
        double = said.get("bnb_4bit_use_double_quant") is True
        scale = Fraction(1, 64) + Fraction(FLOAT, 64 * 256) if double else Fraction(FLOAT, 64)
        return Packing(method="bitsandbytes", rule=lambda weight: weight.size * (Fraction(1, 2) + scale))
    return Packing(method="bitsandbytes", compute="int8", rule=_grouped(8, scale=FLOAT))


# Microscaling formats have an 8-bit scale per 32 numbers (OCP MX v1.0); NVFP4 has an 8-bit scale per 16 numbers and a
# float32 per matrix. With fp8 and NVFP4 activations a matrix has a float32 for those too.
MXFP4 = _grouped(4, 32, scale=1)
ALGORITHMS: dict[str, tuple[Callable[[int], Rule], str | None]] = {
    "FP8": (lambda group: _grouped(8, scale=0, whole=2 * FLOAT), "fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": (lambda group: _grouped(8, scale=FLOAT), "fp8"),
    "FP8_PB_WO": (lambda group: _tiled(128, 128), None),
    "MXFP8": (lambda group: _grouped(8, 32, scale=1), "fp8"),
    "NVFP4": (lambda group: _grouped(4, group or 16, scale=1, whole=2 * FLOAT), "fp4"),
    "W4A16_NVFP4": (lambda group: _grouped(4, group or 16, scale=1, whole=FLOAT), None),
    "MXFP4": (lambda group: MXFP4, None),
    "W4A16_AWQ": (lambda group: _grouped(4, group or 128), None),
    "INT4_AWQ": (lambda group: _grouped(4, group or 128), None),
    "W8A16": (lambda group: _grouped(8), None),
    "W8A8_SQ_PER_CHANNEL": (lambda group: _grouped(8, scale=FLOAT), "int8"),
    "INT8_SQ": (lambda group: _grouped(8, scale=FLOAT), "int8"),
}


def _modelopt(said: Mapping[str, Any]) -> Packing:
    """NVIDIA's modelopt: one algorithm for all modules that are not left out, or one per named layer."""
    cached = said.get("kv_cache_quant_algo")
    note = f"the published cache dtype is {cached}: --kv-dtype" if isinstance(cached, str) else ""
    layers = said.get("quantized_layers")
    if layers is None:
        name, rule, compute = _algorithm(said)
        return Packing(method=f"modelopt {name}", rule=rule, compute=compute, note=note)
    if not isinstance(layers, dict) or not layers:
        raise InputError(field=f"{FIELD}.quantized_layers", value=layers, allowed="an object of layers")
    found: dict[tuple[str, int], list[str]] = {}
    for layer, own in layers.items():
        own = own if isinstance(own, dict) else {}
        found.setdefault((str(own.get("quant_algo")), _group(own)), []).append(layer)
    _require_few(len(found), "quantized_layers")
    rules = [
        (tuple(listed(names, FIELD)), _algorithm({"quant_algo": name, "group_size": group or None}))
        for (name, group), names in found.items()
    ]
    computes = {compute for _, (_, _, compute) in rules}
    return Packing(
        method=f"modelopt {' + '.join(sorted({name for _, (name, _, _) in rules}))}",
        named=tuple((names, rule) for names, (_, rule, _) in rules),
        compute=computes.pop() if len(computes) == 1 else None,
        note=note,
    )


def _require_few(rules: int, key: str) -> None:
    if rules > MOST_RULES:
        raise InputError("too many packings", field=f"{FIELD}.{key}", value=rules, allowed=f"at most {MOST_RULES}")


def _group(said: Mapping[str, Any]) -> int:
    return 0 if said.get("group_size") is None else _whole(said, "group_size", None, 1, LARGEST_GROUP)


def _algorithm(said: Mapping[str, Any]) -> tuple[str, Rule, str | None]:
    name = said.get("quant_algo")
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise InputError(
            "plans do not support this quantisation",
            field=f"{FIELD}.quant_algo",
            value=name,
            allowed=one_of(ALGORITHMS),
            fix=near(str(name)[:80], ALGORITHMS),
        )
    make, compute = ALGORITHMS[name]
    return name, make(_group(said)), compute


def _compressed(said: Mapping[str, Any]) -> Packing:
    """compressed-tensors: a rule per group of modules, either named or all linear maps."""
    groups = said.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise InputError(field=f"{FIELD}.config_groups", value=groups, allowed="an object of groups")
    _require_few(len(groups), "config_groups")
    usual, named, computes = None, list[tuple[tuple[str, ...], Rule]](), set[str | None]()
    for group in groups.values():
        rule, compute = _strategy(group)
        computes.add(compute)
        targets = listed(group.get("targets", ["Linear"]), f"{FIELD}.targets")
        if "Linear" in targets:
            if usual is not None:
                raise InputError("two rules for all linear maps", field=f"{FIELD}.config_groups", value=len(groups))
            usual = rule
        elif targets:
            named.append((tuple(targets), rule))
    return Packing(
        method="compressed-tensors",
        rule=usual,
        named=tuple(named),
        heads=usual is not None,
        compute=computes.pop() if len(computes) == 1 else None,
    )


def _strategy(group: Mapping[str, Any]) -> tuple[Rule, str | None]:
    """Returns the rule of one group's weights, and the precision of its products."""
    rule = group.get("weights")
    if not isinstance(rule, dict):
        raise InputError(field=f"{FIELD}.weights", value=rule, allowed="an object")
    bits, strategy = _whole(rule, "num_bits", 8, 2, 8), rule.get("strategy") or "tensor"
    zeros = Fraction(bits, 8) if rule.get("symmetric") is False else 0
    compute = None
    if group.get("input_activations") is not None:
        compute = {("float", 8): "fp8", ("int", 8): "int8", ("float", 4): "fp4"}.get((str(rule.get("type")), bits))
    if strategy == "tensor":
        return _grouped(bits, scale=0, whole=SCALE), compute
    if strategy == "channel":
        return _grouped(bits, zeros=zeros), compute
    if strategy == "block":
        return _by_block(rule.get("block_structure")), compute
    if strategy not in ("group", "tensor_group"):
        raise InputError(
            "not supported",
            field=f"{FIELD}.strategy",
            value=strategy,
            allowed="tensor, channel, block, group or tensor_group",
        )
    size = _whole(rule, "group_size", None, 1, LARGEST_GROUP)
    if strategy == "tensor_group":  # NVFP4: 8-bit scales, and a float32 each for the matrix and its activations
        return _grouped(bits, size, scale=1, whole=2 * FLOAT if compute else FLOAT), compute
    scale = 1 if rule.get("scale_dtype") == "torch.uint8" else SCALE
    return _grouped(bits, size, zeros=zeros, scale=scale), compute


METHODS: dict[str, Callable[[Mapping[str, Any]], Packing]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "mlx": _mlx,
}

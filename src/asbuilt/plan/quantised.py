"""The stored formats of weights: by a config's quantization_config, in a GGUF file, or as a mixture.

`plan.stored` reads how a config packs weights, `asbuilt.packing` which modules are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from asbuilt.cost.dtypes import dtype as find_dtype
from asbuilt.cost.folded import Held
from asbuilt.cost.mixtures import find_mixture
from asbuilt.dtypes import GGUF_FLOATS, TRAINED, short_name
from asbuilt.errors import InputError
from asbuilt.families import Reading, gguf_table
from asbuilt.families.shared.patterns import matched, tells_experts_apart
from asbuilt.packing import FIELD, LEFT_OUT, QUANTISED_KINDS, apart, holding, left_out, modules, with_fewest_experts
from asbuilt.plan.devices import known
from asbuilt.plan.precision import Precision, precision
from asbuilt.plan.stored.methods import read_packing
from asbuilt.plan.stored.rules import Packing, Rule
from asbuilt.spec import MixtureOfExperts, Model, stored_weights, weights
from asbuilt.spec.part import Part, Weight

if TYPE_CHECKING:
    from asbuilt.formats.gguf import GGUFFile

QUANTISED = "quantised"
NOTHING = "the model has no quantization_config"


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
    few = spec if _tells_experts_apart(packing, said) else with_fewest_experts(spec)
    names = modules(family, few)
    each = apart(few, names)
    rules = _assigned(packing, said, [name for found in (*names.values(), *each.values()) for name in found])

    packed: dict[tuple[Rule | None, Weight], Fraction] = {}

    def of_rule(rule: Rule | None, weight: Weight) -> Fraction:
        if (rule, weight) not in packed:
            part = None if rule is None else rule(weight)
            packed[rule, weight] = Fraction(plain.nbytes(weight)) if part is None else part
        return packed[rule, weight]

    def nbytes(path: str, weight: Weight, owner: Part) -> Fraction:
        """Returns the mean over the modules of a weight: some experts of a stack may be left out."""
        if len(weight.shape) < 2 or weight.role not in ("matrix", "table"):
            return of_rule(None, weight)
        usual = _usual(packing, path, owner, weight)
        if path in each:
            usual = rules.get(names[path][0], usual)
        found = Counter(rules.get(name, usual) for name in each.get(path, names[path]))
        if len(found) == 1:
            return of_rule(next(iter(found)), weight)
        return sum((n * of_rule(rule, weight) for rule, n in found.items()), Fraction(0)) / found.total()

    activation = plain.name if plain.name in TRAINED else "bf16"
    note = f"by {FIELD}: {packing.method}; the rest and left-out modules in {plain.name}"
    return Precision(
        name=f"{QUANTISED} ({packing.method})",
        activation=activation,
        compute=packing.compute or activation,
        held=_averaged(spec, nbytes),
        note="; ".join(filter(None, (note, packing.note))),
        kv=packing.kv,
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
    found = known(spec).census
    means: dict[str, Fraction] = {}
    for path, weight, owner in weights(found.small):
        alike = list(_sharing(path, found.order))
        sizes = Counter(nbytes(one, weight, owner) for one in alike)
        means[path] = sum((n * each for each, n in sizes.items()), Fraction(0)) / max(1, len(alike))
    return lambda path, weight, owner: means[path]


def _sharing(path: str, order: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yields the paths in the model of what is at one path of its census."""
    field, _, rest = path.partition(".")
    if field not in order:
        yield path
        return
    number, _, rest = rest.partition(".")
    yield from (f"{field}.{i}.{rest}" for i, kind in enumerate(order[field]) if kind == int(number))


def _tells_experts_apart(packing: Packing, said: Mapping[str, Any]) -> bool:
    """Whether the experts of a stack may be packed differently."""
    listed = (said[key] for key in LEFT_OUT if isinstance(said.get(key), list))
    lists = (*listed, *(named.patterns for named in packing.named))
    return any(tells_experts_apart(pattern) for patterns in lists for pattern in patterns)


def _usual(packing: Packing, path: str, owner: Part, weight: Weight) -> Rule | None:
    """Returns the general rule, where it applies to this weight."""
    if path.startswith(("vision.", "hearing.")) and not packing.vision:
        return None
    if weight.role == "table":
        return packing.rule if packing.tables else None
    if packing.experts is not None and isinstance(owner, MixtureOfExperts) and len(weight.shape) == 3:
        return packing.experts
    return packing.rule if owner.kind in QUANTISED_KINDS or (owner.kind == "head" and packing.heads) else None


def _assigned(packing: Packing, said: Mapping[str, Any], names: Sequence[str]) -> dict[str, Rule | None]:
    """Returns the rules of named modules: None for those that are left out."""
    rules: dict[str, Rule | None] = {}
    exempt = left_out(said, names)
    for named in packing.named:
        found = matched(named.patterns, names, FIELD)
        if named.required and not found:
            raise InputError(
                "matches no module of this model",
                field=FIELD,
                value=named.patterns[0],
                fix="name a format, such as --dtype fp8",
            )
        rules |= dict.fromkeys(found - rules.keys() - (exempt if packing.whole else set()), named.rule)
    return rules if packing.whole else rules | dict.fromkeys(exempt)

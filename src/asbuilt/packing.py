"""Packed weights of a family's files: the modules excluded from quantisation, and the scales of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from asbuilt.cost.folded import Held, census
from asbuilt.cost.mixtures import find_mixture, held
from asbuilt.errors import InputError
from asbuilt.families import tensor_table
from asbuilt.families.shared.patterns import matched
from asbuilt.families.shared.reader import is_whole
from asbuilt.families.shared.stacks import PARTS
from asbuilt.spec import MixtureOfExperts, Model, Part, stored_weights
from asbuilt.spec.part import walk_stored

FIELD = "quantization_config"
# The keys under which quantisers list the modules that they excluded.
LEFT_OUT = ("modules_to_not_convert", "ignore", "llm_int8_skip_modules", "exclude_modules", "exclude", "ignored_layers")
MOST_PATTERNS = 200_000
# Quantisers pack the matrices of these kinds, not embeddings, heads, routers, norms and biases.
QUANTISED_KINDS = ("attention", "ffn", "ssm")
BLOCK = "weight_block_size"
CACHE = ("kv_cache_quant_algo", "kv_cache_scheme")  # where the cache's dtype is stated
# Families for which llama.cpp's quantiser has separate rules, which are not implemented.
SEPARATE_RULES = ("falcon",)


def packs_weights(said: Mapping[str, Any]) -> bool:
    """Returns whether a quantisation is of weights; modelopt's and compressed-tensors' may be of the cache alone."""
    if str(said.get("quant_method")).lower() not in ("modelopt", "compressed-tensors"):
        return True
    return any(said.get(key) for key in ("quant_algo", "quantized_layers", "config_groups")) or not any(
        said.get(key) for key in CACHE
    )


def modules(family: str, spec: Model) -> dict[str, tuple[str, ...]]:
    """Returns the modules that hold each weight, by its path, with the names of the family's checkpoints."""
    return {
        path: tuple(name.removesuffix(".weight") for name in entry.names)
        for entry in tensor_table(family, spec).entries
        for path in entry.paths
    }


def with_fewest_experts(spec: Model) -> Model:
    """Returns the model with only so many experts in each mixture that its router can choose as many as it does.

    Its modules have the names of the model's, those of the last experts apart: a hundredth, in large models.
    """
    found = census(spec)
    mixtures = [part for _, part in walk_stored(found.small) if isinstance(part, MixtureOfExperts)]
    if not mixtures:
        return spec
    small = found.small.replace_where(MixtureOfExperts, _with_fewest)
    assert isinstance(small, Model)
    every = {field: tuple(getattr(small, field)[kind] for kind in order) for field, order in found.order.items()}
    return replace(small, **every)


def _with_fewest(part: Part) -> Part:
    assert isinstance(part, MixtureOfExperts)
    router = part.router
    groups = 1 if router.groups is None else router.groups.n_groups
    fewest = min(part.n_experts, max(2, router.top_k) * groups)
    return replace(part, n_experts=fewest, router=replace(router, n_experts=fewest))


def apart(spec: Model, names: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Returns the modules of each stack of experts that is stored as one, as quantisers name them who take it apart."""
    found = {}
    for path, weight, owner in stored_weights(spec):
        before, experts, _ = names[path][0].partition(".experts.")
        end = PARTS.get(path.rpartition(".")[2])
        if experts and end and len(names[path]) == 1 and isinstance(owner, MixtureOfExperts) and len(weight.shape) == 3:
            found[path] = tuple(f"{before}.experts.{e}.{end}" for e in range(weight.shape[0]))
    return found


def left_out(said: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Returns the modules excluded from a quantisation: the same rule for files and plans.

    A name matches a module and everything in it, at any depth, as in transformers; `re:` starts a
    regular expression, as in compressed-tensors; `*` is a wildcard, as in modelopt. Raises InputError for an invalid
    pattern.
    """
    found = set[str]()
    for key in LEFT_OUT:
        if said.get(key) is not None:
            found |= matched(listed(said[key], f"{FIELD}.{key}"), names, f"{FIELD}.{key}")
    return found


def listed(said: object, field: str) -> list[Any]:
    """Returns a list of patterns; raises InputError for anything else, and for too many."""
    if not isinstance(said, list) or len(said) > MOST_PATTERNS:
        raise InputError(field=field, value=said, allowed=f"a list of at most {MOST_PATTERNS:,} names")
    return said


def block_scales(family: str, spec: Model, quantization: Mapping[str, Any] | None) -> int:
    """Returns the number of scales, one per tile of `weight_block_size` (rows, columns), including partial tiles.

    Matrices of attention and feed-forward have scales unless excluded; embeddings, routers, heads and the map that
    joins a prediction layer's inputs do not (DeepSeek-V3's README_WEIGHTS, section FP8). Raises InputError for an
    invalid tile size.
    """
    if quantization is None or quantization.get("quant_method") != "fp8" or quantization.get(BLOCK) is None:
        return 0
    tile = quantization[BLOCK]
    if not isinstance(tile, list) or len(tile) != 2 or not all(is_whole(n) and n > 0 for n in tile):
        raise InputError(field=f"{FIELD}.{BLOCK}", value=tile, allowed="[rows, columns]")
    shapes = dict(_stored_matrices(family, spec))
    plain = left_out(quantization, shapes)
    return sum(
        -(-rows // tile[0]) * -(-columns // tile[1]) for name, (rows, columns) in shapes.items() if name not in plain
    )


def _stored_matrices(family: str, spec: Model) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the modules of attention and feed-forward that hold a matrix, with its shape."""
    built = {
        path: weight.shape
        for path, weight, owner in stored_weights(spec)
        if owner.kind in QUANTISED_KINDS and weight.role == "matrix"
    }
    for entry in tensor_table(family, spec).entries:
        if entry.paths[0] in built:
            shapes = entry.layout.stored_shapes([built[path] for path in entry.paths])
            for name, shape in zip(entry.names, shapes, strict=True):
                yield name.removesuffix(".weight"), (shape[0], shape[1])


def holding(family: str, spec: Model, dtype: str) -> Held:
    """Returns the function that computes a weight's bytes in a format or mixture, from its path, itself and its part.

    Raises InputError for an unknown name, and for a mixture if llama.cpp has its own rules for the family.
    """
    if find_mixture(dtype) is None:
        return held(spec, dtype)
    if family in SEPARATE_RULES:
        raise InputError(
            f"this mixture is not stated for {family}",
            field="dtype",
            value=dtype,
            fix="name one format, such as q4_k or q8_0",
        )
    return held(spec, dtype, joined=bool(family) and _joined(family, spec))


def _joined(family: str, spec: Model) -> bool:
    """Whether files of the family store the query, key and value maps as one tensor."""
    ends = (".q.weight", ".k.weight", ".v.weight")
    return any(
        len(entry.paths) == len(ends) and all(map(str.endswith, entry.paths, ends))
        for entry in tensor_table(family, spec).entries
    )

"""How the files of a family pack weights: which modules are left out, and the scales of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from asbuilt.cost.folded import Held
from asbuilt.cost.mixtures import find_mixture, held
from asbuilt.errors import InputError
from asbuilt.families import tensor_table
from asbuilt.families.shared.patterns import matched
from asbuilt.families.shared.reader import is_whole
from asbuilt.spec import Model, stored_weights

FIELD = "quantization_config"
# The keys under which quantisers name the modules that they left as they were.
LEFT_OUT = ("modules_to_not_convert", "ignore", "llm_int8_skip_modules", "exclude_modules", "exclude", "ignored_layers")
MOST_PATTERNS = 200_000
# Quantisers pack the matrices of these: embeddings, the head, routers, norms and biases they leave as they were.
QUANTISED_KINDS = ("attention", "ffn", "ssm")
BLOCK = "weight_block_size"
# Families for which llama.cpp's quantiser has rules that differ from everybody's.
RULES_OF_THEIR_OWN = ("falcon",)


def modules(family: str, spec: Model) -> dict[str, tuple[str, ...]]:
    """Returns the modules that hold each weight, by its path, as checkpoints of the family name them."""
    return {
        path: tuple(name.removesuffix(".weight") for name in entry.names)
        for entry in tensor_table(family, spec).entries
        for path in entry.paths
    }


def left_out(said: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Returns which of the modules a quantisation leaves as they were: the one rule, for files and for plans.

    A name is a module with all that is in it, wherever it stands, as transformers takes `modules_to_not_convert`; `re:`
    an expression, as compressed-tensors has it; stars are those of file names, as modelopt has them. Raises InputError
    for what names none.
    """
    found = set[str]()
    for key in LEFT_OUT:
        if said.get(key) is not None:
            found |= matched(listed(said[key], f"{FIELD}.{key}"), names, f"{FIELD}.{key}")
    return found


def listed(said: object, field: str) -> list[Any]:
    """Returns a list of patterns; raises InputError for what is none, and for too many."""
    if not isinstance(said, list) or len(said) > MOST_PATTERNS:
        raise InputError("not a list of names", field=field, value=said, allowed=f"at most {MOST_PATTERNS:,}")
    return said


def block_scales(family: str, spec: Model, quantization: Mapping[str, Any] | None) -> int:
    """Returns the scales, one for each tile of `weight_block_size` (rows, columns), those at the edges too.

    Stored so are the matrices of attention and feed-forward, but those that are left out; embedding, router, head and
    what joins a prediction layer's halves are not (DeepSeek-V3's README_WEIGHTS, section FP8). Raises InputError for a
    tile that is none.
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
    """Returns what gives a weight its bytes at a format or a mixture of formats, by its path, itself and its part.

    Raises InputError for a name of neither, and for a mixture of a family that has rules of its own there.
    """
    if find_mixture(dtype) is None:
        return held(spec, dtype)
    if family in RULES_OF_THEIR_OWN:
        raise InputError(
            f"this mixture is not stated for {family}",
            field="dtype",
            value=dtype,
            fix="name one format, such as q4_k or q8_0",
        )
    return held(spec, dtype, joined=bool(family) and _joined(family, spec))


def _joined(family: str, spec: Model) -> bool:
    """Whether files of the family keep the maps of queries, keys and values as one."""
    ends = (".q.weight", ".k.weight", ".v.weight")
    return any(
        len(entry.paths) == len(ends) and all(map(str.endswith, entry.paths, ends))
        for entry in tensor_table(family, spec).entries
    )

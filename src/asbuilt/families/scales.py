"""How many scales a checkpoint holds whose matrices lie in 8 bits, each tile of them under a scale of its own."""

from __future__ import annotations

from typing import Any

from asbuilt.errors import InputError
from asbuilt.families import tensor_table
from asbuilt.families.reader import is_whole
from asbuilt.spec import Model, stored_weights

BLOCK = "weight_block_size"


def block_scales(family: str, spec: Model, quantization: dict[str, Any] | None) -> int:
    """Returns the scales, one for each tile of `weight_block_size` (rows, columns), those at the edges too.

    Stored so are the matrices of attention and feed-forward, but those that `modules_to_not_convert` names; embedding,
    router, head and what joins a prediction layer's halves are not (DeepSeek-V3's README_WEIGHTS, section FP8). Raises
    InputError for a tile that is none.
    """
    if quantization is None or quantization.get("quant_method") != "fp8" or quantization.get(BLOCK) is None:
        return 0
    tile = quantization[BLOCK]
    if not isinstance(tile, list) or len(tile) != 2 or not all(is_whole(n) and n > 0 for n in tile):
        raise InputError("not allowed", field=f"quantization_config.{BLOCK}", value=tile, allowed="[rows, columns]")
    named = quantization.get("modules_to_not_convert")
    kept = tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()
    matrices = {
        path: weight.shape
        for path, weight, owner in stored_weights(spec)
        if owner.kind in ("attention", "ffn") and weight.role in ("matrix", "stream_matrix")
    }
    return sum(
        -(-shape[0] // tile[0]) * -(-shape[1] // tile[1])
        for entry in tensor_table(family, spec).entries
        if entry.paths[0] in matrices
        for name, shape in zip(
            entry.names, entry.layout.stored_shapes([matrices[path] for path in entry.paths]), strict=True
        )
        if not any(module in name for module in kept)
    )

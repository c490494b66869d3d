"""Adding adapters to the weights beside them: W + (alpha / rank) B A, for a model in memory and for its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from asbuilt.checkpoint.packed import packed_spec
from asbuilt.spec import Lora, Model, stored_weights
from asbuilt.spec.linear import maps_by_path, transform_maps

if TYPE_CHECKING:
    from torch import Tensor

    from asbuilt.nn.model import Model as Built


def merged(model: Built) -> Built:
    """Returns a new model whose matrices have the adapters added, its packed weights expanded to the model's dtype.

    The new weights are in memory beside the old ones. `convert(..., adapter=FOLDER)` writes the same to a folder, one
    tensor after the other.
    """
    import torch

    from asbuilt.kernels.packed import expand
    from asbuilt.nn import build, stored_tensors

    held = {path: tensor.detach() for path, tensor in stored_tensors(model).items()}
    made = build(bare(model.spec), dtype=model.dtype, device=model.device, seed=None)
    formats = {path: weight.format for path, weight, _ in stored_weights(model.spec)}
    add = adding(model.spec, held)
    with torch.no_grad():
        for path, tensor in stored_tensors(made).items():
            format = formats[path]
            tensor.copy_(add(path, held[path] if format is None else expand(held[path], format, tensor.dtype)))
    return made.train(model.training)


def bare(spec: Model) -> Model:
    """Returns the model without adapters and packed weights."""
    return transform_maps(packed_spec(spec, {}), lambda _, one: one.plain)


def adding(spec: Model, held: Mapping[str, Tensor]) -> Callable[[str, Tensor], Tensor]:
    """Returns a function that adds to the matrix at a path its adapter in `spec`, of the tensors `held`.

    Other tensors it returns as they are. The sum is computed in float32 or wider, and has the dtype of the matrix.
    """
    loras = {path: one for path, one in maps_by_path(spec).items() if isinstance(one, Lora)}

    def add(path: str, weight: Tensor) -> Tensor:
        import torch

        if path not in loras:
            return weight
        begin = path.removesuffix("weight") if path.endswith(".weight") else f"{path}_"
        wide = torch.promote_types(weight.dtype, torch.float32)
        a, b = (held[f"{begin}{leaf}"].to(wide) for leaf in ("lora_a", "lora_b"))
        return (weight.to(wide) + b @ a * loras[path].scale).to(weight.dtype)

    return add

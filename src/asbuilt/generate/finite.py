"""One check of a model's outputs: finite, or a message with the place and the likely cause."""

from __future__ import annotations

import torch
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.nn.build import stored_tensors
from asbuilt.nn.model import Model


def require_logits(logits_BV: Tensor, model: Model, after: tuple[int, ...]) -> None:
    """Raises InputError if a row has a NaN or +inf logit, or only -inf ones.

    Single logits of -inf are tokens that are never chosen. `after[b]` is how many tokens row b has processed.
    """
    largest_B = logits_BV.amax(-1)  # NaN if any logit is
    if not bool(largest_B.isfinite().all()):
        row = int(largest_B.isfinite().int().argmin())
        beside = f" of prompt {row}" if len(after) > 1 else ""
        raise _error("logits", f"after {after[row]} tokens{beside}", float(largest_B[row]), model)


def require_vectors(vectors_BM: Tensor, model: Model, names: list[str]) -> None:
    """Raises InputError if a vector has NaN or infinite values; `names[b]` is what vector b represents."""
    whole_B = vectors_BM.isfinite().all(-1)
    if not bool(whole_B.all()):
        row = int(whole_B.int().argmin())
        bad = vectors_BM[row][~vectors_BM[row].isfinite()]
        raise _error("vectors", f"of {names[row]}", float(bad[0]), model)


def _error(field: str, where: str, value: float, model: Model) -> InputError:
    cause, fix = _cause(model)
    return InputError(f"not finite {where}: {cause}", field=field, value=value, fix=fix)


def _cause(model: Model) -> tuple[str, str]:
    """Returns the most likely cause and its fix; scanning all weights is acceptable, since it happens once."""
    for path, tensor in stored_tensors(model).items():
        if not bool(tensor.isfinite().all()):
            return f"{path} has values that are not finite", "the checkpoint is corrupt: download or convert it again"
    dtype = model.dtype
    if dtype == torch.float32:
        return "all weights are finite, and float32 overflowed", "check that config.json matches the weights"
    name = str(dtype).removeprefix("torch.")
    return f"all weights are finite, and {name} overflowed", "compute in float32 (--dtype fp32)"

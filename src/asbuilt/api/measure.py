"""`asbuilt.measure(model)`: a model's predicted figures beside those measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from asbuilt import cost, memory
from asbuilt import measure as measuring
from asbuilt.checkpoint.given import source_of
from asbuilt.checkpoint.load import load
from asbuilt.dtypes import CALIBRATED, TORCH_NAMES, short_name
from asbuilt.errors import InputError, one_of
from asbuilt.nn import build
from asbuilt.nn.model import Model
from asbuilt.shown import size
from asbuilt.spec import Model as Spec
from asbuilt.spec import Pass

if TYPE_CHECKING:
    from asbuilt.checkpoint.given import Given
    from asbuilt.checkpoint.source import Source
    from asbuilt.measure import Report

TOKENS = 512
Say = Callable[[str], None]


def measure(
    model: Given,
    *,
    dtype: object = None,
    refresh: bool = False,
    allow_unread: Sequence[str] = (),
    say: Say = lambda text: None,
    warn: Say = lambda text: None,
) -> Report:
    """Returns each figure of a model as predicted from its description and as measured on this machine's CPU.

    A built model is measured as it is; otherwise the weights are loaded, or random for a description, in `dtype` (fp32
    or bf16; None means as stored if that is one of these, else fp32). `refresh` recalibrates the machine. Raises
    InputError for a model that does not predict the next token, or is too large for this machine.
    """
    if isinstance(model, nn.Module):
        return _of_built(model, dtype, refresh, say, warn)
    source = source_of(model, weights=True, allow_unread=allow_unread)
    require_measurable(source.spec, source.name)
    stored = "bf16" if source.reading.dtype == "bfloat16" else "fp32"
    chosen = stored if dtype is None else _calibrated(dtype)
    _require_room(source, chosen)
    return measuring.measure(_built(source, chosen), name=source.name, refresh=refresh, say=say, warn=warn)


def _of_built(model: nn.Module, dtype: object, refresh: bool, say: Say, warn: Say) -> Report:
    if not isinstance(model, Model):
        raise InputError(field="model", value=type(model).__name__, allowed="a model that `build` or `load` returned")
    require_measurable(model.spec, model.spec.name)
    own = _calibrated(model.dtype)
    if dtype is not None and short_name(dtype) != own:
        raise InputError("a built model is measured in its own dtype", field="dtype", value=str(dtype), allowed=own)
    return measuring.measure(model, refresh=refresh, say=say, warn=warn)


def _calibrated(dtype: object) -> str:
    name = short_name(dtype)
    if name not in CALIBRATED:
        raise InputError("no calibration for this dtype", field="dtype", value=str(dtype), allowed=one_of(CALIBRATED))
    return name


def require_measurable(spec: Spec, name: str) -> None:
    """Raises InputError for a model that does not predict the next token."""
    if not spec.generates:
        raise InputError(
            "only causal language models are measured",
            field="MODEL",
            value=name,
            fix="`asbuilt describe` predicts its costs",
        )


def _require_room(source: Source, dtype: str) -> None:
    """Raises InputError if the weights and one training step need more than this machine's memory."""
    run = Pass(tokens=min(TOKENS, source.spec.max_positions), width=int(cost.dtype(dtype).block_bytes))
    kept = cost.saved(source.spec, run)
    needed = cost.weight_bytes(source.spec, dtype) + kept.all + kept.loss
    have = memory.total()
    if have is not None and needed > have:
        raise InputError(
            f"needs {size(needed)} of memory, and this machine has {size(have)}",
            field="MODEL",
            value=source.name,
            fix="`asbuilt describe` predicts without running it",
        )


def _built(source: Source, dtype: str) -> Model:
    wanted: torch.dtype = getattr(torch, TORCH_NAMES[dtype])
    if source.has_weights or source.kind == "folder":
        return load(source, wanted)
    return build(source.spec, dtype=wanted).eval()

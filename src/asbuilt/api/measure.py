"""`asbuilt.measure(model)`: a model's predicted figures beside those measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from asbuilt import cost, memory
from asbuilt import measure as measuring
from asbuilt.api.running import Running, contents_of, speeds_here
from asbuilt.checkpoint.given import source_of
from asbuilt.checkpoint.load import Contents, load_contents
from asbuilt.dtypes import CALIBRATED, TORCH_NAMES, short_name
from asbuilt.errors import InputError, one_of
from asbuilt.files import read_text
from asbuilt.generate.compute import choose
from asbuilt.generate.decode import generate
from asbuilt.generate.sampling import Sampling
from asbuilt.measure import Text
from asbuilt.measure.loading import Loading, loaded
from asbuilt.nn import build
from asbuilt.nn.cache import require_cache
from asbuilt.nn.model import Model
from asbuilt.shown import size
from asbuilt.spec import Model as Spec
from asbuilt.spec import Pass, weights

if TYPE_CHECKING:
    from asbuilt.checkpoint.given import Given
    from asbuilt.checkpoint.source import Source
    from asbuilt.measure import Report

TOKENS, AUTO = 512, "auto"
TEXT_TOKENS = 8192  # of a text, unless more are asked for
SAMPLED = 256  # tokens of a text that the model samples
LARGEST_TEXT = 1 << 26
Say = Callable[[str], None]


def measure(
    model: Given,
    *,
    dtype: object = None,
    refresh: bool = False,
    kv_dtype: object = None,
    text: str | Path | None = None,
    tokens: int = TEXT_TOKENS,
    packed: bool | None = None,
    allow_unread: Sequence[str] = (),
    training: bool = False,
    batch: int | None = None,
    seq: int | None = None,
    say: Say = lambda text: None,
    warn: Say = lambda text: None,
) -> Report:
    """Returns each figure of a model as predicted from its description and as measured on this machine's CPU.

    A built model is measured as it is; otherwise the weights are loaded, or random for a description, in `dtype` (fp32
    or bf16; None or "auto" mean the one that `generate` would choose). The blocks of a GGUF file stay packed as in
    `generate`, or as `packed` says; what a training step saves is measured of expanded weights only. `refresh`
    recalibrates the machine. With `kv_dtype`, a format as `generate` takes it, the cache's bytes in it are measured
    too, and the loss with it beside that without: on the first `tokens` of the file `text`, or on a text that the model
    samples. Raises InputError for a model that does not predict the next token, or is too large for this machine.

    With `training` the figures of training are returned instead, as planned and as measured of random weights, for
    micro-batches of `batch` sequences of `seq` tokens.
    """
    if training:
        spec, name = _described(model, allow_unread)
        others = {"kv_dtype": kv_dtype, "text": text, "packed": packed}
        return _training(spec, name, others, dtype=dtype, batch=batch, seq=seq, refresh=refresh, say=say, warn=warn)
    for field, value in (("batch", batch), ("seq", seq)):
        if value is not None:
            raise InputError("only of training", field=field, value=value, fix="give --training too")
    if isinstance(model, nn.Module):
        if text is not None:
            raise InputError("a built model has no tokenizer", field="text", value=str(text), fix="leave it out")
        return _of_built(model, dtype, refresh, kv_dtype, say, warn)
    source = source_of(model, weights=True, allow_unread=allow_unread)
    require_measurable(source.spec, source.name)
    contents = _contents(source, None if dtype in (None, AUTO) else _calibrated(dtype), packed)
    chosen = _faster(source, contents, say) if dtype in (None, AUTO) else _calibrated(dtype)
    kv = _format(source.spec, kv_dtype, getattr(torch, TORCH_NAMES[chosen]))
    if text is not None and kv is None:
        raise InputError("nothing whose loss is measured", field="text", value=str(text), fix="give --kv-dtype too")
    read = None if text is None else _read(source, Path(text), tokens)
    _require_room(source, chosen)
    built, loading = _built(source, chosen, contents)
    read = _sampled(built) if read is None and kv is not None else read
    made = {"kv": kv, "text": read, "loading": loading}
    return measuring.measure(built, name=source.name, refresh=refresh, **made, say=say, warn=warn)


def _described(model: Given, allow_unread: Sequence[str]) -> tuple[Spec, str]:
    """Returns the description of a model, and its name; no weights are read."""
    if isinstance(model, Model):
        return model.spec, model.spec.name
    source = source_of(model, allow_unread=allow_unread)
    return source.spec, source.name


def _training(
    spec: Spec,
    name: str,
    others: dict[str, object],
    *,
    batch: int | None,
    **settings: Any,  # noqa: ANN401  those of measure_training
) -> Report:
    from asbuilt.api.training import BATCH, measure_training

    for field, value in others.items():
        if value is not None:
            raise InputError("not of training", field=field, value=str(value), fix="leave it out, or --training")
    return measure_training(spec, name=name, batch=BATCH if batch is None else batch, **settings)


def _format(spec: Spec, kv_dtype: object, dtype: torch.dtype) -> str | None:
    """Returns the format of the cache; raises InputError for one that the model's cache cannot have."""
    if kv_dtype is None:
        return None
    name = short_name(kv_dtype)
    require_cache(spec, name, dtype)
    return name


def _read(source: Source, path: Path, tokens: int) -> Text:
    """Returns the first tokens of a text."""
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise InputError("has no tokenizer, so a text has no loss", field="MODEL", value=source.name)
    # A token has at least a byte, so more characters than tokens are seldom needed; long words may take many.
    ids = tokenizer.encode(read_text(path, LARGEST_TEXT, "text")[: 64 * tokens])[:tokens]
    return Text(ids=ids, first=tokenizer.bos_id if tokenizer.add_bos else None)


def _sampled(model: Model) -> Text | None:
    """Returns a text that the model samples; none of one that reads more than tokens."""
    if model.spec.reads != ("tokens",) or model.spec.max_positions < 2:
        return None
    begin = [1 % model.spec.n_vocab]
    more = min(SAMPLED, model.spec.max_positions) - 1
    steps = generate(model, [begin], max_new_tokens=more, sampling=Sampling(temperature=1.0))
    return Text(ids=[*begin, *(token for (token,) in steps if token is not None)], sampled=True)


def _of_built(model: nn.Module, dtype: object, refresh: bool, kv_dtype: object, say: Say, warn: Say) -> Report:
    if not isinstance(model, Model):
        raise InputError(field="model", value=type(model).__name__, allowed="a model that `build` or `load` returned")
    require_measurable(model.spec, model.spec.name)
    own = _calibrated(model.dtype)
    if dtype not in (None, AUTO) and short_name(dtype) != own:
        raise InputError("a built model is measured in its own dtype", field="dtype", value=str(dtype), allowed=own)
    kv = _format(model.spec, kv_dtype, model.dtype)
    read = None if kv is None else _sampled(model)
    return measuring.measure(model, refresh=refresh, kv=kv, text=read, say=say, warn=warn)


def _faster(source: Source, contents: Contents | None, say: Say) -> str:
    """Returns the dtype that a request of these figures would compute in: bf16 where it is stored and not slower."""
    packed = contents is not None and any(weight.format is not None for _, weight, _ in weights(contents.spec))
    if packed or source.reading.dtype != "bfloat16":
        return "fp32"
    needs = {getattr(torch, TORCH_NAMES[name]): cost.weight_bytes(source.spec, name) for name in CALIBRATED}
    found = choose(torch.bfloat16, None, TOKENS, TOKENS // 8, lambda dtype: needs[dtype], speeds_here)
    say(found.warning or found.choice)
    return "bf16" if found.dtype == torch.bfloat16 else "fp32"


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


def _contents(source: Source, dtype: str | None, packed: bool | None) -> Contents | None:
    """Returns the stored tensors as they will be held, packed or expanded; None of a description."""
    if source.has_weights or source.kind == "folder":
        how = Running(dtype=None if dtype is None else getattr(torch, TORCH_NAMES[dtype]), packed=packed)
        return contents_of(source, how, (TOKENS, TOKENS // 8))
    if packed:
        raise InputError("has no weights that could stay packed", field="packed", value=source.name)
    return None


def _built(source: Source, dtype: str, contents: Contents | None) -> tuple[Model, Loading | None]:
    """Returns the model, and what loading its weights took, if there are any."""
    wanted: torch.dtype = getattr(torch, TORCH_NAMES[dtype])
    if contents is not None:
        return loaded(lambda: load_contents(contents, wanted))
    return build(source.spec, dtype=wanted).eval(), None

"""`asbuilt.generate(model, prompt)`: text for a text, token ids for token ids."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from asbuilt.checkpoint.given import source_of
from asbuilt.checkpoint.load import Contents, dtype_of, headers, load
from asbuilt.checkpoint.room import memory_errors, require_room
from asbuilt.errors import InputError
from asbuilt.generate import compute as computing
from asbuilt.generate import decode, text
from asbuilt.generate.compute import Compute
from asbuilt.generate.sampling import Sampling
from asbuilt.nn.model import Model
from asbuilt.text import chat
from asbuilt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from asbuilt.checkpoint.given import Given
    from asbuilt.checkpoint.source import Source
    from asbuilt.generate.text import Completion

log = logging.getLogger(__name__)
Messages = list[dict[str, Any]]
MOST = 256  # new tokens, unless said


@overload
def generate(
    model: Given,
    prompt: str | Messages,
    *,
    max_new_tokens: int = MOST,
    sampling: Sampling = ...,
    stop: Sequence[str] = (),
    dtype: object = None,
    tokenizer: Tokenizer | Source | str | None = None,
    allow_unread: Sequence[str] = (),
) -> str: ...


@overload
def generate(
    model: Given,
    prompt: list[int],
    *,
    max_new_tokens: int = MOST,
    sampling: Sampling = ...,
    stop: Sequence[str] = (),
    dtype: object = None,
    tokenizer: Tokenizer | Source | str | None = None,
    allow_unread: Sequence[str] = (),
) -> list[int]: ...


def generate(
    model: Given,
    prompt: str | list[int] | Messages,
    *,
    max_new_tokens: int = MOST,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    stop: Sequence[str] = (),
    dtype: object = None,
    tokenizer: Tokenizer | Source | str | None = None,
    allow_unread: Sequence[str] = (),
) -> str | list[int]:
    """Returns what a model writes after a text or chat messages, or the token ids that it writes after token ids.

    `model` is a name, a path or a source, whose weights are loaded for this one call, or a built model; that one's
    `tokenizer` is a tokenizer, or what has one. `dtype` is what to compute in; None as stored, or float32 where that is
    much faster here. Greedy unless `sampling` says otherwise; it ends at the model's end tokens, before a `stop` text,
    or after `max_new_tokens`. `asbuilt.complete` gives the text piece by piece. Raises InputError before anything runs.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "prefill_chunk": None}
    ids = isinstance(prompt, list) and not text.is_chat(prompt)
    if isinstance(model, nn.Module):
        return _by_built(model, prompt, _tokenizer_of(tokenizer), options | {"stop": stop}, ids=ids)
    source = source_of(model, weights=True, allow_unread=allow_unread)
    if ids and source.tokenizer() is None:
        return _ids(load(source, None if dtype is None else dtype_of(dtype)), prompt, source.eos_ids, **options)
    completion, compute = begin(source, prompt, dtype, options | {"stop": stop}, tokenizer=_tokenizer_of(tokenizer))
    if compute.warning:
        log.warning(compute.warning)
    with memory_errors(compute.needed, source.name, "to be run"):
        said = "".join(completion)
    return completion.tokens if ids else said


def _by_built(
    model: nn.Module,
    prompt: Any,  # noqa: ANN401
    tokenizer: Tokenizer | None,
    options: dict[str, Any],
    *,
    ids: bool,
) -> str | list[int]:
    if not isinstance(model, Model):
        raise InputError("is not one of ours", field="model", value=type(model).__name__, allowed="what `build` gives")
    if tokenizer is None:
        if not ids:
            raise InputError(
                "a built model has none of its own", field="tokenizer", fix="give a tokenizer, or a source that has one"
            )
        return _ids(model, prompt, (), **{key: value for key, value in options.items() if key != "stop"})
    completion = text.complete(model, tokenizer, prompt, **options)
    said = "".join(completion)
    return completion.tokens if ids else said


def _ids(model: Model, prompt: Any, eos_ids: Sequence[int], **options: Any) -> list[int]:  # noqa: ANN401
    steps = decode.generate(model, [prompt], eos_ids=eos_ids, **options)
    return [token for (token,) in steps if token is not None]


def _tokenizer_of(given: Tokenizer | Source | str | None) -> Tokenizer | None:
    if given is None or isinstance(given, Tokenizer):
        return given
    return _required(source_of(given))


def _required(source: Source) -> Tokenizer:
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise InputError("has no tokenizer", field="MODEL", value=source.name, fix="put its tokenizer.json beside it")
    return tokenizer


def begin(
    source: Source,
    prompt: str | list[int] | Messages,
    dtype: object,
    options: dict[str, Any],
    *,
    field: str = "dtype",
    tokenizer: Tokenizer | None = None,
    packed: bool = False,
    adapter: str | None = None,
) -> tuple[Completion, Compute]:
    """Loads the model, having checked what needs no weights and whether it fits into memory, and starts.

    `options` are those of `text.complete`; `field` names the dtype in messages; `packed` and `adapter` are as `load`
    takes them.
    """
    asked = None if dtype is None else dtype_of(dtype, field)
    headers(source)  # says so where there are no weights
    tokenizer, reads = tokenizer or _required(source), source.spec.encoder is not None
    start = source.decoder_start if reads else ()
    decode.check_start(source.spec, start)
    ids = text.prompt_ids(tokenizer, prompt)
    decode.check_prompt(source.spec, ids)
    eos_ids = (*source.eos_ids, *(chat.turn_ends(tokenizer) if text.is_chat(prompt) else ()))
    contents = Contents(source, packed=packed, adapter=adapter)
    begun, chunk = start if reads else ids, options["prefill_chunk"]
    new = max(0, decode.room(source.spec, len(begun), options["max_new_tokens"]))

    def needs(dtype: torch.dtype) -> int:
        source_tokens = len(ids) if reads else None
        return contents.needs(
            dtype, computing.request_bytes(contents.spec, len(begun), new, dtype, chunk, source_tokens)
        )

    compute = computing.choose(contents.dtype(None), asked, len(ids), new, needs)
    require_room(
        compute.needed,
        source.name,
        what="to be run",
        fix="a narrower --dtype, fewer --max-new-tokens or a --prefill-chunk may take less",
    )
    model = load(source, compute.dtype, packed=packed, adapter=adapter)
    return text.complete(model, tokenizer, ids, start=start, eos_ids=eos_ids, **options), compute

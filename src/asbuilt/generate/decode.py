"""Prefill and decode: prompts in, one token per row and step out.

A row that stops leaves the batch, cache and all, so that it costs nothing more. Shapes: batch B, tokens T,
vocabulary V.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.generate.finite import require_logits
from asbuilt.generate.sampling import Sampler, Sampling
from asbuilt.nn.cache import Cache
from asbuilt.nn.model import Model
from asbuilt.spec import Classifier
from asbuilt.spec import model as spec
from asbuilt.spec.part import Kernel
from asbuilt.spec.positions import DynamicNTK, LongRope, read_again, rotaries_by_length

log = logging.getLogger(__name__)


def generate(
    model: Model,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008  frozen
    eos_ids: Sequence[int] = (),
    start: Sequence[int] = (),
    prefill_chunk: int | None = None,
    kernel: Kernel = "fused",
) -> Iterator[list[int | None]]:
    """Returns an iterator over the steps' tokens, one per prompt, None for a row that has stopped.

    Where the model has an encoder it reads the prompts, and every row's text begins with `start`. A row stops after one
    of `eos_ids`, which it still gives, after `max_new_tokens`, or where its context is full; that is logged beforehand.
    `prefill_chunk` bounds the tokens of one prefill pass, an encoder's excepted. Rows that share one `sampling` share
    its seed. Raises InputError, before anything runs, for what the model cannot take; and at the step at which logits
    are no numbers.
    """
    _require_whole("max_new_tokens", max_new_tokens, 0)
    if prefill_chunk is not None:
        _require_whole("prefill_chunk", prefill_chunk, 1)
    if kernel not in get_args(Kernel):
        raise InputError("unknown kernel", field="kernel", value=kernel, allowed=", ".join(get_args(Kernel)))
    check_start(model.spec, start)
    for prompt in prompts:
        check_prompt(model.spec, prompt)
    read = model.spec.encoder is not None
    rows = _Rows(begun=[list(start)] * len(prompts), sources=prompts) if read else _Rows(begun=prompts)
    requests = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    if len(requests) != len(prompts):
        raise InputError("not one per prompt", field="sampling", value=len(requests), allowed=str(len(prompts)))
    rooms = [room(model.spec, len(begun), max_new_tokens) for begun in rows.begun]
    for note in dict.fromkeys(n for begun in rows.begun for n in notes(model.spec, len(begun), max_new_tokens)):
        log.warning(note)
    return _steps(model, rows, rooms, requests, frozenset(eos_ids), prefill_chunk, kernel)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What the rows' texts begin with, and what an encoder reads for each of them, where there is one."""

    begun: list[list[int]]
    sources: list[list[int]] | None = None

    def keep(self, rows: list[int]) -> _Rows:
        """Returns these rows."""
        sources = None if self.sources is None else [self.sources[row] for row in rows]
        return _Rows(begun=[self.begun[row] for row in rows], sources=sources)

    @property
    def longest_source(self) -> int:
        """Tokens of the longest source; 0 where there is none."""
        return max(map(len, self.sources or [[]]))


def check_prompt(model: spec.Model, prompt: Sequence[int]) -> None:
    """Raises InputError unless the prompt is a list of the model's own token ids that its context can hold.

    Where the model has an encoder, that one's: it reads the prompt. It raises one too for a model that cannot continue
    a text.
    """
    if not model.decodes or model.head is None:
        why = "its tokens see those after them" if not model.decodes else "it has no head"
        reads = "" if model.n_vocab == 0 else "asbuilt embed compares sentences by such a model"
        raise InputError(f"continues no text: {why}", field="MODEL", value=model.name, fix=reads)
    require_text(model)
    _check_tokens(model if model.encoder is None else model.encoder, prompt, "prompt", "there is nothing to continue")


def check_start(model: spec.Model, start: Sequence[int]) -> None:
    """Raises InputError unless a model with an encoder, and no other, is told what its text begins with."""
    if model.encoder is not None:
        _check_tokens(model, start, "start", "a text written beside another begins with a token")
    elif len(start) > 0:
        raise InputError("has no encoder: the prompt is what its text begins with", field="start", value=list(start))


def _check_tokens(stack: spec.Model, tokens: Sequence[int], field: str, why: str) -> None:
    n_vocab = stack.n_vocab
    if len(tokens) == 0:
        raise InputError(f"empty: {why}", field=field, allowed="at least one token")
    if len(tokens) > stack.max_positions:
        raise InputError(
            "longer than the context, in tokens",
            field=field,
            value=len(tokens),
            allowed=f"at most max_positions = {stack.max_positions}",
            fix="shorten it",
        )
    for token in tokens:
        if type(token) is not int or not 0 <= token < n_vocab:
            raise InputError(
                "not a token id of this model", field=field, value=token, allowed=f"whole numbers below {n_vocab}"
            )


def require_text(model: spec.Model) -> None:
    """Raises InputError for a model that reads images alone, or gives no next token."""
    if not isinstance(model.head, spec.Head | spec.TiedHead):
        made = "labels" if isinstance(model.head, Classifier) else "vectors"
        raise InputError(
            f"gives {made}, not the next token",
            field="MODEL",
            value=model.name,
            allowed="a model with a language model's head",
        )


def _require_whole(field: str, value: object, low: int) -> None:
    if type(value) is not int or value < low:
        raise InputError("out of range", field=field, value=value, allowed=f"a whole number of at least {low}")


def room(model: spec.Model, prompt_tokens: int, max_new_tokens: int) -> int:
    """Returns how many tokens may follow: `max_new_tokens`, or what the context leaves."""
    return min(max_new_tokens, model.max_positions - prompt_tokens)


def clip_note(model: spec.Model, prompt_tokens: int, max_new_tokens: int) -> str:
    """Says why fewer than `max_new_tokens` may follow; empty where all may."""
    left = room(model, prompt_tokens, max_new_tokens)
    if left == max_new_tokens:
        return ""
    return (
        f"max_new_tokens clipped from {max_new_tokens} to {left}: "
        f"the prompt has {prompt_tokens} tokens, and the context holds {model.max_positions}"
    )


def notes(model: spec.Model, prompt_tokens: int, max_new_tokens: int) -> list[str]:
    """Returns what a person should know of a request beforehand: that it is clipped, that texts are read again."""
    said = clip_note(model, prompt_tokens, max_new_tokens), reread_note(model, prompt_tokens, max_new_tokens)
    return [note for note in said if note]


def reread_note(model: spec.Model, prompt_tokens: int, max_new_tokens: int) -> str:
    """Says that the text may grow past a length where what is cached has to be read again; empty where it may not."""
    last = prompt_tokens + max(0, room(model, prompt_tokens, max_new_tokens) - 1)  # the last token is never read
    rotaries = rotaries_by_length(model)
    if not read_again(rotaries, prompt_tokens, last):
        return ""
    growing = [r.scaling for r in rotaries if isinstance(r.scaling, DynamicNTK)]
    if growing:
        start = max(prompt_tokens, min(scaling.original_context for scaling in growing))
        return f"dynamic NTK: past {start} tokens every new token changes all angles, and reads the whole text again"
    at = min(
        r.scaling.original_context
        for r in rotaries
        if isinstance(r.scaling, LongRope) and r.scaling.original_context >= prompt_tokens
    )
    return f"past {at} tokens other rotary factors hold: a text that gets there is read once more"


@torch.inference_mode()
def _steps(
    model: Model,
    given: _Rows,
    rooms: list[int],
    requests: list[Sampling],
    eos_ids: frozenset[int],
    chunk: int | None,
    kernel: Kernel,
) -> Iterator[list[int | None]]:
    rows = [row for row, left in enumerate(rooms) if left > 0]
    if not rows:
        return
    started = given.keep(rows)
    capacity = max(len(given.begun[row]) + rooms[row] for row in rows)
    cache = Cache(
        model.spec,
        batch=len(rows),
        capacity=capacity,
        dtype=model.dtype,
        device=model.device,
        source=started.longest_source,
        chunk=chunk,
    )
    sampler = Sampler([requests[row] for row in rows], started.begun, model.spec.n_vocab, model.device)
    logits_BV = prefill(model, started.begun, cache, sources=started.sources, chunk=chunk, kernel=kernel)
    for done in range(1, max(rooms) + 1):
        require_logits(logits_BV, model, cache.lengths)
        chosen_B = sampler(logits_BV)
        tokens: list[int | None] = [None] * len(rooms)
        going = []
        for i, (row, token) in enumerate(zip(rows, chosen_B.tolist(), strict=True)):
            tokens[row] = token
            if token not in eos_ids and done < rooms[row]:
                going.append(i)
        yield tokens
        if not going:
            return
        if len(going) < len(rows):
            rows, chosen_B = [rows[i] for i in going], chosen_B[going]
            sampler.keep(going)
            cache.keep(going)
        logits_BV = model(chosen_B[:, None], cache=cache, last=True, kernel=kernel)[:, -1]


def prefill(
    model: Model,
    prompts: Sequence[Sequence[int]],
    cache: Cache,
    *,
    sources: Sequence[Sequence[int]] | None = None,
    chunk: int | None = None,
    kernel: Kernel = "fused",
) -> Tensor:
    """Fills an empty cache with the prompts, at most `chunk` tokens of each at once; returns the next logits (B, V).

    An encoder reads `sources` whole, padded on the right, before the first of them.
    Shorter prompts are padded on the left, so that all last tokens are in the last chunk. Chunks in which nothing is
    padded are passed without a mask, which for prompts of one length are all of them.
    """
    lengths = [len(prompt) for prompt in prompts]
    longest, padding = max(lengths), max(lengths) - min(lengths)
    tokens_BT = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts])
    valid_BT = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    device = model.device
    tokens_BT, valid_BT = tokens_BT.to(device), valid_BT.to(device)
    logits, read = None, {} if sources is None else padded_sources(sources, device)
    for start in range(0, longest, chunk or longest):
        part = slice(start, start + (chunk or longest))
        valid = valid_BT[:, part] if start < padding else None
        logits = model(
            tokens_BT[:, part], cache=cache, valid_BT=valid, reach=tuple(lengths), last=True, kernel=kernel, **read
        )
        read = {}
    assert logits is not None
    return logits[:, -1]


def padded_sources(sources: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """Returns what a model takes of sources: them (B, S), and which tokens are real where they differ in length."""
    lengths = torch.tensor([len(source) for source in sources])
    longest = int(lengths.max())
    source_BS = torch.tensor([[*source] + [0] * (longest - len(source)) for source in sources])
    if bool((lengths == longest).all()):
        return {"source_BS": source_BS.to(device)}
    valid_BS = torch.arange(longest) < lengths[:, None]
    return {"source_BS": source_BS.to(device), "source_valid_BS": valid_BS.to(device)}

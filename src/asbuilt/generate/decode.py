"""Prefill and decode: prompts in, one token per row and step out.

A row that stops is removed from the batch together with its cache, so that it costs nothing more. Shapes: batch B,
tokens T, vocabulary V.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from asbuilt.errors import InputError, one_of
from asbuilt.generate.draft import Chooser, Draft, Drafter, require_steady
from asbuilt.generate.finite import require_logits
from asbuilt.generate.replay import Replay, Replayed
from asbuilt.generate.sampling import Sampler, Sampling
from asbuilt.nn.audio import Sounds
from asbuilt.nn.cache import Cache, Mark, require_cache
from asbuilt.nn.image_grid import Patches
from asbuilt.nn.model import Model
from asbuilt.nn.pieces import Pieces
from asbuilt.nn.tiles import Tiles
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
    audio: Tensor | Sounds | None = None,
    images: Tensor | Patches | Pieces | Tiles | None = None,
    prefill_chunk: int | None = None,
    kernel: Kernel = "fused",
    draft: Drafter | None = None,
    kv_dtype: str | None = None,
    replay: Replay | None = None,
) -> Iterator[list[int | None]]:
    """Returns an iterator over the steps' tokens, one per prompt, None for a row that has stopped.

    If the model has an encoder of texts, it reads the prompts, and every row's text begins with `start`; one of sounds
    reads the spectrograms `audio`, one per prompt, and a row's text begins with its prompt. `images` are those of all
    prompts in order, whose placeholders the prompts hold; they are read in one prefill pass. A row stops after one
    of `eos_ids`, which is yielded, after `max_new_tokens`, or when its context is full, which is logged beforehand.
    `prefill_chunk` bounds the tokens of one prefill pass, except an encoder's. `kv_dtype` is the format of the cache,
    as `Cache` takes it; None means the compute dtype, which a draft's own caches always have. Rows that share one
    `sampling` share its seed. With `draft` several tokens of the only prompt's text are drafted, and then verified in
    one pass: greedy text is the same, except where the two largest logits are so near that passes of one and of several
    tokens round them differently; sampled text is distributed alike. With `replay` steps of decoding are
    recorded once and run again. Raises InputError for invalid input before anything runs, and at the step at which
    logits are not finite.
    """
    _require_whole("max_new_tokens", max_new_tokens, 0)
    if prefill_chunk is not None:
        _require_whole("prefill_chunk", prefill_chunk, 1)
    if kv_dtype is not None:
        require_cache(model.spec, kv_dtype, model.dtype)
    if kernel not in get_args(Kernel):
        raise InputError("unknown kernel", field="kernel", value=kernel, allowed=one_of(get_args(Kernel)))
    check_start(model.spec, start)
    for prompt in prompts:
        check_prompt(model.spec, prompt)
    check_audio(model.spec, audio, len(prompts))
    if images is not None and "images" not in model.spec.reads:
        raise InputError("the model reads no images", field="images")
    read = "source" in model.spec.reads
    rows = (
        _Rows(begun=[list(start)] * len(prompts), sources=prompts)
        if read
        else _Rows(begun=prompts, audio=audio, images=images, placed=model.spec.source_width is None)
    )
    requests = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
    if len(requests) != len(prompts):
        raise InputError(
            "there must be one per prompt",
            field="sampling",
            value=len(requests),
            allowed=f"{len(prompts)}, the number of prompts",
        )
    rooms = [room(model.spec, len(begun), max_new_tokens) for begun in rows.begun]
    placed = images is not None or (audio is not None and rows.placed)
    if placed and not all(left > 0 for left in rooms) and any(left > 0 for left in rooms):
        field = "audio" if images is None else "images"
        raise InputError(f"{field} beside prompts that fill the context", field=field, fix="shorten the prompts")
    for note in dict.fromkeys(n for begun in rows.begun for n in notes(model.spec, len(begun), max_new_tokens)):
        log.warning(note)
    if replay is not None:
        replay.check(model.spec, model.device, drafts=draft is not None)
        if model.native is not None:
            raise InputError("the native kernels compute a step in one call", field=replay.field, fix="leave it out")
    if draft is not None:
        if not draft.sees and (images is not None or audio is not None):
            given = "audio" if images is None else "images"
            raise InputError(f"only prompt lookup drafts beside {given}", field="draft", allowed="prompt")
        check_draft(model.spec, draft, len(prompts), len(rows.begun[0]) if prompts else 0, max_new_tokens)
        return _drafted(model, rows, rooms[0], requests[0], frozenset(eos_ids), prefill_chunk, kernel, kv_dtype, draft)
    return _steps(model, rows, rooms, requests, frozenset(eos_ids), prefill_chunk, kernel, kv_dtype, replay)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The first tokens of the rows' texts, and the encoder's input for each row, if there is an encoder."""

    begun: list[list[int]]
    sources: list[list[int]] | None = None
    audio: Tensor | Sounds | None = None
    images: Tensor | Patches | Pieces | Tiles | None = None
    placed: bool = False  # whether sounds stand in the texts, in order, as images do

    def keep(self, rows: list[int]) -> _Rows:
        """Returns only these rows."""
        sources = None if self.sources is None else [self.sources[row] for row in rows]
        audio = self.audio[rows] if isinstance(self.audio, Tensor) and not self.placed else self.audio
        begun = [self.begun[row] for row in rows]
        return _Rows(begun=begun, sources=sources, audio=audio, images=self.images, placed=self.placed)

    @property
    def longest_source(self) -> int:
        """Tokens of the longest source; 0 without sources."""
        return max(map(len, self.sources or [[]]))


def check_prompt(model: spec.Model, prompt: Sequence[int]) -> None:
    """Raises InputError unless the prompt is a list of token ids of the model that fits in its context.

    If the model has an encoder, the encoder reads the prompt, so its context counts. Raises InputError too for a model
    that does not generate.
    """
    if not model.decodes or model.gives == "stream":
        why = "its attention is bidirectional" if not model.decodes else "it has no head"
        reads = "" if "tokens" not in model.reads else "`asbuilt embed` computes sentence similarity with such a model"
        raise InputError(f"does not generate: {why}", field="MODEL", value=model.name, fix=reads)
    require_text(model)
    _check_tokens(model.prompted, prompt, "prompt", "there is nothing to continue")


def check_start(model: spec.Model, start: Sequence[int]) -> None:
    """Raises InputError unless `start` is given exactly if the model has an encoder."""
    if "source" in model.reads:
        _check_tokens(model, start, "start", "a decoder's text begins with at least one token")
    elif len(start) > 0:
        raise InputError(
            "the model has no encoder, so its text begins with the prompt", field="start", value=list(start)
        )


def check_audio(model: spec.Model, audio: Tensor | Sounds | None, rows: int) -> None:
    """Raises InputError for spectrograms given to a model that does not hear, or missing or too few to an encoder.

    Texts in which sounds take the places of tokens may have any number of them.
    """
    if "audio" in model.reads and model.source_width is None:
        return
    if ("audio" in model.reads) != (audio is not None):
        heard = "missing: the model hears a sound" if audio is None else "the model hears no sound"
        raise InputError(heard, field="audio", fix="give one spectrogram per prompt" if audio is None else "")
    if isinstance(audio, Sounds):
        alike = "sounds of one length, one spectrogram per prompt"
        raise InputError("sounds of several lengths, which an encoder does not read", field="audio", allowed=alike)
    if audio is not None and len(audio) != rows:
        raise InputError(
            "there must be one per prompt", field="audio", value=len(audio), allowed=f"{rows} spectrograms"
        )


def _check_tokens(stack: spec.Model, tokens: Sequence[int], field: str, why: str) -> None:
    n_rows = stack.n_rows
    if len(tokens) == 0:
        raise InputError(f"empty: {why}", field=field, allowed="at least one token")
    if len(tokens) > stack.max_positions:
        raise InputError(
            "longer than the context",
            field=field,
            value=len(tokens),
            allowed=f"at most max_positions = {stack.max_positions} tokens",
            fix="shorten it",
        )
    for token in tokens:
        if type(token) is not int or not 0 <= token < n_rows:
            raise InputError(
                "not a token id of this model", field=field, value=token, allowed=f"a whole number below {n_rows}"
            )


def require_text(model: spec.Model) -> None:
    """Raises InputError for a model that reads only images, or does not predict the next token."""
    if model.gives != "logits":
        made = "labels" if model.gives == "labels" else "vectors"
        raise InputError(
            f"predicts {made}, not the next token",
            field="MODEL",
            value=model.name,
            allowed="a model with a language model's head",
        )


def _require_whole(field: str, value: object, low: int) -> None:
    if type(value) is not int or value < low:
        raise InputError(field=field, value=value, allowed=f"a whole number of at least {low}")


def room(model: spec.Model, prompt_tokens: int, max_new_tokens: int) -> int:
    """Returns how many tokens may follow: `max_new_tokens`, or the rest of the context if that is less."""
    return min(max_new_tokens, model.max_positions - prompt_tokens)


def clip_note(model: spec.Model, prompt_tokens: int, max_new_tokens: int) -> str:
    """Returns why fewer than `max_new_tokens` may follow; empty if all may."""
    left = room(model, prompt_tokens, max_new_tokens)
    if left == max_new_tokens:
        return ""
    return (
        f"max_new_tokens clipped from {max_new_tokens} to {left}: "
        f"the prompt has {prompt_tokens} tokens, the context {model.max_positions}"
    )


def notes(model: spec.Model, prompt_tokens: int, max_new_tokens: int) -> list[str]:
    """Returns notes on a request for the user: that it is clipped, or that text will be processed again."""
    said = clip_note(model, prompt_tokens, max_new_tokens), reread_note(model, prompt_tokens, max_new_tokens)
    return [note for note in said if note]


def reread_note(model: spec.Model, prompt_tokens: int, max_new_tokens: int) -> str:
    """Returns a note if the text may outgrow a length at which the cache must be recomputed; empty otherwise."""
    last = prompt_tokens + max(0, room(model, prompt_tokens, max_new_tokens) - 1)  # the last token is never fed back
    rotaries = rotaries_by_length(model)
    if not read_again(rotaries, prompt_tokens, last):
        return ""
    growing = [r.scaling for r in rotaries if isinstance(r.scaling, DynamicNTK)]
    if growing:
        start = max(prompt_tokens, min(scaling.original_context for scaling in growing))
        return f"dynamic NTK: beyond {start} tokens every new token changes all RoPE angles: the text is recomputed"
    at = min(
        r.scaling.original_context
        for r in rotaries
        if isinstance(r.scaling, LongRope) and r.scaling.original_context >= prompt_tokens
    )
    return f"beyond {at} tokens other RoPE factors apply: a text that gets there is recomputed once"


def check_draft(model: spec.Model, draft: Drafter, rows: int, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raises InputError unless `draft` can draft for this request."""
    if rows != 1:
        raise InputError("drafts are made for one prompt at a time", field="draft", value=f"{rows} prompts")
    require_steady(model)
    draft.check(model)
    for one in (model, *draft.models):
        said = reread_note(one, prompt_tokens, max_new_tokens)
        if said:
            raise InputError(
                f"not where the cache is recomputed: {said}", field="draft", fix="fewer new tokens, or no draft"
            )


@torch.inference_mode()
def _drafted(
    model: Model,
    given: _Rows,
    left: int,
    request: Sampling,
    eos_ids: frozenset[int],
    chunk: int | None,
    kernel: Kernel,
    kv: str | None,
    draft: Drafter,
) -> Iterator[list[int | None]]:
    """Yields one token at a time; a pass reads the last one and the drafts after it, and its logits verify them.

    Where a cache can only be rewound as a whole, the tokens accepted since are read again beside the next drafts, and
    once they are more than these, without drafts.
    """
    if left <= 0:
        return
    text, capacity = list(given.begun[0]), len(given.begun[0]) + left
    cache = _cache(model, 1, capacity, given.longest_source, chunk, kv)
    draft.begin(model, capacity, chunk=chunk, kernel=kernel)
    chooser, drafts = Chooser(request, len(text)), list[Draft]()
    mark: Mark | None = None
    with draft.watching(model):
        logits_TV = prefill(
            model,
            given.begun,
            cache,
            sources=given.sources,
            audio=given.audio,
            images=given.images,
            chunk=chunk,
            kernel=kernel,
        )
        while True:
            require_logits(logits_TV, model, cache.lengths * len(logits_TV))
            new = chooser.verified(logits_TV, drafts, text)
            if mark is not None and len(new) <= len(drafts):
                cache.rewind(mark, len(text) + len(new) - 1)
            draft.count_pass(len(drafts), len(new) - 1)
            for token in new:
                text.append(token)
                yield [token]
                left -= 1
                if left == 0 or token in eos_ids:
                    return
            unread = text[cache.lengths[0] :]
            count = min(draft.per_step, left - 1) if len(unread) <= 1 + draft.per_step else 0
            drafts = draft.propose(text, count, chooser) if count else []
            tokens_1T = torch.tensor([[*unread, *(one.token for one in drafts)]], device=model.device)
            mark = cache.mark(tokens_1T.shape[1]) if drafts else None
            logits_TV = model(tokens_1T, cache=cache, last=not drafts, kernel=kernel)[0, -len(drafts) - 1 :]


@torch.inference_mode()
def _steps(
    model: Model,
    given: _Rows,
    rooms: list[int],
    requests: list[Sampling],
    eos_ids: frozenset[int],
    chunk: int | None,
    kernel: Kernel,
    kv: str | None,
    replay: Replay | None,
) -> Iterator[list[int | None]]:
    rows = [row for row, left in enumerate(rooms) if left > 0]
    if not rows:
        return
    started = given.keep(rows)
    capacity = max(len(given.begun[row]) + rooms[row] for row in rows)
    cache = _cache(model, len(rows), capacity, started.longest_source, chunk, kv)
    sampler = Sampler([requests[row] for row in rows], started.begun, model.spec.n_vocab, model.device)
    logits_BV = prefill(
        model,
        started.begun,
        cache,
        sources=started.sources,
        audio=started.audio,
        images=started.images,
        chunk=chunk,
        kernel=kernel,
    )
    replayed = None
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
            replayed = None  # its tensors have other rows
        if replay is None:
            logits_BV = model(chosen_B[:, None], cache=cache, last=True, kernel=kernel)[:, -1]
            continue
        replayed = replayed or Replayed(model, cache, replay.record(), kernel)
        logits_BV = replayed(chosen_B[:, None])


def _cache(model: Model, batch: int, capacity: int, source: int, chunk: int | None, kv: str | None) -> Cache:
    return Cache(
        model.spec,
        batch=batch,
        capacity=capacity,
        dtype=model.dtype,
        device=model.device,
        source=source,
        chunk=chunk,
        kv=kv,
    )


def prefill(
    model: Model,
    prompts: Sequence[Sequence[int]],
    cache: Cache,
    *,
    sources: Sequence[Sequence[int]] | None = None,
    audio: Tensor | Sounds | None = None,
    images: Tensor | Patches | Pieces | Tiles | None = None,
    chunk: int | None = None,
    kernel: Kernel = "fused",
) -> Tensor:
    """Fills an empty cache with the prompts, at most `chunk` tokens of each at a time; returns the next logits (B, V).

    An encoder first reads all of `sources`, padded on the right, or `audio`. Shorter prompts are padded on the left, so
    that all last tokens are in the last chunk. Chunks without padding need no mask; for prompts of equal length that is
    every chunk. With `images`, or sounds within the prompts, there is one chunk.
    """
    lengths = [len(prompt) for prompt in prompts]
    longest, padding = max(lengths), max(lengths) - min(lengths)
    tokens_BT = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts])
    valid_BT = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    device = model.device
    tokens_BT, valid_BT = tokens_BT.to(device), valid_BT.to(device)
    logits, read = None, {} if sources is None else padded_sources(sources, device)
    read |= {} if audio is None else {"audio": audio.to(device)}
    if audio is not None and model.spec.source_width is None:
        chunk = None
    if images is not None:
        read, chunk = read | {"images": images.to(device)}, None
    for start in range(0, longest, chunk or longest):
        part = slice(start, start + (chunk or longest))
        valid = valid_BT[:, part] if start < padding else None
        logits = model(
            tokens_BT[:, part], cache=cache, valid_BT=valid, reach=tuple(lengths), last=True, kernel=kernel, **read
        )
        read = {}
    assert logits is not None
    return logits[:, -1]


@torch.inference_mode()
def detect_language(model: Model, start: int, languages: Sequence[int], audio: Tensor) -> int:
    """Returns the token of the language that a speech model hears: the most likely one after its start token."""
    ids_11 = torch.tensor([[start]], device=model.device)
    logits_V = model(ids_11, audio=audio.to(model.device), last=True)[0, -1]
    require_logits(logits_V[None], model, (1,))
    return languages[int(logits_V[list(languages)].argmax())]


def padded_sources(sources: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """Returns a model's arguments for sources: the tokens (B, S), and which are valid if the lengths differ."""
    lengths = torch.tensor([len(source) for source in sources])
    longest = int(lengths.max())
    source_BS = torch.tensor([[*source] + [0] * (longest - len(source)) for source in sources])
    if bool((lengths == longest).all()):
        return {"source_BS": source_BS.to(device)}
    valid_BS = torch.arange(longest) < lengths[:, None]
    return {"source_BS": source_BS.to(device), "source_valid_BS": valid_BS.to(device)}

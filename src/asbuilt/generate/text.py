"""Streamed text: one request's tokens decoded, and held back while they may begin a stop string."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.generate.decode import generate, notes
from asbuilt.generate.draft import Drafter
from asbuilt.generate.replay import Replay
from asbuilt.generate.sampling import Sampling, Times
from asbuilt.nn.audio import Sounds
from asbuilt.nn.image_grid import Patches
from asbuilt.nn.model import Model
from asbuilt.nn.pieces import Pieces
from asbuilt.nn.tiles import Tiles
from asbuilt.spec.part import Kernel
from asbuilt.text.chat import encode_chat, turn_ends
from asbuilt.text.spoken import Segments
from asbuilt.text.tokenizer import Tokenizer

FinishReason = Literal["eos", "stop", "length"]


class StopFilter:
    """Passes text through up to the first complete stop string, which is never shown, not even in part.

    Text that could begin a stop string is held back, so the result does not depend on how the text arrives.
    Raises InputError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise InputError(field="stop", value=stop, allowed="strings that are not empty")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Returns the text that may be shown now; empty once stopped."""
        if self.stopped:
            return ""
        text = self._held + text
        # the stop string that ends first, not the one that begins first: it is complete before the other one is
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        safe = len(text) - self._beginning(text)
        self._held = text[safe:]
        return text[:safe]

    def _beginning(self, text: str) -> int:
        """Returns how many characters at the end of `text` may begin a stop string."""
        longest = max(map(len, self._stops), default=0)
        sizes = range(min(longest - 1, len(text)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)

    def finish(self) -> str:
        """Returns the text held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held


class Completion(Iterator[str]):
    """Iterates over pieces of text; afterwards `text`, `tokens` and `finish_reason` hold the result.

    `tokens` are all generated tokens, including an end token and those of a stop string; `note` tells why fewer tokens
    were allowed than requested, or that the text may be recomputed, and is empty otherwise. `draft` is what drafted,
    with its counts. With `times` the text is a line for each segment, which `segments.found` holds too. If iteration is
    abandoned, `finish_reason` stays None.
    """

    def __init__(
        self,
        prompt: list[int],
        steps: Iterator[list[int | None]],
        tokenizer: Tokenizer,
        stop: StopFilter,
        eos_ids: Sequence[int],
        note: str = "",
        draft: Drafter | None = None,
        times: Times | None = None,
    ) -> None:
        self.prompt, self.note, self.draft = prompt, note, draft
        self.segments = None if times is None else Segments(times.seconds, tokenizer.decode)
        self.text = ""
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._pieces = self._run(steps, tokenizer, stop, frozenset(eos_ids))

    def __next__(self) -> str:
        """Returns the next piece of text, which is never empty."""
        piece = next(self._pieces)
        self.text += piece
        return piece

    def _run(
        self, steps: Iterator[list[int | None]], tokenizer: Tokenizer, stop: StopFilter, eos_ids: frozenset[int]
    ) -> Iterator[str]:
        stream, reason = tokenizer.stream(), "length"
        for (token,) in steps:
            assert token is not None  # a single row: its last step is the last step
            self.tokens.append(token)
            if token in eos_ids:
                reason = "eos"
                break
            said = stream.push(token) if self.segments is None else self.segments.push(token)
            if piece := stop.push(said):
                yield piece
            if stop.stopped:
                break
        said = stream.finish() if self.segments is None else self.segments.finish()
        if rest := stop.push(said) + stop.finish():
            yield rest
        self.finish_reason = "stop" if stop.stopped else reason


def complete(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str | list[int] | list[dict[str, Any]],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
    stop: Sequence[str] = (),
    eos_ids: Sequence[int] | None = None,
    start: Sequence[int] = (),
    audio: Tensor | Sounds | None = None,
    images: Tensor | Patches | Pieces | Tiles | None = None,
    prefill_chunk: int | None = None,
    kernel: Kernel = "fused",
    draft: Drafter | None = None,
    kv_dtype: str | None = None,
    replay: Replay | None = None,
) -> Completion:
    """Returns the model's completion of a text, token ids or chat messages, as an iterator over pieces of text.

    It ends at one of `eos_ids` (by default the tokenizer's, and in a chat the token that the template writes after an
    answer), before the first of the `stop` strings, or at `max_new_tokens`. The output of a model with an encoder of
    texts begins after `start`; one that hears reads the spectrogram `audio`, one that sees the `images` whose
    placeholders the prompt holds; `draft` drafts; `kv_dtype` is the format of the cache; `replay` says how decode
    steps are recorded. Raises InputError, before anything runs, as `generate`, `StopFilter` and `encode_chat` do.
    """
    read = "source" in model.spec.reads
    ids = prompt_ids(tokenizer, prompt)
    if eos_ids is None:
        eos_ids = (*tokenizer.eos_ids, *(turn_ends(tokenizer) if is_chat(prompt) else ()))
    stop_filter = StopFilter((stop,) if isinstance(stop, str) else stop)
    steps = generate(
        model,
        [ids],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos_ids=eos_ids,
        start=start,
        audio=audio,
        images=images,
        prefill_chunk=prefill_chunk,
        kernel=kernel,
        draft=draft,
        kv_dtype=kv_dtype,
        replay=replay,
    )
    note = "; ".join(notes(model.spec, len(start if read else ids), max_new_tokens))
    return Completion(ids, steps, tokenizer, stop_filter, eos_ids, note, draft, sampling.times)


def prompt_ids(tokenizer: Tokenizer, prompt: str | list[int] | list[dict[str, Any]]) -> list[int]:
    """Returns the ids of a prompt: a text with the tokenizer's special tokens (bos), or a chat in its template."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, wrap=True)
    if is_chat(prompt):
        return encode_chat(tokenizer, cast(list[dict[str, Any]], prompt))
    return cast(list[int], prompt)  # `generate` refuses whatever in it is not a token id


def is_chat(prompt: str | list[int] | list[dict[str, Any]]) -> bool:
    """Returns whether the prompt is a list of messages."""
    return not isinstance(prompt, str) and len(prompt) > 0 and all(isinstance(item, dict) for item in prompt)

"""A chat whose history stays in the cache: of each question, only the tokens that are new are processed.

The whole chat is rendered by the model's template for every question, and compared with the text that the cache holds:
what both begin with is kept, the rest is dropped from the cache and the new tokens are prefilled. A template may change
what it wrote before (it may leave out the reasoning of earlier answers); then more than the question is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from asbuilt.errors import InputError
from asbuilt.generate.decode import check_prompt
from asbuilt.generate.finite import require_logits
from asbuilt.generate.sampling import Sampler, Sampling
from asbuilt.generate.seeing import marked, stands_for
from asbuilt.generate.text import StopFilter
from asbuilt.nn.audio import Sounds
from asbuilt.nn.cache import Cache, Mark, require_cache
from asbuilt.nn.image_grid import Patches
from asbuilt.nn.model import Model
from asbuilt.nn.pieces import Pieces
from asbuilt.nn.tiles import Tiles
from asbuilt.spec import VisionLanguageModel
from asbuilt.spec import model as spec
from asbuilt.spec.part import Kernel
from asbuilt.text.chat import encode_chat, turn_ends
from asbuilt.text.tokenizer import Tokenizer

Ended = Literal["eos", "stop", "length", "context", "stopped"]
Images: TypeAlias = Tensor | Patches | Pieces | Tiles
Audio: TypeAlias = Tensor | Sounds
CONTEXT = 8192  # tokens of a chat unless it says otherwise, or the model's own context, if that is less
CHUNK = 512  # tokens of one prefill pass, after which a chat can be stopped
ROLES = ("system", "user", "assistant")
NO_TEMPLATE = "`asbuilt generate MODEL PROMPT` continues plain text; a chat needs a chat_template in the model's files"


class ContextFull(InputError):
    """The chat with its next question does not fit in the context."""


@dataclass(kw_only=True)
class Message:
    """One message of a chat; images and sounds, files or what the model reads, stand before its text."""

    role: str
    content: str
    images: tuple[Any, ...] = ()
    audio: tuple[Any, ...] = ()
    taken: dict[str, list[list[int]]] = field(default_factory=dict)  # tokens for each image and sound, once known

    def said(self) -> dict[str, Any]:
        """Returns the message as templates read it."""
        beside = [{"type": "image"} for _ in self.images] + [{"type": "audio"} for _ in self.audio]
        content = [*beside, {"type": "text", "text": self.content}] if beside else self.content
        return {"role": self.role, "content": content}

    def document(self) -> dict[str, Any]:
        """Returns the message as plain data; images and sounds must be files."""
        files = {name: [str(one) for one in getattr(self, name)] for name in ("images", "audio")}
        return {"role": self.role, "content": self.content} | {name: given for name, given in files.items() if given}


@dataclass(frozen=True)
class _Asked:
    """A question whose tokens are known: `keep` of them are in the cache."""

    message: Message
    ids: list[int]
    keep: int
    media: dict[str, Images | Audio]


class Answer(Iterator[str]):
    """Iterates over pieces of an answer; `text`, `tokens` and `finish_reason` hold the result so far.

    Of the prompt `kept` tokens were in the cache and `read` were prefilled, in `prefill_seconds`; the tokens took
    `seconds`. It ends at an end token ("eos") or `stop` text, after `max_new_tokens` ("length"), where the context is
    full ("context"), or where `Chat.stop` was called ("stopped"). A closed answer stays in the history as far as it
    came.
    """

    def __init__(self, pieces: Callable[[Answer], Iterator[str]], kept: int, read: int) -> None:
        self.kept, self.read = kept, read
        self.text = ""
        self.tokens: list[int] = []
        self.finish_reason: Ended | None = None
        self.prefill_seconds = self.seconds = 0.0
        self._pieces = pieces(self)

    def __next__(self) -> str:
        """Returns the next piece of text, which is never empty."""
        return next(self._pieces)

    @property
    def speed(self) -> float | None:
        """Tokens per second after the first one; None for a single token."""
        return (len(self.tokens) - 1) / self.seconds if len(self.tokens) > 1 else None

    def close(self) -> None:
        """Ends the answer here."""
        cast(Any, self._pieces).close()


class Chat:
    """A model in conversation: `send` answers, `history` is what was said, `reset` forgets it.

    `context` bounds the tokens of the whole chat: the cache is allocated for it, in the format `kv_dtype`. `see` and
    `hear` make what the model reads of images and sounds. Raises InputError for a model without a chat template, and as
    `generate` does.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        context: int | None = None,
        max_new_tokens: int | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008  frozen
        stop: Sequence[str] = (),
        eos_ids: Sequence[int] = (),
        chunk: int = CHUNK,
        kernel: Kernel = "fused",
        kv_dtype: str | None = None,
        see: Callable[[Sequence[Any]], Images] | None = None,
        hear: Callable[[Sequence[Any]], Audio] | None = None,
    ) -> None:
        require_chat(model.spec, tokenizer)
        StopFilter(stop)
        self.model, self.tokenizer, self.stops = model, tokenizer, tuple(stop)
        self.context = chat_context(model.spec, context)
        self.history: list[Message] = []
        self._system: str | None = None
        self._most, self._chunk, self._kernel, self._kv = max_new_tokens, chunk, kernel, kv_dtype
        if kv_dtype is not None:
            require_cache(model.spec, kv_dtype, model.dtype)
        self._see, self._hear = see, hear
        self._marks: dict[str, int] = {}  # tokens that a chat template writes for an image, if not the placeholder
        # the tokens that stand for images and sounds are no text
        self.sampling = replace(sampling, suppress=(*sampling.suppress, *self._placeholders().values()))
        self._ends = frozenset((*tokenizer.eos_ids, *eos_ids, *turn_ends(tokenizer)))
        self._stopping = False
        self._forget()
        if system is not None:
            self.system = system

    def _forget(self) -> None:
        """Drops the cache: the next question is read with everything before it."""
        self._cache: Cache | None = None
        self._ids: list[int] = []  # the text in the cache
        self._answers: list[tuple[int, list[int]]] = []  # where answers begin in it, and their tokens
        self._places: list[int] = []  # one past the last placeholder of each image and sound in it
        self._mark: Mark | None = None

    @property
    def system(self) -> str | None:
        """The system message; setting it raises InputError if the template takes none."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        if text is not None:
            probe = [{"role": "system", "content": text}, {"role": "user", "content": "."}]
            encode_chat(self.tokenizer, probe)
        self._system = text

    @property
    def used(self) -> int:
        """Tokens of the chat so far."""
        return len(self._ids)

    @property
    def left(self) -> int:
        """Tokens that are left in the context."""
        return self.context - len(self._ids)

    def reset(self) -> None:
        """Forgets what was said, but for the system message."""
        self.history.clear()
        self._forget()

    def stop(self) -> None:
        """Ends the current answer after the pass that runs; may be called from a signal handler."""
        self._stopping = True

    def restore(self, messages: Sequence[Message]) -> None:
        """Replaces the chat; the next question is read with all of it. Raises InputError if it cannot be rendered."""
        system, *rest = [None, *messages] if not messages or messages[0].role != "system" else [*messages]
        for message in rest:
            self._measure(message)
        before = self.history, self._system
        self.history, self._system = [*rest], system and system.content
        try:
            self._tokens([*self.history, Message(role="user", content=".")])
        except InputError:
            self.history, self._system = before
            raise
        self._forget()

    def send(self, text: str, *, images: Sequence[Any] = (), audio: Sequence[Any] = ()) -> Answer:
        """Returns the answer to a question, as an iterator over pieces of text; nothing is said before it is begun.

        Raises InputError, before anything runs, for a question that the context does not hold (`ContextFull`), and for
        images and sounds that the model does not read.
        """
        self._stopping = False
        message = Message(role="user", content=text, images=tuple(images), audio=tuple(audio))
        self._measure(message)
        ids = self._tokens([*self.history, message])
        if len(ids) >= self.context:
            raise ContextFull(
                "the context is full",
                field="chat",
                value=f"{len(ids):,} tokens",
                allowed=f"fewer than {self.context:,}",
                fix="reset the chat, ask less, or begin it with a larger context"
                if self.context < self.model.spec.max_positions
                else "reset the chat, or ask less: the model's context is no larger",
            )
        check_prompt(self.model.spec, ids)
        asked = self._prepared(message, ids)
        return Answer(lambda answer: self._run(answer, asked), asked.keep, len(ids) - asked.keep)

    def check(self, *, images: Sequence[Any] = (), audio: Sequence[Any] = ()) -> None:
        """Raises InputError for images and sounds that cannot be sent."""
        self._measure(Message(role="user", content="", images=tuple(images), audio=tuple(audio)))

    def _measure(self, message: Message) -> None:
        """Notes which tokens stand for each image and sound."""
        for name, make in (("images", self._see), ("audio", self._hear)):
            given = getattr(message, name)
            if given and make is None:
                what = "images" if name == "images" else "sound"
                raise InputError(f"the model reads no {what}", field=name, value=len(given), fix="send text alone")
            if given and make is not None and name not in message.taken:
                made = make(given)
                message.taken[name] = stands_for(self.model.spec, made, self._word, sounds=name == "audio")
                mark = marked(made, self._word)
                if mark is not None:
                    self._marks[name] = mark

    def _word(self, word: str) -> list[int]:
        return self.tokenizer.encode(word, special=True)

    def _tokens(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids of the whole chat; answers that the cache holds keep the tokens that they were made of."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        ids = encode_chat(self.tokenizer, [*system, *(message.said() for message in messages)])
        for name, place in self._placeholders().items():
            place = self._marks.get(name, place)
            ids = _expanded(ids, place, [one for message in messages for one in message.taken.get(name, ())], name)
        for start, answer in self._answers:
            if ids[:start] != self._ids[:start]:
                break
            rest = (at for at in range(start, len(ids)) if self.tokenizer.is_special(ids[at]))
            end = next(rest, len(ids))
            if self.tokenizer.decode(ids[start:end]) != self.tokenizer.decode(answer):
                break
            ids = [*ids[:start], *answer, *ids[end:]]
        return ids

    def _placeholders(self) -> dict[str, int]:
        made, described = {}, self.model.spec
        if isinstance(described, VisionLanguageModel):
            made["images"] = described.vision.placeholder
        if described.heard is not None:
            made["audio"] = described.heard.placeholder
        return made

    def _prepared(self, message: Message, ids: list[int]) -> _Asked:
        """Returns the question with what of it is in the cache, after dropping the rest from the cache."""
        everything = [*self.history, message]
        spans = {
            name: _spans(ids, place, [one for said in everything for one in said.taken.get(name, ())])
            for name, place in self._placeholders().items()
        }
        keep = min(_common(ids, self._ids), len(ids) - 1)
        if any(at > keep for at in self._places):
            keep = 0  # what an image or a sound did to the coordinates of later tokens cannot be taken back
        begun = {at for found in spans.values() for at in found if at[1] > keep}
        vision = self.model.spec.vision if isinstance(self.model.spec, VisionLanguageModel) else None
        if begun and vision is not None and (vision.prefix or vision.crosses):
            keep = 0  # such a model sees with its first pass
        keep = self._rewound(keep)
        media: dict[str, Images | Audio] = {}
        for name, make in (("images", self._see), ("audio", self._hear)):
            files = [one for said in everything for one in getattr(said, name)]
            new = [one for one, at in zip(files, spans.get(name, ()), strict=bool(files)) if at[1] > keep]
            if new and make is not None:
                media[name] = make(new)
        return _Asked(message, ids, keep, media)

    @torch.inference_mode()
    def _rewound(self, keep: int) -> int:
        """Drops the tokens after `keep` from the cache, or more where it cannot; returns how many it keeps."""
        cache = self._cache
        if cache is None or keep == 0:
            self._forget()
            return 0
        if keep < len(self._ids):
            if all(layer.rings == [] for layer in cache.layers.values()):
                cache.lengths = (keep,)
            elif self._mark is not None and self._mark.length <= keep:
                cache.rewind(self._mark, self._mark.length)
                keep = self._mark.length
            else:
                self._forget()
                return 0
            self._ids = self._ids[:keep]
            self._answers = [(start, said) for start, said in self._answers if start + len(said) <= keep]
        return keep

    @torch.inference_mode()
    def _run(self, answer: Answer, asked: _Asked) -> Iterator[str]:
        stream, stop = self.tokenizer.stream(), StopFilter(self.stops)
        self.history.append(asked.message)
        whole = False
        try:
            for token in self._chosen(answer, asked):
                if token in self._ends:
                    answer.finish_reason = "eos"
                    break
                if piece := stop.push(stream.push(token)):
                    answer.text += piece
                    yield piece
                if stop.stopped:
                    answer.finish_reason = "stop"
                    break
            if rest := stop.push(stream.finish()) + stop.finish():
                answer.text += rest
                yield rest
            whole = True
        finally:
            if not whole and answer.finish_reason is None:
                answer.finish_reason = "stopped"
            if answer.tokens:
                self.history.append(Message(role="assistant", content=answer.text))
            else:
                self.history.pop()
                if asked.media:  # another image may stand in the same place
                    self._forget()

    def _chosen(self, answer: Answer, asked: _Asked) -> Iterator[int]:
        """Yields the answer's tokens; each is read before the next is chosen, but for the last."""
        started = time.perf_counter()
        logits_BV = self._prefill(asked)
        answer.prefill_seconds = time.perf_counter() - started
        if logits_BV is None:
            answer.finish_reason = "stopped"
            return
        cache, said = self._cache, list[int]()
        assert cache is not None
        if not all(layer.rings == [] for layer in cache.layers.values()):
            self._mark = cache.mark(cache.capacity)
        self._answers.append((len(asked.ids), said))
        seed = (self.sampling.seed + len(self.history) - 1) % 2**63
        sampler = Sampler([replace(self.sampling, seed=seed)], [asked.ids], self.model.spec.n_vocab, self.model.device)
        started = time.perf_counter()
        while True:
            require_logits(logits_BV, self.model, cache.lengths)
            (token,) = sampler(logits_BV).tolist()
            answer.tokens.append(token)
            answer.seconds = time.perf_counter() - started
            if token not in self._ends:
                said.append(token)
            yield token
            answer.finish_reason = self._reason(len(answer.tokens))
            if answer.finish_reason is not None:
                return
            logits_BV = self._pass([token], len(self._ids) + 1, {})

    def _reason(self, tokens: int) -> Ended | None:
        """Returns why an answer of so many tokens ends here, before the last one is read."""
        if self._stopping:
            return "stopped"
        if self._most is not None and tokens >= self._most:
            return "length"
        return "context" if self.left <= 1 else None

    def _prefill(self, asked: _Asked) -> Tensor | None:
        """Returns the logits (B, V) after the question, None if it was stopped before they were there."""
        if self._cache is None:
            model = self.model
            self._cache = Cache(
                model.spec,
                batch=1,
                capacity=self.context,
                dtype=model.dtype,
                device=model.device,
                chunk=self._chunk,
                kv=self._kv,
            )
        device = self.model.device
        media = {name: given.to(device) for name, given in asked.media.items()}
        new, logits_BV = asked.ids[asked.keep :], None
        for start in range(0, len(new), len(new) if media else self._chunk):
            if self._stopping:
                return None
            part = new[start : None if media else start + self._chunk]
            logits_BV = self._pass(part, len(asked.ids), media)
        self._places = [
            at[1]
            for name, place in self._placeholders().items()
            for at in _spans(asked.ids, place, [one for said in self.history for one in said.taken.get(name, ())])
        ]
        return logits_BV

    def _pass(self, tokens: list[int], reach: int, media: dict[str, Any]) -> Tensor:
        """Returns the logits (B, V) after more tokens of the chat."""
        cache = self._cache
        assert cache is not None
        try:
            tokens_1T = torch.tensor([tokens], device=self.model.device)
            logits_BTV = self.model(tokens_1T, cache=cache, reach=(reach,), last=True, kernel=self._kernel, **media)
        except BaseException:  # layers may have stored some of the tokens, and others not
            self._forget()
            raise
        self._ids += tokens
        return logits_BTV[:, -1]


def require_chat(model: spec.Model, tokenizer: Tokenizer) -> None:
    """Raises InputError for a model that cannot chat, naming what it can do."""
    if not model.generates:
        check_prompt(model, [0])
    if "source" in model.reads or (model.source_width is not None and "audio" in model.reads):
        fix = "`asbuilt generate MODEL PROMPT` runs it"
        raise InputError("an encoder reads its prompt, so it does not chat", field="MODEL", value=model.name, fix=fix)
    if tokenizer.chat_template is None:
        raise InputError("this model has no chat template", field="MODEL", value=model.name, fix=NO_TEMPLATE)


def chat_context(model: spec.Model, asked: int | None) -> int:
    """Returns the tokens that a chat may have; raises InputError for more than the model's context."""
    most = model.max_positions
    if asked is None:
        return min(CONTEXT, most)
    if type(asked) is not int or not 2 <= asked <= most:
        raise InputError(field="context", value=asked, allowed=f"from 2 to {most}, the context of {model.name}")
    return asked


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many tokens both texts begin with."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _expanded(ids: list[int], place: int, stands: list[list[int]], name: str) -> list[int]:
    """Returns the ids with each placeholder replaced by what stands for its image or sound."""
    held = ids.count(place)
    if held != len(stands):
        what = "the chat template has no place for them" if not held else "the chat template writes other placeholders"
        raise InputError(what, field=name, value=held, allowed=f"one placeholder for each, {len(stands)}")
    each = iter(stands)
    return [one for token in ids for one in (next(each) if token == place else [token])]


def _spans(ids: Sequence[int], place: int, stands: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Returns where the placeholders of each image or sound begin and end."""
    places, found = [at for at, token in enumerate(ids) if token == place], []
    for n in (one.count(place) for one in stands):
        found.append((places[0], places[n - 1] + 1))
        places = places[n:]
    return found

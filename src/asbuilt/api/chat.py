"""`asbuilt.api.chat.open_chat(model)`: a model's weights, loaded, in conversation."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asbuilt.api.generate import required_tokenizer, sampled
from asbuilt.api.running import NARROWER, Request, Running, contents_of, ready
from asbuilt.checkpoint.load import headers
from asbuilt.errors import InputError
from asbuilt.files import read_object
from asbuilt.generate import compute as computing
from asbuilt.generate.chat import CHUNK, ROLES, Chat, Message, chat_context, require_chat
from asbuilt.generate.compute import Compute
from asbuilt.generate.sampling import Sampling
from asbuilt.nn.audio import Sounds
from asbuilt.nn.cache import require_cache

if TYPE_CHECKING:
    from asbuilt.checkpoint.source import Source
    from asbuilt.nn.image_grid import Patches
    from asbuilt.nn.pieces import Pieces
    from asbuilt.nn.tiles import Tiles
    from asbuilt.spec import Model as Spec

# Tokens of a typical question and its answer, for which the dtype is chosen.
QUESTION, ANSWER = 256, 256
LARGEST = 1 << 26  # bytes of a saved chat
DEFAULT = Running()


def open_chat(
    source: Source,
    how: Running = DEFAULT,
    *,
    context: int | None = None,
    chunk: int = CHUNK,
    kv_dtype: str | None = None,
    **options: Any,  # noqa: ANN401
) -> tuple[Chat, Compute]:
    """Returns a chat with a source's model, loaded, and what it computes in; `options` are those of `Chat`.

    Raises InputError before anything is loaded, for a model without a chat template, or if the memory does not hold
    the model and the cache of the whole context.
    """
    headers(source)  # raises if there are no weights
    tokenizer = required_tokenizer(source)
    require_chat(source.spec, tokenizer)
    tokens = chat_context(source.spec, context)
    if kv_dtype is not None:
        require_cache(source.spec, kv_dtype, how.dtype or torch.float32)
    options["sampling"] = sampled(source, options.get("sampling", Sampling()))

    def needs(spec: Spec, dtype: torch.dtype) -> int:
        return computing.request_bytes(spec, tokens, 0, dtype, min(chunk, tokens), None, kv_dtype)

    request = Request(prompt_tokens=QUESTION, new_tokens=ANSWER, needs=needs, fix=NARROWER)
    model, compute = ready(source, how, contents_of(source, how, (QUESTION, ANSWER)), request)
    senses = {"see": _sight(source), "hear": _hearing(source)}
    made = Chat(
        model, tokenizer, context=tokens, chunk=chunk, kv_dtype=kv_dtype, eos_ids=source.eos_ids, **senses, **options
    )
    return made, compute


def _sight(source: Source) -> Callable[[Sequence[Any]], Tensor | Patches | Pieces | Tiles] | None:
    """Returns what prepares image files as the folder says; None for a model that does not see."""
    if "images" not in source.spec.reads:
        return None
    folder = _folder(source, "image")

    def see(files: Sequence[Any]) -> Tensor | Patches | Pieces | Tiles:
        from asbuilt.media.image import Preparation

        return Preparation.read(folder()).of(files)

    return see


def _hearing(source: Source) -> Callable[[Sequence[Any]], Tensor | Sounds] | None:
    """Returns what makes spectrograms of audio files as the folder says; None for a model that does not hear."""
    if source.spec.heard is None:
        return None
    folder = _folder(source, "audio")

    def hear(files: Sequence[Any]) -> Tensor | Sounds:
        from asbuilt.media.sound import read_sound, spectrogram_of

        mels = spectrogram_of(folder())
        made = [mels.of(read_sound(file, rate=mels.rate, seconds=mels.seconds)) for file in files]
        alike = len({mel.shape[1:] for mel in made}) == 1
        return torch.cat(made) if alike else Sounds(tuple(mel[0] for mel in made))

    return hear


def _folder(source: Source, what: str) -> Callable[[], Path]:
    def folder() -> Path:
        if source.path is None:
            raise InputError(f"{what} files need a checkpoint folder", field="MODEL", value=source.name)
        return source.path

    return folder


def save_chat(chat: Chat, model: str, file: Path) -> None:
    """Writes what was said as JSON, whole or not at all; raises InputError for a file that is no saved chat."""
    if file.exists():
        try:
            read_chat(file)
        except InputError as error:
            raise InputError("exists and is no saved chat", field=str(file), fix="choose another name") from error
    system = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    messages = [*system, *(message.document() for message in chat.history)]
    text = json.dumps({"asbuilt": "chat", "model": model, "messages": messages}, indent=1, ensure_ascii=False)
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        aside.write_text(f"{text}\n", encoding="utf-8")
        aside.replace(file)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"cannot be written: {said}", field=str(file)) from error
    finally:
        with contextlib.suppress(OSError, ValueError):
            aside.unlink(missing_ok=True)


def read_chat(file: Path) -> list[Message]:
    """Returns the messages of a saved chat; raises InputError for another file."""
    found = read_object(file, LARGEST)
    messages = found.get("messages")
    if found.get("asbuilt") != "chat" or not isinstance(messages, list):
        raise InputError("not a saved chat", field=str(file), allowed="a file that /save has written")
    return [_message(said, f"{file}: messages[{i}]", i) for i, said in enumerate(messages)]


def _message(said: object, field: str, number: int) -> Message:
    if not isinstance(said, dict) or said.get("role") not in ROLES or not isinstance(said.get("content"), str):
        raise InputError(field=field, value=said, allowed='{"role": system, user or assistant, "content": "..."}')
    if said["role"] == "system" and number:
        raise InputError("a system message comes first", field=field)
    files = {name: said.get(name, []) for name in ("images", "audio")}
    for name, given in files.items():
        if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
            raise InputError(field=f"{field}.{name}", value=given, allowed="a list of files")
    return Message(
        role=said["role"], content=said["content"], images=tuple(files["images"]), audio=tuple(files["audio"])
    )

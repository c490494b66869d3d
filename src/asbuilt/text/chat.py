"""Chat templates: messages to the text, and the ids, that a model was trained on.

A template comes with the model and is rendered under limits of fuel, time, memory and output (`template_worker`); the
messages come from whoever talks to the model, and cannot put a control token into the ids.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asbuilt.errors import InputError
from asbuilt.text.template_worker import MEMORY_BYTES, SECONDS
from asbuilt.text.tokenizer import Tokenizer

MAX_CHARS = 4_000_000
# Unicode keeps these 32 code points from ever being characters, so one of them may stand inside a text as a mark.
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class _Worker:
    """The process that renders: started when first needed, asked by one thread at a time, replaced when it dies."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> dict[str, str]:
        line = json.dumps(request)
        with self._lock:
            process = self._process or self._start()
            answer = ""
            try:
                assert process.stdin
                assert process.stdout
                process.stdin.write(line + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                pass
            except BaseException:  # Ctrl-C while it renders: its answer must not be taken for the next one's
                process.kill()
                self.close()
                raise
            return json.loads(answer) if answer else {"error": self._cause_of_death()}

    def _start(self) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("template_worker.py")
        # -P keeps this folder off the import path, where its file names could hide others.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        return self._process

    def _cause_of_death(self) -> str:
        code = self.close()
        if code == -signal.Signals.SIGABRT or code == -signal.Signals.SIGSEGV:
            return f"the template asked for more than {MEMORY_BYTES >> 20} MiB of memory"
        if code == -getattr(signal, "SIGALRM", 0):
            return f"the template took longer than {SECONDS} s"
        return f"the process that renders templates ended with code {code}"

    def close(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin
        assert process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        code = process.wait()
        process.stdout.close()
        return code


_worker = _Worker()
atexit.register(_worker.close)


def render(
    template: str,
    messages: list[dict[str, Any]],
    *,
    bos: str | None,
    eos: str | None,
    add_generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
    max_chars: int = MAX_CHARS,
) -> str:
    """Returns the text that a chat template makes of the messages, as transformers' `apply_chat_template` does.

    Raises InputError for a template that fails, complains, runs out of its limits, or writes over `max_chars`.
    """
    context = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
    # A token that the model lacks is left out, not null: templates ask whether it is defined.
    context |= {name: text for name, text in (("bos_token", bos), ("eos_token", eos)) if text is not None}
    try:
        answer = _worker.ask({"template": template, "context": context, "max_chars": max_chars})
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"messages and tools must be what JSON can hold: {error}", field="messages") from error
    if "error" in answer:
        raise InputError(answer["error"], field="chat template")
    return answer["text"]


def encode_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Returns the ids of a chat; only what the template itself wrote becomes control tokens.

    A control token spelled out in a message or a tool is broken with a mark before rendering, so the template's own
    are told from it afterwards. Not covered: a token that a template pieces together around a message's text, such as
    `'<|' + role + '|>'`; let only known roles in. Raises InputError where the model has no template, and as `render`.
    """
    if tokenizer.chat_template is None:
        raise InputError("this model has no chat template", fix="give plain text instead of messages")
    contents = sorted((token.content for token in tokenizer.special_tokens.values()), key=len, reverse=True)
    control = re.compile("|".join(map(re.escape, contents)) or "(?!)")  # (?!) matches nowhere
    mark = _unused_mark([messages, tools])
    broken = _map_text([messages, tools], lambda text: _break(text, control, mark))
    eos = tokenizer.token(tokenizer.eos_ids[0]) if tokenizer.eos_ids else None
    text = render(
        tokenizer.chat_template,
        broken[0],
        bos=tokenizer.token(tokenizer.bos_id),
        eos=eos,
        add_generation_prompt=add_generation_prompt,
        tools=broken[1],
    )
    if mark not in text:
        return tokenizer.encode(text, special=True)
    return _encode_broken(tokenizer, text, control, mark)


def _map_text(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401  what JSON can hold
    """Returns the value with every text in it changed, keys too: a tool's parameter names are its caller's text."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_text(key, change): _map_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_text(item, change) for item in value]
    return value


def _unused_mark(said: Any) -> str:  # noqa: ANN401
    used: set[str] = set()
    _map_text(said, lambda text: used.update(text) or text)
    free = next((mark for mark in MARKS if mark not in used), None)
    if free is None:
        raise InputError("the messages use every code point that is reserved for marks", field="messages")
    return free


def _break(text: str, control: re.Pattern[str], mark: str) -> str:
    """Puts the mark behind the first character of every control token in the text, of overlapping ones too.

    Inside, not in front: a template that cuts or trims at a token would otherwise lay the mark beside its own.
    """
    pieces, at = [], 0
    while found := control.search(text, at):
        if len(found[0]) == 1:
            raise InputError("a message holds a control token of one character", field="messages", value=found[0])
        pieces += [text[at : found.start() + 1], mark]
        at = found.start() + 1
    return "".join([*pieces, text[at:]])


def _encode_broken(tokenizer: Tokenizer, text: str, control: re.Pattern[str], mark: str) -> list[int]:
    """Returns the ids of a text in which every control token that is whole is the template's, and broken ones are not.

    The control tokens are taken out here, and the text between them, its marks removed, is encoded as plain text.
    """
    tokens = {token.content: (id_, token) for id_, token in tokenizer.special_tokens.items()}
    ids: list[int] = []
    at, strip = 0, False
    for found in control.finditer(text):
        id_, token = tokens[found[0]]
        plain = text[at : found.start()]
        ids += _encode_plain(tokenizer, plain.rstrip() if token.lstrip else plain, mark, strip)
        ids.append(id_)
        at, strip = found.end(), token.rstrip
    return ids + _encode_plain(tokenizer, text[at:], mark, strip)


def _encode_plain(tokenizer: Tokenizer, text: str, mark: str, strip: bool) -> list[int]:
    text = (text.lstrip() if strip else text).replace(mark, "")
    return tokenizer.encode(text) if text else []

"""Chat templates: from messages to the prompt text and token ids that a model was trained on.

A template comes with the model and is rendered under limits of fuel, time, memory and output (`template_worker`);
messages come from the user, and cannot inject a control token into the ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from asbuilt.errors import InputError
from asbuilt.text.tokenizer import Tokenizer
from asbuilt.text.worker import Request, Worker, WorkerError

MAX_CHARS = 4_000_000
# Limits of CPU time and memory: a base amount, and an amount per byte of messages and template.
SECONDS, SECONDS_PER_BYTE = 0.8, 1e-6
MEMORY, MEMORY_PER_BYTE = 64 << 20, 48
MOST_CONTROLS = 1 << 16
LONGEST_CONTROL = 256  # characters of a control token; the longest published has 42
# Unicode guarantees that these 32 code points are never characters, so one can serve as a mark inside a text.
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
MOST_TRIED = 16  # alternatives at one position
QUESTION, ANSWER = "asbuilt asks", "asbuilt answers"

_worker = Worker("template_worker", "the template")


def render(
    template: str,
    messages: list[dict[str, Any]],
    *,
    named: Mapping[str, str] | None = None,
    add_generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
    max_chars: int = MAX_CHARS,
) -> str:
    """Returns the messages rendered by a chat template, as by transformers' `apply_chat_template`.

    `named` are the special tokens that the model has, `bos_token` and so on. Raises InputError for a template that
    fails, complains, runs out of its limits, or writes over `max_chars`.
    """
    context = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
    # A special token that the model lacks is undefined, not null: templates test whether it is defined.
    said = {"template": template, "context": dict(named or {}) | context, "max_chars": max_chars}
    try:
        nbytes = len(template) + len(json.dumps(context))
        return _worker.ask(
            Request(
                said=said,
                seconds=SECONDS + SECONDS_PER_BYTE * nbytes,
                memory=MEMORY + MEMORY_PER_BYTE * nbytes,
            )
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"messages and tools must be valid JSON: {error}", field="messages") from error
    except WorkerError as error:
        raise InputError(str(error), field="chat template") from error


def encode_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Returns the ids of a chat; only control tokens that the template itself wrote become control tokens.

    Nothing is put around it: a template that wants a bos token writes it. A control token spelled out in a message or
    a tool is broken with a mark before rendering, so the template's own are told from it afterwards. Not covered: a
    token that a template pieces together around a message's text, such as `'<|' + role + '|>'`; let only known roles
    in. Raises InputError where the model has no template, and as `render`.
    """
    template = tokenizer.tool_template if tools and tokenizer.tool_template is not None else tokenizer.chat_template
    if template is None:
        raise InputError("this model has no chat template", fix="give plain text instead of messages")
    controls = tuple(token.content for token in tokenizer.special_tokens.values())
    mark = _unused_mark([messages, tools])
    broken = _map_text([messages, tools], lambda text: _break(text, _any_of(controls, shortest=True), mark))
    text = render(
        template,
        broken[0],
        named=tokenizer.named,
        add_generation_prompt=add_generation_prompt,
        tools=broken[1],
    )
    if mark not in text:
        return tokenizer.encode(text, special=True)
    return _encode_broken(tokenizer, text, _any_of(controls), mark)


def turn_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the control token that the chat template writes after an answer, if any.

    Fine-tunes often end a turn with another token than the one that their vocabulary calls the end of a text. Where
    the last answer of a chat has none behind it, the one between an answer and the next question is meant.
    """
    if tokenizer.chat_template is None:
        return ()
    chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    for messages in (chat, [*chat, chat[0]]):
        try:
            text = render(tokenizer.chat_template, messages, named=tokenizer.named, add_generation_prompt=False)
        except InputError:  # a template may refuse this probe; a real problem will be reported for the real chat
            continue
        _, answered, rest = text.partition(ANSWER)
        found = _first_added(tokenizer, rest.partition(QUESTION)[0]) if answered else None
        if found is not None:
            return (found,)
    return ()


def _first_added(tokenizer: Tokenizer, text: str) -> int | None:
    """Returns the first control token in the text, otherwise an added token that the text starts with."""
    control = _any_of(tuple(token.content for token in tokenizer.special_tokens.values())).search(text)
    added = _any_of(tuple(token.content for token in tokenizer.added_tokens.values())).match(text.lstrip())
    found = control or added
    return None if found is None else next(i for i, t in tokenizer.added_tokens.items() if t.content == found[0])


@lru_cache(maxsize=8)
def _any_of(texts: tuple[str, ...], shortest: bool = False) -> re.Pattern[str]:
    """Returns a pattern for the longest (or shortest) of the texts at a position, built as a trie of their letters.

    One after the other, thousands of them would each be tried at every place of a long message.
    """
    if len(texts) > MOST_CONTROLS:
        raise InputError("too many control tokens", value=len(texts), allowed=f"at most {MOST_CONTROLS:,}")
    tree: dict[str, Any] = {}
    for text in texts:
        if len(text) > LONGEST_CONTROL:
            raise InputError("a control token is too long", value=text, allowed=f"at most {LONGEST_CONTROL} characters")
        branch = tree
        for letter in text:
            if shortest and "" in branch:
                break
            branch = branch.setdefault(letter, {})
        else:
            if shortest:
                branch.clear()
            branch[""] = {}
    try:
        return re.compile(_behind(tree) if tree else "(?!)")  # (?!) matches nowhere
    except RecursionError as error:
        raise InputError("too many control tokens share a prefix", field="tokenizer") from error


def _behind(tree: dict[str, Any]) -> str:
    """Returns the pattern of what may follow a node of the trie."""
    branches = [(letter, re.escape(letter) + _behind(inner)) for letter, inner in tree.items() if letter]
    if not branches:
        return ""
    if len(branches) == 1 and "" not in tree:
        return branches[0][1]
    return _one_of(branches) + ("?" if "" in tree else "")


def _one_of(branches: list[tuple[str, str]]) -> str:
    """Returns an alternation of patterns with different first letters, in groups that are tested as a whole."""
    if len(branches) <= MOST_TRIED:
        return "(?:" + "|".join(pattern for _, pattern in branches) + ")"
    size = -(-len(branches) // MOST_TRIED)
    groups = [branches[start : start + size] for start in range(0, len(branches), size)]
    asked = ("".join(re.escape(letter) for letter, _ in group) for group in groups)
    return "(?:" + "|".join(f"(?=[{a}]){_one_of(group)}" for a, group in zip(asked, groups, strict=True)) + ")"


def _map_text(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401  what JSON can hold
    """Returns the value with every string in it changed, keys too, since users choose a tool's parameter names."""
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
        raise InputError("the messages use every code point reserved for internal marks", field="messages")
    return free


def _break(text: str, control: re.Pattern[str], mark: str) -> str:
    """Inserts the mark after the first character of every control token in the text, including overlapping ones.

    Inside, not in front: a template that cuts or trims at a token would otherwise lay the mark beside its own.
    """
    pieces, at = [], 0
    while found := control.search(text, at):
        if len(found[0]) == 1:
            raise InputError("a message contains a control token of one character", field="messages", value=found[0])
        pieces += [text[at : found.start() + 1], mark]
        at = found.start() + 1
    return "".join([*pieces, text[at:]])


def _encode_broken(tokenizer: Tokenizer, text: str, control: re.Pattern[str], mark: str) -> list[int]:
    """Returns the ids of a text in which intact control tokens are the template's and broken ones are the user's.

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

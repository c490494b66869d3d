"""Chats as training data: JSON lines through the model's own chat template, with the loss on answers alone.

A line is {"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "response": ...}; one of preferences is
{"prompt": ..., "chosen": ..., "rejected": ...}. A prompt is a text, or messages. Every message of the assistant is an
answer: its targets are its tokens up to and with the one that ends its turn, and nothing that the template puts
around it. The model reads a prompt exactly as it will when it generates.

Shapes: batch B, tokens T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from asbuilt.errors import InputError, one_of
from asbuilt.files import decoded, parse_json, read_regular
from asbuilt.text.chat import encode_chat, turn_ends
from asbuilt.text.tokenizer import Tokenizer
from asbuilt.train.batch import IGNORED, Batch, Preferences

LARGEST = 1 << 30  # bytes of a file of chats
ROLES = ("system", "user", "assistant")
PAD = 0  # any token: what fills a row is marked as not valid
Message = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """The tokens of a chat, and which of them are answers, the targets."""

    ids: tuple[int, ...]
    answers: tuple[bool, ...]


@dataclass(frozen=True)
class Pair:
    """Two chats that differ in their last answer, and ln p of both answers under the model at the start."""

    chosen: Row
    rejected: Row
    reference: tuple[float, float] = (0.0, 0.0)


@dataclass
class Cut:
    """How many lines were read, how many chats were cut to `context` tokens, and how many lines lost an answer."""

    context: int
    lines: int = 0
    cut: int = 0
    dropped: int = 0

    def __call__(self, row: Row) -> Row:
        """Returns the row of at most one token more than the model reads."""
        if len(row.ids) <= self.context + 1:
            return row
        self.cut += 1
        return Row(row.ids[: self.context + 1], row.answers[: self.context + 1])

    @property
    def note(self) -> str:
        """What was cut and dropped, in words; empty for nothing."""
        if not self.cut:
            return ""
        said = f"{self.cut} chats of {self.lines} lines are cut to {self.context} tokens (data.context)"
        return said + (f"; {self.dropped} lines are left out, as nothing of an answer is left" if self.dropped else "")


@dataclass(frozen=True)
class Writer:
    """Writes messages as tokens, by the chat template of a tokenizer or, without one, a prompt and its answer."""

    tokenizer: Tokenizer
    ends: tuple[int, ...] = field(default=())
    """The tokens that end an answer."""

    @staticmethod
    def of(tokenizer: Tokenizer, eos_ids: Sequence[int]) -> Writer:
        """Returns the writer for a model whose end tokens are these."""
        return Writer(tokenizer, tuple(dict.fromkeys([*turn_ends(tokenizer), *eos_ids])))

    def __call__(self, messages: list[Message], *, last: bool = False) -> Row:
        """Returns the row of a chat; with `last` its last answer alone is a target."""
        if self.tokenizer.chat_template is None:
            return self._plain(messages)
        whole = encode_chat(self.tokenizer, messages, add_generation_prompt=False)
        answers = [False] * len(whole)
        numbers = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
        for number in numbers[-1:] if last else numbers:
            start = self._start(messages[:number], whole)
            stop = next((at + 1 for at in range(start, len(whole)) if whole[at] in self.ends), None)
            if stop is None and number + 1 < len(messages):
                raise InputError("the template writes nothing that ends an answer before the next message")
            answers[start:stop] = [True] * (len(whole[start:stop]))
        return Row(tuple(whole), tuple(answers))

    def _start(self, before: list[Message], whole: list[int]) -> int:
        """Returns at which token an answer begins: where the prompt for it ends, or differs from the whole chat.

        A token that spans the border belongs to the answer. A template may also end the prompt with more than it
        writes before an answer that is there, such as a beginning of reasoning.
        """
        prompt = encode_chat(self.tokenizer, before, add_generation_prompt=True)
        start = common(prompt, whole)
        if start < len(prompt) - 1:
            closed = encode_chat(self.tokenizer, before, add_generation_prompt=False)
            if common(closed, whole) < len(closed):
                raise InputError(
                    "the template writes earlier messages differently once an answer follows",
                    fix="give each answer a line of its own",
                )
        return start

    def _plain(self, messages: list[Message]) -> Row:
        if [one["role"] for one in messages] != ["user", "assistant"]:
            raise InputError("this model has no chat template", fix="give a prompt and a response, both texts")
        prompt, answer = (one["content"] for one in messages)
        opening, text, _ = self.tokenizer.wrapped(prompt)
        before, after = [*opening, *text], [*self.tokenizer.encode(answer), *self.ends[:1]]
        return Row((*before, *after), (*[False] * len(before), *[True] * len(after)))


@dataclass(frozen=True)
class Answers:
    """Makes a batch of rows, filled on the right to the longest of them."""

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """Returns the batch; the targets are the tokens of answers."""
        longest = max(len(row.ids) for row in rows)
        ids_BL = torch.full((len(rows), longest), PAD, dtype=torch.int64)
        answers_BL, there_BL = torch.zeros((2, len(rows), longest), dtype=torch.bool)
        for i, row in enumerate(rows):
            n = len(row.ids)
            ids_BL[i, :n], answers_BL[i, :n], there_BL[i, :n] = torch.tensor(row.ids), torch.tensor(row.answers), True
        valid_BT = there_BL[:, :-1]
        return Batch(
            ids=ids_BL[:, :-1],
            targets=ids_BL[:, 1:].masked_fill(~answers_BL[:, 1:], IGNORED),
            valid=None if bool(valid_BT.all()) else valid_BT,
        )


@dataclass(frozen=True)
class Preferred:
    """Makes a batch of pairs: the chosen rows, then the rejected ones."""

    beta: float
    smoothing: float

    def __call__(self, pairs: Sequence[Pair]) -> Preferences:
        """Returns the batch of B pairs, 2B rows."""
        made = Answers()([*(one.chosen for one in pairs), *(one.rejected for one in pairs)])
        reference = [*(one.reference[0] for one in pairs), *(one.reference[1] for one in pairs)]
        return Preferences(
            ids=made.ids,
            targets=made.targets,
            valid=made.valid,
            reference=torch.tensor(reference, dtype=torch.float64),
            beta=self.beta,
            smoothing=self.smoothing,
        )


def read_chats(path: Path, writer: Writer, context: int) -> tuple[list[Row], Cut]:
    """Returns the rows of a file of chats that have a target, and what was cut of them."""
    cut = Cut(context)

    def row(line: dict[str, Any]) -> Row | None:
        made = cut(writer(_messages(line)))
        return made if any(made.answers[1:]) else None

    return _read(path, "data.chat", row, cut), cut


def read_pairs(path: Path, writer: Writer, context: int) -> tuple[list[Pair], Cut]:
    """Returns the pairs of a file of preferences, and what was cut of them."""
    cut = Cut(context)

    def pair(line: dict[str, Any]) -> Pair | None:
        _require_keys(line, ("prompt", "chosen", "rejected"), "a line")
        prompt = _prompt(line["prompt"])
        both = [[*prompt, _answer(line[name], name)] for name in ("chosen", "rejected")]
        if both[0] == both[1]:
            raise InputError("chosen and rejected are the same", value=line["chosen"])
        chosen, rejected = (cut(writer(messages, last=True)) for messages in both)
        return Pair(chosen, rejected) if any(chosen.answers[1:]) and any(rejected.answers[1:]) else None

    return _read(path, "data.preferences", pair, cut), cut


def _read(path: Path, field: str, make: Callable[[dict[str, Any]], Any], cut: Cut) -> list[Any]:
    """Returns what `make` gives of each line, without None; raises InputError naming the line."""
    text, made = decoded(read_regular(path, LARGEST, field), field), []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        found = parse_json(line, where)
        if not isinstance(found, dict):
            raise InputError(field=where, value=found, allowed="a JSON object")
        cut.lines += 1
        try:
            made.append(make(found))
        except InputError as error:
            raise InputError(
                error.problem,
                field=": ".join(filter(None, (where, error.field))),
                value=error.value,
                allowed=error.allowed,
                fix=error.fix,
            ) from error
    kept = [one for one in made if one is not None]
    cut.dropped = len(made) - len(kept)
    if not made:
        raise InputError("has no lines", field=field, value=str(path))
    if not kept:
        raise InputError(
            "cuts off every answer", field="data.context", value=cut.context, allowed="longer", fix="raise it"
        )
    return kept


def _messages(line: dict[str, Any]) -> list[Message]:
    if "messages" in line:
        _require_keys(line, ("messages",), "a line")
        made = _checked(line["messages"], "messages")
    else:
        _require_keys(line, ("prompt", "response"), "a line")
        made = [*_prompt(line["prompt"]), _answer(line["response"], "response")]
    if made[-1]["role"] != "assistant":
        raise InputError(field="the role of the last message", value=made[-1]["role"], allowed="assistant")
    return made


def _prompt(said: object) -> list[Message]:
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    made = _checked(said, "prompt")
    if made[-1]["role"] == "assistant":
        raise InputError(field="the role of the prompt's last message", value="assistant", allowed="user or system")
    return made


def _answer(said: object, name: str) -> Message:
    if isinstance(said, str):
        return {"role": "assistant", "content": said}
    found = _listed(said, name)
    if len(found) != 1 or found[0]["role"] != "assistant":
        raise InputError(field=name, value=said, allowed="a text, or one message of the assistant")
    return found[0]


def _checked(said: object, name: str) -> list[Message]:
    """Returns messages in a possible order: a system message first, and no answer without a question."""
    made = _listed(said, name)
    for number, (one, before) in enumerate(zip(made, [None, *made], strict=False)):
        role, earlier = one["role"], None if before is None else before["role"]
        if (role == "system" and number) or (role == "assistant" and earlier in (None, "system", "assistant")):
            raise InputError(
                f"message {number + 1} is of the {role}",
                field=name,
                allowed="a system message first if at all, and answers after questions",
            )
    return made


def _listed(said: object, name: str) -> list[Message]:
    if not isinstance(said, list) or not said:
        raise InputError(field=name, value=said, allowed="messages with a role and a content")
    for number, one in enumerate(said, 1):
        if not isinstance(one, dict):
            raise InputError(field=f"{name}: message {number}", value=one, allowed="an object with a role and content")
        _require_keys(one, ("role", "content"), f"message {number}")
        if one["role"] not in ROLES:
            raise InputError(field=f"message {number}: role", value=one["role"], allowed=one_of(ROLES))
        if not isinstance(one["content"], str):
            raise InputError(field=f"message {number}: content", value=one["content"], allowed="a text")
    return [dict(one) for one in said]


def _require_keys(said: dict[str, Any], keys: tuple[str, ...], what: str) -> None:
    """Raises InputError for a missing key, and for one that would be dropped silently."""
    for key in (*said, *keys):
        if key not in said or key not in keys:
            problem = "is missing" if key not in said else "is not read"
            raise InputError(f"{key} {problem}", field=what, allowed=f"an object with {' and '.join(keys)}")


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def with_reference(pair: Pair, chosen: float, rejected: float) -> Pair:
    """Returns the pair with ln p of its answers under the model at the start."""
    return replace(pair, reference=(chosen, rejected))

"""A chat: each answer is the one that a fresh run of the whole chat gives, and only new tokens are read for it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import SEEDS, randomised, scripted, specs
from torch import nn

from asbuilt.errors import InputError
from asbuilt.generate.chat import Chat, ContextFull, Message
from asbuilt.generate.decode import generate
from asbuilt.generate.sampling import Sampling
from asbuilt.nn.model import Model
from asbuilt.spec import LanguageModel
from asbuilt.spec.positions import rotaries_by_length
from asbuilt.text.tokenizer import Tokenizer

END = "|"  # token 0; token n is the n-th letter
TURNS = "{% for m in messages %}{{ m.content }}|{% endfor %}"
# Earlier answers are cut to their first letter, as templates leave out the reasoning of earlier answers.
FORGETS = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else m.content[:1] }}|{% endfor %}"
ROLES = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}x|{% endfor %}"


class Letters:
    """A tokenizer of one letter per token, whose first token ends turns and is the only control token."""

    named: dict[str, str] = {}  # noqa: RUF012
    tool_template = None
    eos_ids = (0,)

    def __init__(self, template: str | None = TURNS) -> None:
        self.chat_template = template
        end = SimpleNamespace(content=END, lstrip=False, rstrip=False, special=True)
        self.special_tokens = self.added_tokens = {0: end}

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        assert special or END not in text
        return [0 if letter == END else ord(letter) - ord("a") + 1 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + i - 1) for i in ids if i)

    def is_special(self, id_: int) -> bool:
        return id_ == 0

    def stream(self) -> Any:  # noqa: ANN401
        return SimpleNamespace(push=lambda id_: self.decode([id_]), finish=lambda: "")


def letters(template: str | None = TURNS) -> Tokenizer:
    made: Any = Letters(template)
    return made


class Read:
    """Counts the tokens that a model's layers are given."""

    def __init__(self, model: Model) -> None:
        self.tokens = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: nn.Module, args: tuple[Any, ...], __: dict[str, Any]) -> None:
        self.tokens += args[0].shape[1]


def fresh(model: Model, ids: list[int], n: int, **options: Any) -> list[int]:  # noqa: ANN401
    steps = generate(model, [ids], max_new_tokens=n, eos_ids=(0,), **options)
    return [token for (token,) in steps if token is not None]


def untied(model: Model, ids: list[int], tokens: list[int]) -> None:
    """Leaves out texts in which rounding decides between the two largest logits."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*ids, *tokens]]))[0, len(ids) - 1 : -1]
    first, second = logits_TV.topk(2).values.unbind(-1)
    assume(bool((first - second > 1e-7 * first.abs().clamp(min=1)).all()))


def talked(chat: Chat, questions: list[str], template: str) -> Iterator[tuple[list[int], Any]]:
    """Each answer with the tokens of the chat before it, as the template writes them."""
    said: list[tuple[str, str]] = []
    for question in questions:
        said.append(("user", question))
        cut = ((role, text[:1] if template == FORGETS and role != "user" else text) for role, text in said)
        text = "".join(f"{text}{END}" for _, text in cut)
        answer = chat.send(question)
        pieces = "".join(answer)
        assert pieces == answer.text
        said.append(("assistant", pieces))
        yield chat.tokenizer.encode(text, special=True), answer


@settings(deadline=None)
@given(specs(), SEEDS, st.sampled_from((TURNS, FORGETS)), st.integers(1, 4), st.data())
def test_each_answer_is_that_of_a_fresh_run(
    spec: LanguageModel, seed: int, template: str, chunk: int, data: st.DataObject
) -> None:
    """Whatever the layers remember: keys, rings of windows, states; and whatever the template does with answers."""
    assume(spec.n_vocab > 3)
    assume(not rotaries_by_length(spec))
    model = randomised(spec, seed)
    words = st.text(st.sampled_from([chr(ord("a") + i) for i in range(spec.n_vocab - 1)]), min_size=1, max_size=2)
    chat = Chat(model, letters(template), max_new_tokens=3, chunk=chunk)
    with torch.no_grad():
        for ids, answer in talked(chat, data.draw(st.lists(words, min_size=1, max_size=3)), template):
            want = fresh(model, ids, 3)
            untied(model, ids, want)
            assert answer.tokens == want
            assert answer.kept + answer.read == len(ids)


def plain(n_vocab: int = 9) -> Model:
    import asbuilt

    described = asbuilt.decoder(d_model=16, n_layers=2, n_heads=2, n_vocab=n_vocab, max_positions=64)
    return randomised(described, 3)


def test_only_new_tokens_are_read() -> None:
    """Of the second question: the last token of the answer, which nothing has read yet, its end, and the question."""
    model = plain()
    counted = Read(model)
    chat = Chat(model, letters(), max_new_tokens=5)
    before, used = 0, 0
    for _, answer in talked(chat, ["abc", "de", "fgh"], TURNS):
        assert counted.tokens - before == answer.read + len(answer.tokens) - 1
        assert chat.used == used + answer.read + len(answer.tokens) - 1
        assert chat.left == 64 - chat.used
        assert answer.kept == used
        before, used = counted.tokens, chat.used
    assert counted.tokens < 30


def test_a_cache_in_codes() -> None:
    model, kv = plain().float(), "int8:head"
    chat = Chat(model, letters(), max_new_tokens=4, kv_dtype=kv)
    for ids, answer in talked(chat, ["abc", "de", "f"], TURNS):
        assert answer.tokens == fresh(model, ids, 4, kv_dtype=kv)
    with pytest.raises(InputError, match="int3"):
        Chat(model, letters(), kv_dtype="int3")


def test_tokens_of_an_answer_stay_as_they_were_chosen() -> None:
    """A tokenizer may spell the text of an answer with other tokens than the model chose."""

    class Pairs(Letters):
        def encode(self, text: str, *, special: bool = False) -> list[int]:
            """Token 8 is two a's: no model here chooses it, every text with them has it."""
            return super().encode(text.replace("aa", "h"), special=special)

        def decode(self, ids: list[int]) -> str:
            return super().decode(ids).replace("h", "aa")

    model = scripted([*[1] * 20, 0, *[2] * 20], 9)
    pairs: Any = Pairs()
    counted = Read(model)
    chat = Chat(model, pairs, max_new_tokens=4)
    assert "".join(chat.send("b")) == "aaaa"
    read = counted.tokens
    answer = chat.send("c")
    assert (answer.kept, answer.read) == (read, 4)  # the last a, its end, and the question
    assert "".join(answer) == "aaaa"


def test_a_stopped_answer_stays_and_the_chat_goes_on() -> None:
    model = plain()
    chat = Chat(model, letters(), max_new_tokens=9)
    answer = chat.send("abc")
    for piece in answer:
        assert piece
        chat.stop()
    assert (answer.finish_reason, len(answer.tokens)) == ("stopped", 1)
    assert [message.role for message in chat.history] == ["user", "assistant"]
    ids = chat.tokenizer.encode(f"abc|{answer.text}|d|", special=True)
    again = chat.send("d")
    list(again)
    assert again.tokens == fresh(model, ids, 9)


def test_an_answer_that_is_closed_or_never_begun() -> None:
    model = plain()
    chat = Chat(model, letters(), max_new_tokens=9)
    chat.send("abc")
    assert chat.history == []
    answer = chat.send("abc")
    next(answer)
    answer.close()
    assert [message.content for message in chat.history] == ["abc", answer.text]
    assert answer.finish_reason == "stopped"


def test_a_question_that_is_stopped_while_it_is_read_was_not_said() -> None:
    model = plain()
    chat = Chat(model, letters(), max_new_tokens=2, chunk=2)
    model.register_forward_pre_hook(lambda *_: chat.stop())
    answer = chat.send("abcdefg")
    assert list(answer) == []
    assert (answer.finish_reason, chat.history, chat.used) == ("stopped", [], 2)
    chat = Chat(plain(), letters())
    answer = chat.send("abc")
    chat.stop()  # before anything is read
    assert list(answer) == []
    assert (answer.finish_reason, chat.history, chat.used) == ("stopped", [], 0)
    assert list(chat.send("abc"))


def test_a_pass_that_fails_leaves_nothing_half_read() -> None:
    model = plain()
    chat = Chat(model, letters(), max_new_tokens=3)
    list(chat.send("ab"))
    hook = model.blocks[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(chat.send("cd"))
    hook.remove()
    assert [message.role for message in chat.history] == ["user", "assistant"]
    text = "".join(f"{message.content}|" for message in chat.history)
    answer = chat.send("cd")
    list(answer)
    assert answer.kept == 0
    assert answer.tokens == fresh(model, chat.tokenizer.encode(f"{text}cd|", special=True), 3)


def test_the_context() -> None:
    """Ten tokens: a question of 3 with its end leaves 6; then nothing more can be asked, and what was said stays."""
    chat = Chat(scripted([1] * 40, 9), letters(), context=10)
    answer = chat.send("abc")
    assert "".join(answer) == "aaaaaa"
    assert (answer.finish_reason, chat.left) == ("context", 1)
    with pytest.raises(ContextFull, match=r"the context is full.*13 tokens.*fewer than 10.; reset.*larger context"):
        chat.send("b")
    assert len(chat.history) == 2
    chat.reset()
    assert (chat.history, chat.left) == ([], 10)
    assert "".join(chat.send("b")) == "a" * 8
    for wrong in (1, 41, 2.0):
        with pytest.raises(InputError, match="context: must be from 2 to 40"):
            Chat(scripted([1] * 40, 9), letters(), context=wrong)  # type: ignore[arg-type]  # pyright: ignore
    assert Chat(scripted([1] * 40, 9), letters()).context == 40


def test_ends_of_an_answer() -> None:
    script = [1, 1, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    chat = Chat(scripted(script, 9), letters(), stop=("bc",))
    answer = chat.send("ab")
    assert ("".join(answer), answer.finish_reason) == ("a", "stop")
    chat = Chat(scripted(script, 9), letters())
    answer = chat.send("ab")
    assert ("".join(answer), answer.finish_reason, answer.tokens) == ("abc", "eos", [1, 2, 3, 0])


def test_the_system_message() -> None:
    model = plain()
    chat = Chat(model, letters(), system="gg", max_new_tokens=2)
    answer = chat.send("a")
    list(answer)
    assert answer.tokens == fresh(model, chat.tokenizer.encode("gg|a|", special=True), 2)
    chat.reset()
    assert chat.system == "gg"
    chat.system = None
    answer = chat.send("a")
    list(answer)
    assert answer.tokens == fresh(model, chat.tokenizer.encode("a|", special=True), 2)
    chat = Chat(model, letters(ROLES))
    with pytest.raises(InputError, match="no system"):
        chat.system = "gg"
    assert chat.system is None


def test_a_chat_that_is_restored() -> None:
    model = plain()
    chat = Chat(model, letters(), max_new_tokens=3)
    list(chat.send("ab"))
    said = [
        Message(role="system", content="h"),
        Message(role="user", content="a"),
        Message(role="assistant", content="b"),
    ]
    chat.restore(said)
    assert chat.system == "h"
    answer = chat.send("c")
    list(answer)
    assert answer.tokens == fresh(model, chat.tokenizer.encode("h|a|b|c|", special=True), 3)
    chat.restore([])
    assert (chat.system, chat.history) == (None, [])
    chat = Chat(model, letters(ROLES))
    with pytest.raises(InputError, match="no system"):
        chat.restore(said)
    assert (chat.system, chat.history) == (None, [])


def test_draws_differ_from_answer_to_answer_and_a_seed_repeats_them() -> None:
    model = plain()
    hot = Sampling(temperature=100.0, seed=7)

    def answers(sampling: Sampling) -> list[list[int]]:
        chat = Chat(model, letters(), max_new_tokens=12, sampling=sampling)
        return [answer.tokens for _, answer in talked(chat, ["a", "a"], TURNS)]

    first, second = answers(hot)
    assert [first, second] == answers(hot) != answers(Sampling(temperature=100.0, seed=8))
    assert first[: len(second)] != second[: len(first)]


def test_what_cannot_chat() -> None:
    with pytest.raises(InputError, match=r"no chat template.*asbuilt generate"):
        Chat(plain(), letters(None))
    chat = Chat(plain(), letters())
    for files, what in (({"images": ["a.png"]}, "images"), ({"audio": ["a.wav"]}, "sound")):
        with pytest.raises(InputError, match=f"the model reads no {what}"):
            chat.send("a", **files)

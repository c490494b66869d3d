"""Text as it comes: whole characters, nothing of a stop string, and the reason why it ended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from strategies import scripted
from tokenizers import decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from asbuilt.errors import InputError
from asbuilt.generate.text import Completion, StopFilter, complete
from asbuilt.nn.model import Model
from asbuilt.text.tokenizer import Tokenizer

FEW = st.text("ab", max_size=14)  # few letters, so that stop strings overlap, begin and fail
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)
PROMPT = "?"


def cut(text: str, data: DataObject) -> list[str]:
    """The text in pieces, some of them empty."""
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


def until_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """What the filter promises, found by looking at every beginning of the text."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))], True
    return text, False


def test_the_stop_string_that_ends_first_counts() -> None:
    stop = StopFilter(["aabb", "ab"])
    assert (stop.push("aabb"), stop.stopped) == ("a", True)


@given(FEW, STOPS, st.data())
def test_the_filter_cuts_at_the_first_stop_string_however_the_text_comes(
    text: str, stops: list[str], data: DataObject
) -> None:
    stop, shown = StopFilter(stops), ""
    expected, stopped = until_stop(text, stops)
    for piece in cut(text, data):
        shown += stop.push(piece)
        assert expected.startswith(shown)
    assert (shown + stop.finish(), stop.stopped) == (expected, stopped)


@given(FEW, STOPS)
def test_the_filter_holds_back_no_more_than_it_must(text: str, stops: list[str]) -> None:
    """What is held is the longest ending of the text that some stop string begins with."""
    stop = StopFilter(stops)
    shown = stop.push(text)
    if not stop.stopped:
        endings = [text[i:] for i in range(len(text) + 1)]
        assert text[len(shown) :] == next(e for e in endings if any(s.startswith(e) for s in stops) or not e)


@pytest.mark.parametrize("bad", ["", None, 3])
def test_what_is_no_stop_string_is_refused(bad: object) -> None:
    with pytest.raises(InputError, match="stop: "):
        StopFilter(["ok", bad])  # type: ignore[list-item]


def byte_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """One token per byte, and one at which texts end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    end = inner.get_vocab()["<end>"]
    inner.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", end)])
    return Tokenizer(inner, eos_ids=(end,), bos_id=end, chat_template=chat_template)


TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_ids[0]
BEFORE = len(TOKENIZER.encode(PROMPT)) + 1  # bos in front


def says(tokens: list[int]) -> Model:
    """A model that answers PROMPT with these tokens, its context the prompt and them."""
    return scripted([*[END] * (BEFORE - 1), *tokens, END], TOKENIZER.n_vocab)


def answer(tokens: list[int], stop: Sequence[str] = (), max_new_tokens: int | None = None) -> Completion:
    count = len(tokens) if max_new_tokens is None else max_new_tokens
    done = complete(says(tokens), TOKENIZER, PROMPT, max_new_tokens=count, stop=stop)
    pieces = list(done)
    assert "".join(pieces) == done.text
    assert "" not in pieces
    return done


@given(st.text("aéあ🙂", min_size=1, max_size=6), st.lists(st.text("aéあ🙂", min_size=1, max_size=3), max_size=2))
def test_text_ends_before_the_stop_string_or_the_end(text: str, stops: list[str]) -> None:
    """Every token is a byte, so that characters and stop strings come in several tokens."""
    done = answer([*TOKENIZER.encode(text), END, *TOKENIZER.encode("more")], stops)
    expected, stopped = until_stop(text, stops)
    assert (done.text, done.finish_reason) == (expected, "stop" if stopped else "eos")
    assert done.tokens[-1] == END or stopped


def test_each_piece_is_whole_characters() -> None:
    assert list(complete(says(TOKENIZER.encode("é🙂!")), TOKENIZER, PROMPT, max_new_tokens=7)) == ["é", "🙂", "!"]


def test_what_was_held_back_comes_at_the_end() -> None:
    done = answer(TOKENIZER.encode("one st"), ["stop"])
    assert (done.text, done.finish_reason) == ("one st", "length")


def test_a_character_that_was_not_finished_is_shown_as_such() -> None:
    done = answer(TOKENIZER.encode("a🙂")[:-1])
    assert (done.text, done.finish_reason) == ("a\ufffd", "length")


def test_what_was_held_back_comes_before_an_unfinished_character() -> None:
    assert answer(TOKENIZER.encode("st🙂")[:-1], ["stop"]).text == "st\ufffd"
    assert answer(TOKENIZER.encode("st🙂")[:-1], ["t\ufffd"]).text == "s"


def test_a_stop_string_at_the_end_of_the_allowance_is_a_stop() -> None:
    done = answer(TOKENIZER.encode("a.\n\n"), "\n\n")
    assert (done.text, done.finish_reason) == ("a.", "stop")


def test_one_stop_string_is_not_taken_letter_by_letter() -> None:
    done = answer(TOKENIZER.encode("abe dne end x"), "end")
    assert (done.text, done.finish_reason) == ("abe dne ", "stop")


def test_the_tokens_after_a_stop_are_not_asked_for() -> None:
    """All that were generated, those of the stop string included, and none after it."""
    done = answer(TOKENIZER.encode("a.end more"), ["end"])
    assert done.tokens == TOKENIZER.encode("a.end")


def test_nothing_may_be_asked_for() -> None:
    done = answer(TOKENIZER.encode("abc"), max_new_tokens=0)
    assert (done.text, done.tokens, done.finish_reason) == ("", [], "length")


def test_a_clipped_answer_says_so() -> None:
    tokens = TOKENIZER.encode("abc")
    assert answer(tokens, max_new_tokens=9).note.startswith("max_new_tokens clipped from 9 to 3")
    assert answer(tokens).note == ""


def test_bos_goes_in_front_of_text_and_ids_are_taken_as_they_are() -> None:
    model = says(TOKENIZER.encode("abc"))
    assert complete(model, TOKENIZER, PROMPT, max_new_tokens=1).prompt == [END, *TOKENIZER.encode(PROMPT)]
    assert complete(model, TOKENIZER, [3, 4], max_new_tokens=1).prompt == [3, 4]


def test_messages_are_put_into_the_template() -> None:
    chat = byte_tokenizer("{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}")
    done = complete(says([END] * 20), chat, [{"role": "u", "content": "<end>"}], max_new_tokens=0)
    assert done.prompt == [*chat.encode("u:<end>"), END]


def test_messages_need_a_template() -> None:
    with pytest.raises(InputError, match="no chat template"):
        complete(says([END]), TOKENIZER, [{"role": "user", "content": "hello"}], max_new_tokens=1)


def test_reading_only_the_beginning_leaves_the_rest_unsaid() -> None:
    done = complete(says(TOKENIZER.encode("abc")), TOKENIZER, PROMPT, max_new_tokens=3)
    assert next(done) == "a"
    assert (done.text, len(done.tokens), done.finish_reason) == ("a", 1, None)

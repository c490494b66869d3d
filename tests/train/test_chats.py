"""Chats as data: the tokens are the template's, and the targets those of answers and of what ends them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import small_chats
import torch
from small_chats import CONTEXT, Chat, assistant, chat, lines, spelt, token, user, words
from transformers import AutoTokenizer

from asbuilt import InputError, open_model
from asbuilt.train import loop
from asbuilt.train.batch import IGNORED
from asbuilt.train.chats import Answers, Row, Writer, read_chats, read_pairs
from asbuilt.train.step import evaluate


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return small_chats.checkpoint(tmp_path / "base")


def writer(folder: Path) -> Writer:
    source = open_model(folder, weights=True)
    tokenizer = source.tokenizer()
    assert tokenizer is not None
    return Writer.of(tokenizer, source.eos_ids)


def test_tokens_are_the_template_s_and_targets_those_of_every_answer(base: Path) -> None:
    library = AutoTokenizer.from_pretrained(base)
    for turns in (1, 2, 3):
        said = chat(turns)
        row = writer(base)(said)
        ids, answers = spelt(base, said)
        assert list(row.ids) == ids == list(library.apply_chat_template(said, tokenize=True)["input_ids"])
        assert list(row.answers) == answers
        assert list(writer(base)(said, last=True).answers) == spelt(base, said, last=True)[1]


def test_a_control_token_in_a_message_is_text(base: Path) -> None:
    said = [user("a"), assistant("b<|end|>\n<|user|>c")]
    row = writer(base)(said)
    assert row.ids.count(token(base, "<|user|>")) == 1
    # all of what is written between the prompt and the template's own end is the answer
    assert sum(row.answers) == len("b<|end|>\n<|user|>c") + 1


def test_the_loss_of_a_batch_is_the_one_of_transformers(tmp_path: Path) -> None:
    run = loop.prepare(small_chats.recipe(tmp_path, "run", "data.batch=4", "data.validation=0"))
    batch = run.data.batch(0)
    said = [json.loads(line)["messages"] for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    labelled = [spelt(tmp_path / "base", one) for one in said]
    longest = max(len(ids) for ids, _ in labelled)
    rows = {tuple(ids): answers for ids, answers in labelled}
    ids_BL, labels_BL, there_BL = (torch.zeros(4, longest, dtype=torch.int64) for _ in range(3))
    labels_BL[:] = IGNORED
    for i in range(4):
        n = batch.ids.shape[1] if batch.valid is None else int(batch.valid[i].sum())
        seen = next(ids for ids in rows if list(ids[:n]) == batch.ids[i, :n].tolist() and len(ids) - n in (0, 1))
        ids_BL[i, : len(seen)], there_BL[i, : len(seen)] = torch.tensor(seen), 1
        labels_BL[i, : len(seen)] = torch.tensor([a if b else IGNORED for a, b in zip(seen, rows[seen], strict=True)])
    with torch.no_grad():
        want = small_chats.theirs(tmp_path / "base")(ids_BL, attention_mask=there_BL, labels=labels_BL).loss
    assert math.isclose(evaluate(run.model, [batch]), float(want), rel_tol=2e-6)
    assert math.isclose(run.step().loss, float(want), rel_tol=2e-6)


def test_a_batch_is_filled_on_the_right() -> None:
    made = Answers()([Row((5, 6, 7), (False, True, True)), Row((8, 9), (False, True))])
    assert made.ids[0].tolist() == [5, 6]
    assert made.ids[1, 0] == 8
    assert made.targets.tolist() == [[6, 7], [9, IGNORED]]


def test_prompt_and_response_are_two_messages(base: Path, tmp_path: Path) -> None:
    asked, answered = words(), words()
    file = lines(
        tmp_path / "a.jsonl",
        [
            {"prompt": asked, "response": answered},
            {"prompt": [user(asked)], "response": [assistant(answered)]},
            {"messages": [user(asked), assistant(answered)]},
        ],
    )
    rows, cut = read_chats(file, writer(base), CONTEXT)
    assert rows[0] == rows[1] == rows[2]
    assert (cut.lines, cut.cut, cut.dropped, cut.note) == (3, 0, 0, "")


def test_long_chats_are_cut_and_it_is_told(base: Path, tmp_path: Path) -> None:
    """Rows have one token more than the model reads; a line whose answer is cut off whole is left out."""
    fits = [user("a" * 10), assistant("b" * 5)]  # 11 + 2 + 6 + 2 tokens
    long = [user("a" * 10), assistant("b" * 20)]
    lost = [user("a" * 30), assistant("b")]
    file = lines(tmp_path / "a.jsonl", [{"messages": one} for one in (fits, long, lost)])
    rows, cut = read_chats(file, writer(base), 20)
    assert [len(row.ids) for row in rows] == [21, 21]
    assert list(rows[1].ids) == spelt(base, long)[0][:21]
    assert (cut.cut, cut.dropped) == (2, 1)
    assert "2 chats of 3 lines are cut to 20 tokens" in cut.note
    assert "1 lines are left out" in cut.note
    with pytest.raises(InputError, match=r"data\.context: cuts off every answer"):
        read_chats(file, writer(base), 4)


def test_what_was_cut_is_in_the_log(tmp_path: Path) -> None:
    said: list[str | None] = []
    made = small_chats.recipe(tmp_path, "run", "data.context=12", "run.steps=1")
    lines(tmp_path / "chats.jsonl", [{"messages": [user("a"), assistant("b" * n)]} for n in (2, 20)])
    loop.run(made, report=lambda at: said.append(at.note))
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert said[0] == log[0]["note"] == "1 chats of 2 lines are cut to 12 tokens (data.context)"


def test_a_template_that_drops_reasoning_of_earlier_turns(tmp_path: Path) -> None:
    """The prompt of an answer is what the whole chat begins with, whatever the template does with later turns."""
    template = (
        "{% for message in messages %}<|{{ message.role }}|>"
        "{% if message.role == 'assistant' and loop.last %}[]{% endif %}{{ message.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>[{% endif %}"
    )
    base = small_chats.checkpoint(tmp_path / "base", template)
    said: Chat = [user("ab"), assistant("cd"), user("e"), assistant("f")]
    row = writer(base)(said)
    read = open_model(base, weights=True).tokenizer()
    assert read is not None
    kept = [id_ for id_, answer in zip(row.ids, row.answers, strict=True) if answer]
    assert read.decode(kept, skip_special=False) == "cd<|end|>]f<|end|>"


def test_a_template_that_changes_the_question_is_refused(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}<|{{ message.role }}|>{% if messages|length > 1 %}+{% endif %}"
        "{{ message.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    base = small_chats.checkpoint(tmp_path / "base", template)
    with pytest.raises(InputError, match="writes earlier messages differently"):
        writer(base)([user("ab"), assistant("cd")])


def test_without_a_template_prompt_and_response_are_plain_text(tmp_path: Path) -> None:
    base = small_chats.checkpoint(tmp_path / "base", None)
    row = writer(base)([user("ab"), assistant("cde")])
    read = open_model(base, weights=True).tokenizer()
    assert read is not None
    assert list(row.ids) == [*read.encode("abcde"), token(base, "</s>")]
    assert row.answers == (False, False, True, True, True, True)
    with pytest.raises(InputError, match="no chat template"):
        writer(base)(chat(2))


def test_pairs_have_their_last_answers_as_targets(base: Path, tmp_path: Path) -> None:
    before = [user(words()), assistant(words()), user(words())]
    file = lines(tmp_path / "a.jsonl", [{"prompt": before, "chosen": "ab", "rejected": [assistant("abc")]}])
    (pair,), _ = read_pairs(file, writer(base), CONTEXT)
    for row, answer in ((pair.chosen, "ab"), (pair.rejected, "abc")):
        ids, answers = spelt(base, [*before, assistant(answer)], last=True)
        assert (list(row.ids), list(row.answers)) == (ids, answers)


BAD = {
    "not JSON": ("{", "line 2: not JSON"),
    "a list": ("[1]", "must be a JSON object"),
    "no response": ('{"prompt": "a"}', "response is missing"),
    "another key": ('{"prompt": "a", "response": "b", "tools": []}', "tools is not read"),
    "a role": ('{"messages": [{"role": "bot", "content": "a"}]}', "must be system, user or assistant"),
    "a part": ('{"messages": [{"role": "user", "content": ["a"]}]}', "content: must be a text"),
    "no messages": ('{"messages": []}', "must be messages with a role and a content"),
    "an answer first": ('{"messages": [{"role": "assistant", "content": "a"}]}', "message 1 is of the assistant"),
    "no answer": ('{"messages": [{"role": "user", "content": "a"}]}', "the role of the last message"),
    "a number": ('{"prompt": 3, "response": "b"}', "prompt: must be messages"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_line_is_named(bad: str, base: Path, tmp_path: Path) -> None:
    text, said = BAD[bad]
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n' + text)
    with pytest.raises(InputError) as refused:
        read_chats(file, writer(base), CONTEXT)
    assert said in str(refused.value)
    assert f"{file}: line 2" in str(refused.value)


def test_bad_files_and_bad_pairs(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for data, said in ((b"", "no lines"), (b" \n", "no lines"), (b"\xff", "UTF-8")):
        file.write_bytes(data)
        with pytest.raises(InputError, match=said):
            read_chats(file, writer(base), CONTEXT)
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    two = {"prompt": "a", "chosen": [assistant("b"), assistant("c")], "rejected": "d"}
    answered = {"prompt": [user("a"), assistant("b")], "chosen": "b", "rejected": "d"}
    for line, said in ((same, "are the same"), (two, "one message of the assistant"), (answered, "last message")):
        lines(file, [line])
        with pytest.raises(InputError, match=said):
            read_pairs(file, writer(base), CONTEXT)

"""`asbuilt tokenizer`: what is written loads, what is printed is what was counted, and bad input is one message."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from transformers import AutoTokenizer

from asbuilt.text.tokenizer import Tokenizer

Run = Callable[..., Result]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of some words, in a file."""
    known = ["".join(random.choices("abcdefé", k=random.randint(1, 7))) for _ in range(60)]
    path = tmp_path / "some.txt"
    path.write_text(" ".join(random.choices(known, k=1500)), encoding="utf-8")
    return path


def refused(result: Result, *said: str) -> None:
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for one in said:
        assert re.search(one, result.stderr), result.stderr


def test_a_trained_tokenizer_is_a_folder_that_both_load(run: Run, text: Path, tmp_path: Path) -> None:
    out, size = tmp_path / "new" / "tok", random.randint(300, 360)
    words = ("--special", "<|x|>", "--eos", "<|end|>", "--pad", "<|end|>", "--sentinels", 3, "--pattern", "cl100k")
    ran = run("tokenizer", "train", text, text.parent, out, "--vocab-size", size, *words, "--json")
    assert ran.exit_code == 0, ran.stderr
    said = json.loads(ran.stdout)
    specials = ["<|x|>", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>", "<|end|>"]
    assert said["special"] == {token: size - 5 + i for i, token in enumerate(specials)}
    assert (said["vocab_size"], said["merges"], said["pattern"]) == (size, size - 5 - 256, "cl100k")
    assert (said["files"], said["documents"], said["bytes"]) == (2, 2, 2 * text.stat().st_size)
    made, theirs = Tokenizer.from_file(out), AutoTokenizer.from_pretrained(out)
    assert made.n_vocab == len(theirs) == size
    assert (made.eos_ids, theirs.eos_token, theirs.pad_token) == ((size - 1,), "<|end|>", "<|end|>")
    line = text.read_text(encoding="utf-8")
    assert made.encode(line) == theirs.encode(line)
    assert sorted(os.listdir(out)) == ["tokenizer.json", "tokenizer_config.json"]
    assert [path.name for path in out.parent.iterdir()] == ["tok"]


def test_it_is_said_in_a_line(run: Run, tmp_path: Path) -> None:
    ran = run("tokenizer", "train", "-", tmp_path / "t", "--vocab-size", 258, "--eos", "<e>", input="abab" * 10)
    assert ran.stdout == (
        f"{tmp_path / 't'}: 258 tokens (256 bytes, 1 merges, 1 special tokens), "
        "learned from 40 bytes of text in 1 documents\n"
    )
    assert run("tokenizer", "train", tmp_path / "b", "--vocab-size", 256).exit_code == 0


def test_files_that_are_no_text_are_skipped(run: Run, text: Path, tmp_path: Path) -> None:
    (text.parent / "z.txt").write_bytes(b"\xff")
    words = ("tokenizer", "train", text.parent, "--vocab-size", 290)
    refused(run(*words, tmp_path / "a"), r"z\.txt: not UTF-8")
    said = json.loads(run(*words, tmp_path / "b", "--skip-binary", "--json").stdout)
    assert (said["files"], said["skipped"], said["bytes"]) == (1, [str(text.parent / "z.txt")], text.stat().st_size)
    assert "1 files skipped, which are not UTF-8 text\n" in run(*words, tmp_path / "c", "--skip-binary").stdout


def test_bad_input_writes_nothing(run: Run, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def fails(*words: object, said: str, **more: str | bytes) -> None:
        refused(run("tokenizer", "train", *words, out, **more), said)
        assert not [path for path in tmp_path.iterdir() if "out" in path.name]

    fails(text, "--vocab-size", 255, said="vocab_size: must be 256 .* got 255")
    fails(text, "--vocab-size", 257, "--eos", "<a>", "--special", "<b>", said="must be 258")
    fails(
        text,
        "--vocab-size",
        10**5,
        said=r"more pairs .* after [\d,]+ tokens .got 100000; must be at most [\d,]+.; give",
    )
    fails(text, "--vocab-size", 300, "--pattern", "cl100", said="pattern: must be .* did you mean 'cl100k'")
    fails(text, "--vocab-size", 300, "--special", "a b", said="special: must be printable")
    fails("--vocab-size", 300, said="texts: empty")
    fails("-", "--vocab-size", 300, said="texts: empty", input="")
    fails("-", "--vocab-size", 300, said="stdin: not UTF-8 text: .* at byte 3", input=b"abc\xff")
    fails(sys.executable, "--vocab-size", 300, said="not UTF-8 text")
    fails(tmp_path / "none.txt", "--vocab-size", 300, said="none.txt: cannot be read")
    fails(text, "--vocab-size", 300, "--min-count", 0, said="min_count: must be at least 1")
    out.mkdir()
    (out / "mine").write_text("x")
    refused(run("tokenizer", "train", text, out, "--vocab-size", 300), "out: already exists")
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_an_interrupted_training_writes_nothing(tmp_path: Path) -> None:
    """It waits for a text that does not end."""
    words = [sys.executable, "-m", "asbuilt", "tokenizer", "train", "-", str(tmp_path / "out"), "--vocab-size", "300"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as ran:
        assert ran.stdin is not None
        assert ran.stderr is not None
        ran.stdin.write(b"some text " * 10**6)
        ran.stdin.flush()
        while not list(tmp_path.iterdir()):
            assert ran.poll() is None
        ran.send_signal(signal.SIGINT)
        assert ran.wait(timeout=60) == 130
        assert ran.stderr.read() == b""
    assert not list(tmp_path.iterdir())


@pytest.fixture
def two(run: Run, text: Path, tmp_path: Path) -> list[Path]:
    """A tokenizer of bytes, and one that learned from the text."""
    made = [tmp_path / "bytes", tmp_path / "better"]
    for out, size in zip(made, (256, 330), strict=True):
        assert run("tokenizer", "train", text, out, "--vocab-size", size).exit_code == 0
    return made


def test_compared_by_kind_of_text(run: Run, text: Path, two: list[Path]) -> None:
    said = json.loads(run("tokenizer", "compare", *two, "--text", f"mine={text}", "--text", text, "--json").stdout)
    n_bytes, n_tokens = text.stat().st_size, len(Tokenizer.from_file(two[1]).encode(text.read_text(encoding="utf-8")))
    row = {
        "kind": "mine",
        "bytes": n_bytes,
        "characters": len(text.read_text(encoding="utf-8")),
        "tokens": [n_bytes, n_tokens],
        "bytes_per_token": [1.0, n_bytes / n_tokens],
        "change": [0.0, n_tokens / n_bytes - 1],
    }
    assert said["rows"] == [row, row | {"kind": "some.txt"}]
    assert said["tokenizers"] == [{"name": str(two[0]), "n_vocab": 256}, {"name": str(two[1]), "n_vocab": 330}]
    shown = run("tokenizer", "compare", two[0] / "tokenizer.json", two[1]).stdout
    assert re.search(r"text +bytes +bytes +better +change better\n +prose +\d+ +1.00 +\d\.\d\d +[+-]\d+%", shown)
    assert len(re.findall(r"^  (prose|code|digits|telugu|chinese) ", shown, re.MULTILINE)) == 5
    assert "better: 330 tokens" in shown
    refused(run("tokenizer", "compare", two[0], text), "must be a .json or .gguf file")
    refused(run("tokenizer", "compare", two[0], "--text", "x=none.txt"), "--text: cannot be read")
    refused(run("tokenizer", "compare", "gpt2"), "TOKENIZER: has no tokenizer")


def test_cut_step_by_step(run: Run, two: list[Path], text: Path) -> None:
    line = text.read_text(encoding="utf-8")[:40] + "É"
    said = json.loads(run("tokenizer", "cut", line, "--tokenizer", two[1], "--json").stdout)
    ids = [id_ for one in said["pre_tokens"] for id_ in one["ids"]]
    assert ids == Tokenizer.from_file(two[1]).encode(line)
    assert said["pre_tokens"][-1]["tokens"][-2:] == ["\\xc3", "\\x89"]
    steps = [step for one in said["pre_tokens"] for step in one["steps"]]
    assert steps
    assert all("".join(step["pair"]) in step["tokens"] for step in steps if "\\" not in "".join(step["pair"]))
    shown = run("tokenizer", "cut", line, "--tokenizer", two[1]).stdout
    assert f"{len(line.encode())} bytes, {len(said['pre_tokens'])} pre-tokens, {len(ids)} tokens" in shown
    assert len(re.findall(r"^ +\d+ +\d+ ", shown.split("Merges")[1], re.MULTILINE)) == len(steps)


def test_patterns_alone(run: Run) -> None:
    """The example of the documentation: a Telugu word and a number."""
    for pattern, wanted in (("cl100k", ["త", "ెల", "ుగ", "ు", "123", "45"]), ("o200k", ["తెలుగు", "123", "45"])):
        said = json.loads(run("tokenizer", "cut", "తెలుగు12345", "--pattern", pattern, "--json").stdout)
        assert [one["text"] for one in said["pre_tokens"]] == wanted
        assert b"".join(bytes(one["bytes"]) for one in said["pre_tokens"]).decode() == "తెలుగు12345"
        shown = run("tokenizer", "cut", "తెలుగు12345", "--pattern", pattern).stdout
        assert f"Pre-tokens of {pattern}" in shown
        assert "31 32 33" in shown
    assert json.loads(run("tokenizer", "cut", "it's", "--json").stdout)["pattern"] == "gpt2"
    refused(run("tokenizer", "cut", "x", "--pattern", "o20k"), "pattern: must be gpt2")
    both = run("tokenizer", "cut", "x", "--pattern", "gpt2", "--tokenizer", "y")
    assert both.exit_code == 2


def test_long_texts_show_some_merges(run: Run, two: list[Path], text: Path) -> None:
    line = text.read_text(encoding="utf-8")[:3000]
    said = json.loads(run("tokenizer", "cut", line, "--tokenizer", two[1], "--json").stdout)
    n_steps = sum(len(one["steps"]) for one in said["pre_tokens"])
    assert f"{n_steps - 200:,} more merges" in run("tokenizer", "cut", line, "--tokenizer", two[1]).stdout
    refused(run("tokenizer", "cut", "a" * 70_000, "--tokenizer", two[1]), "TEXT: too long")

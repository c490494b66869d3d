"""Texts from files: pieces whose pre-tokens are those of the whole, and what is refused by name and place."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asbuilt.errors import InputError
from asbuilt.text import sources
from asbuilt.text.sources import cut, files, pieces
from asbuilt.text.train import pre_tokens, train

CHARACTERS = st.text(st.sampled_from("aé1½/!'s_ \t\n\n\r\x1c\x85\u2028తె日"), max_size=80)


@given(CHARACTERS, st.integers(1, 12), st.sampled_from(["gpt2", "cl100k", "o200k"]))
def test_no_pre_token_crosses_a_piece(text: str, size: int, pattern: str) -> None:
    made = [piece.text for piece in cut([text], size)]
    assert "".join(made) == text
    assert [token for piece in made for token in pre_tokens(piece, pattern)] == pre_tokens(text, pattern)


def test_pieces_do_not_depend_on_blocks_and_are_bounded() -> None:
    for _ in range(50):
        text = "".join(random.choices("ab  \n,", k=random.randint(0, 300)))
        size, longest = random.randint(1, 20), random.randint(21, 60)
        wanted = [*cut([text], size, longest)]
        assert max(len(piece.text) for piece in wanted) <= longest
        assert [piece.ends for piece in wanted] == [False] * (len(wanted) - 1) + [True]
        for width in (1, 7, 64):
            assert [*cut((text[i : i + width] for i in range(0, len(text), width)), size, longest)] == wanted
    assert [piece.text for piece in cut(["x" * 100], 10, 40)] == ["x" * 40, "x" * 40, "x" * 20]


def test_lines_without_a_pattern_are_tokenised_alike() -> None:
    """Merges that were learned within lines cross none."""
    text = "".join(random.choices("ab\n ", k=3000))
    made = train([text], 300, pattern="none")
    assert made.encode(text) == [id_ for line in text.splitlines(keepends=True) for id_ in made.encode(line)]


def documents(names: list[str], key: str = "text") -> list[str]:
    made, held = [], ""
    for piece in pieces(names, key=key):
        held += piece.text
        if piece.ends:
            made.append(held)
            held = ""
    assert held == ""
    return made


def test_files_folders_and_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b" / ".hidden").mkdir(parents=True)
    written = {"b/2.txt": "two é", "b/1.md": "one\r\n", "b/.hidden/3.txt": "no", "b/4.png": "\0", "b/5.c": "int"}
    for name, text in written.items():
        (tmp_path / name).write_bytes(text.encode())
    lines = [{"text": "a\nb", "n": 1}, {"text": ""}, {"text": "c", "other": "d"}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    names = files([str(tmp_path / "b"), str(tmp_path / "c.jsonl")])
    assert documents(names) == ["one\r\n", "two é", "a\nb", "", "c"]
    assert documents(files([str(tmp_path / "b")], "*.c")) == ["int"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\ufeffüber".encode())))
    assert documents(files(["-"])) == ["über"]
    (tmp_path / "c.jsonl").write_text(json.dumps({"other": "d"}))
    assert documents([str(tmp_path / "c.jsonl")], key="other") == ["d"]


def test_files_of_folders_that_are_no_text_are_left_out_if_asked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * random.randint(0, 1 << 21) + b"\xff")
    (tmp_path / "b.txt").write_text("good")
    (tmp_path / "c.txt").write_bytes(b"a\0")
    skipped: list[InputError] = []
    assert documents(files([str(tmp_path)], skip=skipped.append)) == ["good"]
    assert [error.field for error in skipped] == [str(tmp_path / "a.txt"), str(tmp_path / "c.txt")]
    named = files([str(tmp_path / "c.txt")], skip=skipped.append)
    with pytest.raises(InputError, match="NUL at byte 1"):
        documents(named)


def test_progress_is_of_bytes(tmp_path: Path) -> None:
    text = "word " * random.randint(300_000, 500_000)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(text)
    seen: list[tuple[int, int]] = []
    made = [*pieces(files([str(tmp_path)]), progress=lambda done, whole: seen.append((done, whole)))]
    assert sum(len(piece.text) for piece in made) == 2 * len(text)
    assert max(len(piece.text) for piece in made) < 2 * sources.PIECE
    assert seen[-1] == (2 * len(text), 2 * len(text))
    assert seen == sorted(seen)
    assert len(seen) > 2


def test_what_is_no_text_is_refused_where_it_is(tmp_path: Path) -> None:
    good = "é" * random.randint(0, 1 << 20)
    at = len(good.encode())

    def refused(data: bytes, said: str, name: str = "x.txt") -> None:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=said):
            list(pieces([str(tmp_path / name)]))

    refused(good.encode() + b"\xff" + b"a" * 10, f"x.txt: not UTF-8 text: invalid start byte at byte {at}")
    refused(good.encode() + b"\xc3", f"unexpected end of data at byte {at}")
    refused(good.encode() + b"a\0b", f"NUL at byte {at + 1}")
    refused(b'{"text": "a"}\n{"texts": 1}', r"x.jsonl: line 2: has no text .*\"text\"", "x.jsonl")
    refused(b"[1]", "line 1: has no text", "x.jsonl")
    refused(b'{"text": "\xff"}', "line 1: not UTF-8", "x.jsonl")
    refused(b"{", "line 1: not JSON", "x.jsonl")


def test_files_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="none: cannot be read"):
        files([str(tmp_path / "none")])
    with pytest.raises(InputError, match=r"has no texts .*end in .txt, .md, .rst, .py or .jsonl"):
        files([str(tmp_path)])
    with pytest.raises(InputError, match=r"files named \*.c"):
        files([str(tmp_path)], "*.c")
    with pytest.raises(InputError, match="stdin can be read once"):
        files(["-", "-"])
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="stdin: is closed"):
        list(pieces(["-"]))

"""Token shards: what is written is what is read, from anywhere; half-written and damaged folders are refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch

from asbuilt.errors import InputError
from asbuilt.text.sources import Piece, files
from asbuilt.text.tokenizer import Tokenizer
from asbuilt.text.train import train
from asbuilt.train import shards as module
from asbuilt.train.shards import Shards, cached_shards, open_shards, write_shards


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A vocabulary of bytes and an end token, in this process."""
    return train([], 257, roles={"eos_token": "<|end|>"})


def texts(n: int, most: int = 30) -> list[str]:
    return ["".join(random.choices("abé \n", k=random.randint(0, most))) for _ in range(n)]


def pieces(documents: list[str]) -> Iterator[Piece]:
    """Documents, some in several pieces."""
    for text in documents:
        at = random.randint(0, len(text))
        if at:
            yield Piece(text[:at], False)
        yield Piece(text[at:], True)


def written(
    folder: Path, documents: list[str], tokenizer: Tokenizer, shard: int = module.SHARD
) -> tuple[Shards, list[list[int]]]:
    made = write_shards(folder, pieces(documents), [tokenizer], end_id=256, shard=shard)
    return made, [[*tokenizer.encode(text), 256] for text in documents if text]


def test_what_is_written_is_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """From any place to any other, over the ends of files; and of which document each token is."""
    made, wanted = written(tmp_path / "s", texts(60), tokenizer, shard=random.randint(3, 40))
    whole = [id_ for one in wanted for id_ in one]
    numbers = [i for i, one in enumerate(wanted) for _ in one]
    assert len(made) == len(whole)
    assert made.n_documents == len(wanted)
    assert made.ends.tolist() == list(accumulate(map(len, wanted)))
    assert len(made.files) == -(-len(whole) // made.files[0].tokens) > 1
    for _ in range(100):
        start, stop = sorted(random.choices(range(len(whole) + 1), k=2))
        assert made.tokens(start, stop).tolist() == whole[start:stop]
        assert made.documents(start, stop).tolist() == numbers[start:stop]
    assert made.tokens(0, len(whole)).dtype == torch.int64
    for start, stop in ((-1, 3), (5, 4), (0, len(whole) + 1)):
        with pytest.raises(IndexError):
            made.tokens(start, stop)
    made.verify()
    assert open_shards(tmp_path / "s") == made


def test_bytes_on_disk(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Two bytes an id while the vocabulary allows, four beyond."""
    made, wanted = written(tmp_path / "s", texts(9), tokenizer)
    whole = [id_ for one in wanted for id_ in one]
    assert np.fromfile(tmp_path / "s" / made.files[0].name, "<u2").tolist() == whole
    assert np.fromfile(tmp_path / "s" / "documents.bin", "<i8").tolist() == made.ends.tolist()
    assert sorted(os.listdir(tmp_path / "s")) == ["00000.bin", "documents.bin", "index.json"]
    large = write_shards(tmp_path / "l", pieces(["ab"]), [tokenizer], end_id=1 << 16)
    assert np.fromfile(tmp_path / "l" / "00000.bin", "<u4").tolist() == [*tokenizer.encode("ab"), 1 << 16]
    assert large.n_vocab == (1 << 16) + 1
    assert large.tokens(0, 3).tolist() == [*tokenizer.encode("ab"), 1 << 16]


def test_no_end_token_and_no_documents(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = write_shards(tmp_path / "s", pieces(["ab", "", "c"]), [tokenizer])
    assert (len(made), made.ends.tolist(), made.end_id) == (3, [2, 3], None)
    for documents in ([], ["", ""]):
        with pytest.raises(InputError, match="texts: empty"):
            write_shards(tmp_path / "none", pieces(documents), [tokenizer], end_id=256)
    assert os.listdir(tmp_path) == ["s"]


def test_what_reading_raises_leaves_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def broken() -> Iterator[Piece]:
        yield Piece("abc", True)
        raise InputError("broken")

    for copies in ([tokenizer], [tokenizer, tokenizer]):
        with pytest.raises(InputError, match="broken"):
            write_shards(tmp_path / "s", broken(), copies)
    assert os.listdir(tmp_path) == []
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "mine").write_text("x")
    with pytest.raises(InputError, match="already exists"):
        write_shards(tmp_path / "s", pieces(["a"]), [tokenizer])


def test_several_processes_write_the_same(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path / "tok")
    documents = texts(150)
    one, wanted = written(tmp_path / "one", documents, tokenizer)
    copies = [Tokenizer.from_file(tmp_path / "tok") for _ in range(3)]
    several = write_shards(tmp_path / "several", pieces(documents), copies, end_id=256)
    assert several.files == one.files
    assert several.ends.tolist() == one.ends.tolist()
    assert several.tokens(0, len(several)).tolist() == [id_ for ids in wanted for id_ in ids]


def test_the_end_token_is_put_by_default(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path / "tok")
    (tmp_path / "a.txt").write_text("abc")
    made = cached_shards(tmp_path / "cache", [str(tmp_path / "a.txt")], tmp_path / "tok", workers=1)
    assert made.tokens(0, len(made)).tolist() == [*tokenizer.encode("abc"), 256]


def test_few_pieces_are_read_ahead_and_none_after_the_end_of_interest(tokenizer: Tokenizer) -> None:
    """Whoever stops reading does not wait, and pieces that no worker has begun are left."""
    begun, go, held = threading.Event(), threading.Event(), []

    class Slow:
        def encode(self, text: str) -> list[int]:
            begun.set()
            assert text == "0" or go.wait(60)
            held.append(text)
            return [0]

    read: list[int] = []

    def many() -> Iterator[Piece]:
        for number in range(1000):
            read.append(number)
            yield Piece(str(number), True)

    copies = [Slow(), Slow()]
    made = module._encoded(many(), copies)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert next(made) == (Piece("0", True), [0])
    assert len(read) == module.WAITING * len(copies) + 1  # as many wait, and the one that was yielded
    assert begun.is_set()
    assert isinstance(made, Generator)
    made.close()  # both workers still wait here
    go.set()
    for worker in threading.enumerate():
        if worker.name.startswith("ThreadPoolExecutor"):
            worker.join(60)
    assert len(held) <= 1 + len(copies)


def test_tokenised_once(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time nothing is read; a changed text, tokenizer or setting is another folder."""
    tokenizer.save(tmp_path / "tok")
    (tmp_path / "text").mkdir()
    for name in "ab":
        (tmp_path / "text" / f"{name}.txt").write_text(f"text of {name}" * 20)
    names = files([str(tmp_path / "text")])
    seen: list[tuple[int, int]] = []

    def cached(end: bool = True) -> Shards:
        root, folder = tmp_path / "cache", tmp_path / "tok"
        return cached_shards(root, names, folder, workers=2, end=end, progress=lambda a, b: seen.append((a, b)))

    made = cached()
    assert made.end_id == 256
    assert made.n_documents == 2
    assert made.tokens(0, len(made)).tolist()[-1] == 256
    assert seen[-1] == (360, 360)
    seen.clear()
    assert cached() == made
    assert seen == []
    assert cached(end=False).end_id is None
    assert len(os.listdir(tmp_path / "cache")) == 2
    (tmp_path / "text" / "a.txt").write_text("another text")
    changed = cached()
    assert changed.origin != made.origin
    assert len(changed) != len(made)

    def late(folder: Path, *_: object, **__: object) -> Shards:
        """Another rank has written the folder in the meantime."""
        write_shards(folder, pieces(["x"]), [tokenizer], end_id=256)
        raise InputError("already exists")

    (tmp_path / "text" / "a.txt").write_text("a third text")
    monkeypatch.setattr(module, "write_shards", late)
    assert len(cached()) == 2


def test_killed_while_writing(tmp_path: Path) -> None:
    """What is left is no shards folder, and the next writing removes it."""
    script = """
import sys, time
from asbuilt.text.sources import Piece
from asbuilt.text.train import train
from asbuilt.train.shards import write_shards
def pieces():
    for i in range(10**9):
        yield Piece("text " * 1000, True)
        if i == 20: print("go", flush=True); time.sleep(100)
write_shards(sys.argv[1], pieces(), [train([], 256)])
"""
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "s")], stdout=subprocess.PIPE) as ran:
        assert ran.stdout is not None
        assert ran.stdout.readline() == b"go\n"
        ran.send_signal(signal.SIGKILL)
    assert not (tmp_path / "s").exists()
    assert len(os.listdir(tmp_path)) == 1
    with pytest.raises(InputError, match="cannot be read"):
        open_shards(tmp_path / "s")
    write_shards(tmp_path / "s", pieces(["a"]), [train([], 256)])
    assert os.listdir(tmp_path) == ["s"]


def test_a_full_disk_is_said(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(module._Writer):
        def add(self, ids: object, ends: bool) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_Writer", Full)
    with pytest.raises(InputError, match="s: cannot be written: No space left on device"):
        write_shards(tmp_path / "s", pieces(["a"]), [tokenizer])
    assert os.listdir(tmp_path) == []


def test_damage_is_noticed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made, _ = written(tmp_path / "s", texts(40), tokenizer, shard=50)
    folder = tmp_path / "s"
    index = (folder / "index.json").read_text()

    def refused(said: str) -> None:
        with pytest.raises(InputError, match=said):
            open_shards(folder)

    path = folder / made.files[0].name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    refused(f"00000.bin: damaged: {len(data) - 1} bytes instead of {len(data)}")
    at = random.randrange(len(data))
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(InputError, match=r"00000\.bin: damaged: its checksum differs"):
        open_shards(folder).verify()
    path.unlink()
    refused("00000.bin: cannot be read")
    path.write_bytes(data)
    open_shards(folder).verify()
    ends = (folder / "documents.bin").read_bytes()
    (folder / "documents.bin").write_bytes(ends[8:])
    refused("documents.bin: damaged")
    (folder / "documents.bin").write_bytes(ends[:-8] + bytes(8))
    refused("documents do not end where the tokens do")
    (folder / "documents.bin").write_bytes(ends)
    said = json.loads(index)
    for key, value, problem in (
        ("format", 2, "format: must be 1"),
        ("n_vocab", -1, "damaged"),
        ("documents", "x", "damaged"),
        ("files", [], "damaged"),
        ("files", [{"name": "../s/00000.bin", "tokens": 50, "crc": 0}], "a file outside the folder"),
        ("files", 3, "damaged"),
    ):
        (folder / "index.json").write_text(json.dumps(said | {key: value}))
        refused(problem)
    (folder / "index.json").write_text(json.dumps({key: value for key, value in said.items() if key != "origin"}))
    refused("damaged: KeyError")

"""`asbuilt diff`: where two checkpoints part, by how much, on which text, and what the exit code says."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file

import asbuilt.api.diff
import asbuilt.checkpoint.source
import asbuilt.inspect
import asbuilt.memory
from asbuilt.catalog import find
from asbuilt.checkpoint.load import Contents
from asbuilt.checkpoint.source import open_model
from asbuilt.families import write_config
from asbuilt.inspect import Difference

Run = Callable[..., Result]
TEXT = "An as-built drawing records what was really built."  # 50 bytes, so 50 tokens of the tiny tokenizer
CHANGED = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def other(checkpoint: Path, tmp_path: Path) -> Callable[[float], Path]:
    """A copy of the checkpoint with one matrix of the second block scaled."""

    def scaled(factor: float) -> Path:
        folder = tmp_path / f"other-{factor}"
        shutil.copytree(checkpoint, folder)
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {CHANGED: tensors[CHANGED] * factor}, folder / "model.safetensors")
        return folder

    return scaled


def test_the_same(run: Run, checkpoint: Path) -> None:
    result = run("diff", checkpoint, checkpoint)
    assert result.exit_code == 0
    _, title, header, row = result.stdout.splitlines()
    assert title.startswith("equal within 0.0001; ")
    assert header.split("  ")[1].strip() == "path"
    assert row.split() == ["logits", "0"]
    assert result.stderr == "read: the text's first 50 tokens of 50\n"
    document = json.loads(run("diff", checkpoint, checkpoint, "--json").stdout)
    assert (document["same"], document["first"], document["unread"]) == (True, None, [])
    assert {row["relative"] for row in document["rows"]} == {0.0}


def test_where_they_part(run: Run, checkpoint: Path, other: Callable[[float], Path]) -> None:
    """The matrix is doubled, so what it gives differs by half of what the second gives."""
    twice = other(2.0)
    result = run("diff", checkpoint, twice, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    rows = {row["path"]: row["relative"] for row in document["rows"]}
    assert not document["same"]
    assert document["first"] == "blocks.1.ffn.body.down"
    assert rows["blocks.1.ffn.body.down"] == pytest.approx(0.5, rel=1e-5)
    before = document["rows"][: [*rows].index(document["first"])]
    assert before
    assert {row["relative"] for row in before} == {0.0}
    assert all(path.startswith(("blocks.1.ffn", "blocks.1", "norm", "head", "logits")) for path, x in rows.items() if x)
    table = run("diff", checkpoint, twice)
    assert table.exit_code == 1
    _, title, _, *lines = table.stdout.splitlines()
    assert title == f"first divergence at {document['first']}; {len(rows):,} paths compared"
    paths = [line.split()[0] for line in lines]
    at = [*rows].index(document["first"])
    assert paths == [*rows][at - 2 : at + 10]
    assert lines[0].split()[1] == "0"
    assert float(lines[2].split()[1]) == pytest.approx(rows[document["first"]], rel=0.01)


def test_the_tolerance_decides(run: Run, checkpoint: Path, other: Callable[[float], Path]) -> None:
    slightly = other(1 + 1e-3)
    largest = max(row["relative"] for row in json.loads(run("diff", checkpoint, slightly, "--json").stdout)["rows"])
    assert 1e-4 < largest < 0.1
    assert run("diff", checkpoint, slightly).exit_code == 1
    assert run("diff", checkpoint, slightly, "--tolerance", largest * 1.01).exit_code == 0
    assert run("diff", checkpoint, slightly, "--tolerance", largest * 0.99).exit_code == 1
    assert run("diff", checkpoint, slightly, "--tolerance", "nan").exit_code == 2
    assert run("diff", checkpoint, checkpoint, "--tolerance", 0).exit_code == 0
    assert run("diff", checkpoint, checkpoint, "--tolerance", -1).exit_code == 2


def test_what_is_read(run: Run, checkpoint: Path) -> None:
    """A context of 64 tokens, one token a byte."""
    for text, said in (("abc", "first 3 tokens of 3"), ("x" * 100, "first 64 tokens of 100")):
        assert (
            json.loads(run("diff", checkpoint, checkpoint, "--text", text, "--json").stdout)["read"]
            == f"the text's {said}"
        )
    (checkpoint / "tokenizer.json").unlink()
    document = json.loads(run("diff", checkpoint, checkpoint, "--json").stdout)
    assert document["read"] == "32 fixed token ids, since there is no tokenizer"
    refused = run("diff", checkpoint, checkpoint, "--text", "abc")
    assert (refused.exit_code, "neither model has a tokenizer" in refused.stderr) == (2, True)


def test_what_is_no_number_on_one_side_is_null(run: Run, checkpoint: Path, other: Callable[[float], Path]) -> None:
    document = json.loads(run("diff", checkpoint, other(float("nan")), "--json").stdout, parse_constant=pytest.fail)
    assert not document["same"]
    assert None in {row["relative"] for row in document["rows"]}


def test_words(run: Run, checkpoint: Path) -> None:
    alone = run("diff", checkpoint)
    assert (alone.exit_code, "SECOND: missing" in alone.stderr) == (2, True)
    for name in ("clip-vit-base-patch32", "gpt2"):
        refused = run("diff", name, name)
        assert (refused.exit_code, "no weights" in refused.stderr) == (2, True)


# Differences that are known.

FOUND = [Difference(path=f"blocks.{i}", relative=0.0) for i in range(6)]
FOUND += [Difference(path="norm", relative=0.012345), Difference(path="head", relative=None)]
FOUND += [Difference(path=f"more.{i}", relative=1 / 3) for i in range(9)] + [Difference(path="", relative=0.5)]


def told(run: Run, monkeypatch: pytest.MonkeyPatch, found: list[Difference], *words: object) -> tuple[int, list[str]]:
    """The exit code and the lines behind the header."""
    monkeypatch.setattr(asbuilt.inspect, "diff", lambda *_: found)
    result = run("diff", *words)
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, result.stdout.splitlines()[1:]


def test_twelve_paths_from_two_before_the_first(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, (title, header, *lines) = told(run, monkeypatch, FOUND, checkpoint, checkpoint)
    assert (code, title) == (1, "first divergence at norm; 18 paths compared")
    assert header.split() == ["path", "relative", "difference"]
    assert [re.split("  +", line.strip()) for line in lines] == [
        ["blocks.4", "0"],
        ["blocks.5", "0"],
        ["norm", "0.0123"],
        ["head", "different shape"],
        *([f"more.{i}", "0.333"] for i in range(8)),
    ]
    for first, shown in ((0, 12), (1, 12), (2, 12), (3, 12)):
        moved = [Difference(path=f"p{i}", relative=float(i == first)) for i in range(20)]
        code, (title, _, *lines) = told(run, monkeypatch, moved, checkpoint, checkpoint)
        assert (code, title, len(lines)) == (1, f"first divergence at p{first}; 20 paths compared", shown)
        assert lines[0].split()[0] == f"p{max(0, first - 2)}"


def test_the_logits_are_called_so(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = [*FOUND[:6], Difference(path="", relative=0.25)]
    code, (title, _, *lines) = told(run, monkeypatch, last, checkpoint, checkpoint)
    assert (code, title) == (1, "first divergence at the logits; 7 paths compared")
    assert [line.split() for line in lines] == [["blocks.4", "0"], ["blocks.5", "0"], ["logits", "0.25"]]
    code, (title, _, *lines) = told(run, monkeypatch, last, checkpoint, checkpoint, "--tolerance", "0.2500001")
    assert (code, title) == (0, "equal within 0.25; 7 paths compared")
    assert [line.split() for line in lines] == [["logits", "0.25"]]
    document = json.loads(run("diff", checkpoint, checkpoint, "--json").stdout)
    assert document == {
        "same": False,
        "first": "logits",
        "read": "the text's first 50 tokens of 50",
        "unread": [],
        "rows": [*({"path": f"blocks.{i}", "relative": 0.0} for i in range(6)), {"path": "logits", "relative": 0.25}],
    }


class TestTransformers:
    """What is handed to transformers, which is not run."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        found: list[Any] = []

        def compare(model: Any, folder: Path, family: str, tokens: torch.Tensor) -> list[Difference]:  # noqa: ANN401
            found.append((model.spec.name, folder, family, tokens.shape))
            return [Difference(path="blocks.0", relative=0.5), Difference(path="", relative=0.25)]

        monkeypatch.setattr(asbuilt.inspect, "diff_transformers", compare)
        monkeypatch.setattr(asbuilt.inspect, "diff", lambda *_: pytest.fail("compared by ourselves"))
        return found

    def test_one_checkpoint_and_two(
        self, run: Run, checkpoint: Path, other: Callable[[float], Path], asked: list[Any]
    ) -> None:
        second = other(2.0)
        for folders in ((checkpoint,), (checkpoint, second)):
            result = run("diff", *folders, "--transformers", "--json")
            assert (result.exit_code, json.loads(result.stdout)["first"]) == (1, "blocks.0")
            assert asked.pop() == (checkpoint.name, folders[-1], "llama", (1, 50))
            assert run("diff", *folders, "--transformers", "--tolerance", 0.3).exit_code == 0  # the logits agree

    def test_tensors_of_the_second_are_held_against_its_config(
        self, run: Run, checkpoint: Path, other: Callable[[float], Path], asked: list[Any]
    ) -> None:
        second = other(2.0)
        tensors = load_file(second / "model.safetensors")
        save_file({name: t for name, t in tensors.items() if name != CHANGED}, second / "model.safetensors")
        result = run("diff", checkpoint, second, "--transformers")
        assert (result.exit_code, asked) == (2, [])
        assert CHANGED in result.stderr

    def test_two_models_are_there_at_once(
        self, run: Run, checkpoint: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        needed = Contents(open_model(checkpoint)).needs("float32")
        for free, code in ((2 * needed, 1), (2 * needed - 1, 2)):
            monkeypatch.setattr(asbuilt.memory, "free", lambda free=free: free)
            assert run("diff", checkpoint, "--transformers").exit_code == code
        assert len(asked) == 1

    def test_what_it_cannot_run(self, run: Run, checkpoint: Path, tmp_path: Path, asked: list[Any]) -> None:
        """A description is no folder, and images beside a text are none of it."""
        alone = tmp_path / "other.json"
        alone.write_text((checkpoint / "config.json").read_text())
        refused = run("diff", checkpoint, alone, "--transformers")
        assert (refused.exit_code, "cannot be run by transformers" in refused.stderr) == (2, True)
        for name, said in (
            ("clip-vit-base-patch32", "reads images beside texts, and only text models are compared"),
            ("vit-base-patch16-224", "reads images, and only text models are compared"),
        ):
            folder = tmp_path / name
            folder.mkdir()
            row = find(name)
            (folder / "config.json").write_text(json.dumps(write_config(row.family, row.spec(), {}, "float32")))
            refused = run("diff", folder, "--transformers")
            assert (refused.exit_code, said in refused.stderr) == (2, True), refused.output
        assert asked == []


@pytest.mark.parametrize("seeing", [(False, False), (False, True), (True, False), (True, True)], ids=str)
def test_no_image_is_read(
    run: Run, checkpoint: Path, seeing: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either of the two models that sees is enough to say so."""
    sees = iter(seeing)
    plain = open_model(checkpoint)
    tower = replace(plain, reading=replace(plain.reading, spec=Seeing(plain.spec)))  # type: ignore[arg-type]
    monkeypatch.setattr(asbuilt.checkpoint.source, "open_model", lambda *_, **__: tower if next(sees) else plain)
    monkeypatch.setattr(asbuilt.api.diff, "_between", lambda *_: ([Difference(path="", relative=0.0)], None))
    result = run("diff", checkpoint, checkpoint)
    assert result.exit_code == 0, result.output
    more = "; no image, so nothing below vision was compared" if any(seeing) else ""
    assert result.stderr == f"read: the text's first 50 tokens of 50{more}\n"
    sees = iter(seeing)
    document = json.loads(run("diff", checkpoint, checkpoint, "--json").stdout)
    assert document["unread"] == (["vision"] if any(seeing) else [])


class Seeing:
    """A description that says that it sees, and is another in all else."""

    reads = ("tokens", "images")

    def __init__(self, spec: Any) -> None:  # noqa: ANN401
        self._spec = spec

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._spec, name)


def test_fixed_ids_where_there_is_no_tokenizer(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The i-th is 7919 i modulo the smaller vocabulary; as many as the smaller context holds, at most 32."""
    seen: list[list[int]] = []
    monkeypatch.setattr(asbuilt.api.diff, "_between", lambda _, ids, __: seen.append(ids) or (FOUND[:1], None))
    (checkpoint / "tokenizer.json").unlink()
    small = checkpoint.parent / "small"
    shutil.copytree(checkpoint, small)
    config = json.loads((small / "config.json").read_text())
    for changes, n_vocab, n in (
        ({}, 257, 32),
        ({"vocab_size": 100}, 100, 32),
        ({"max_position_embeddings": 20}, 257, 20),
    ):
        (small / "config.json").write_text(json.dumps(config | changes))
        for pair in ((checkpoint, small), (small, checkpoint)):
            result = run("diff", *pair)
            assert result.stderr == f"read: {n} fixed token ids, since there is no tokenizer\n"
            assert seen.pop() == [7919 * i % n_vocab for i in range(n)]


def test_a_text_that_both_know(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token a byte, and the byte A has the 33rd place of the printing ones: 32."""
    seen: list[list[int]] = []
    monkeypatch.setattr(asbuilt.api.diff, "_between", lambda _, ids, __: seen.append(ids) or (FOUND[:1], None))
    small = checkpoint.parent / "small"
    shutil.copytree(checkpoint, small)
    config = json.loads((small / "config.json").read_text())
    for n_vocab, code in ((33, 0), (32, 2)):
        (small / "config.json").write_text(json.dumps(config | {"vocab_size": n_vocab}))
        (small / "tokenizer.json").unlink(missing_ok=True)
        for pair in ((checkpoint, small), (small, checkpoint)):  # whichever of the two has the tokenizer
            result = run("diff", *pair, "--text", "!A")
            assert result.exit_code == code, result.output
            assert ("has no token that both models know" in result.stderr) == (code == 2)
    assert seen == [[0, 32]] * 2
    empty = run("diff", checkpoint, checkpoint, "--text", "")
    assert (empty.exit_code, "has no token" in empty.stderr) == (2, True)

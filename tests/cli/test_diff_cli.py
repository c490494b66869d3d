"""`asbuilt diff`: where two checkpoints part, by how much, on which text, and what the exit code says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file

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
    assert title.startswith("the same within 0.0001; ")
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
    assert title == f"they part at {document['first']}; {len(rows):,} paths compared"
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
    assert document["read"] == "32 fixed token ids, for there is no tokenizer"
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

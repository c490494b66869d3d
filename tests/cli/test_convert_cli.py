"""`asbuilt convert`: what is written runs alike, and nothing is left of what was not finished."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import Result

import asbuilt.cli.convert
from asbuilt.checkpoint.load import load
from asbuilt.cli.convert import Bar
from asbuilt.formats.safetensors import read_header

Run = Callable[..., Result]


def test_written_folder_holds_the_same_weights(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("convert", checkpoint, out, "--json")
    assert result.exit_code == 0, result.output
    files = json.loads(result.stdout)["files"]
    assert files == {path.name: path.stat().st_size for path in out.iterdir()}
    before, after = load(checkpoint).state_dict(), load(out).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    words = ("once upon", "--max-new-tokens", 9, "--json")
    texts = [json.loads(run("generate", folder, *words).stdout)["text"] for folder in (checkpoint, out)]
    assert texts[0] == texts[1]


def test_dtype_and_shards(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    limit = 20_000
    result = run("convert", checkpoint, tmp_path / "out", "--dtype", "bf16", "--max-shard-size", f"{limit / 1000}KB")
    assert result.exit_code == 0, result.output
    assert {p.dtype for p in load(tmp_path / "out").parameters()} == {torch.bfloat16}
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1


def test_interrupted_conversion_leaves_nothing(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def interrupt(self: Bar, done: int, whole: int) -> None:
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
        if done:
            raise KeyboardInterrupt

    monkeypatch.setattr(Bar, "__call__", interrupt)
    before = sorted(path.name for path in tmp_path.iterdir())
    result = run("convert", checkpoint, tmp_path / "out")
    assert result.exit_code == 130
    assert result.stdout == ""
    assert any(len(names) > len(before) for names in seen), "the interruption came before anything was written"
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_full_folder_is_not_touched(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "kept").write_text("mine")
    result = run("convert", checkpoint, out)
    assert result.exit_code == 2
    assert [path.name for path in out.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("text", "shards"), [("5KB", 5_000), ("3 KiB", 3_072), ("0.5GB", 500_000_000), ("2e6", 2_000_000)]
)
def test_sizes(run: Run, checkpoint: Path, tmp_path: Path, text: str, shards: int) -> None:
    assert run("convert", checkpoint, tmp_path / "out", "--max-shard-size", text).exit_code == 0
    files = list((tmp_path / "out").glob("*.safetensors"))
    held = {path: [t.nbytes for t in read_header(path).values()] for path in files}
    assert all(sum(sizes) <= shards or len(sizes) == 1 for sizes in held.values())
    assert (len(files) > 1) == (sum(map(sum, held.values())) > shards)


@pytest.mark.parametrize(
    "text", ["", "GB", "5XB", "-1GB", "0", "0GB", "inf", "٥GB", "9" * 400, "5", "5000", "999999", "5GB/s"]
)
def test_what_is_no_size(run: Run, checkpoint: Path, tmp_path: Path, text: str) -> None:
    refused = run("convert", checkpoint, tmp_path / "out", "--max-shard-size", text)
    assert refused.exit_code == 2
    assert "--max-shard-size: " in refused.stderr
    assert ("has no unit" in refused.stderr) == (text in ("0", "5", "5000", "999999"))
    assert not (tmp_path / "out").exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_for_every_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 bytes every second is another; the end of the line comes with the last."""
    for whole, done, drawn in (
        (200, range(5), "\r  0% of 200 bytes\r  1% of 200 bytes\r  2% of 200 bytes"),
        (200, (0, 199, 200), "\r  0% of 200 bytes\r 99% of 200 bytes\r100% of 200 bytes\n"),
        (1, (1,), "\r100% of 1 bytes\n"),
        (0, (0,), "\r  0% of 0 bytes\n"),
    ):
        for stream, expected in ((Terminal(), drawn), (io.StringIO(), "")):
            monkeypatch.setattr("sys.stderr", stream)
            bar = Bar()
            for n in done:
                bar(n, whole)
            assert stream.getvalue() == expected


def test_what_was_written_is_said(run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([100.0, 102.5])
    monkeypatch.setattr(asbuilt.cli.convert, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    document = json.loads(run("convert", checkpoint, tmp_path / "a", "--json").stdout)
    nbytes = {path.name: path.stat().st_size for path in (tmp_path / "a").iterdir()}
    assert document == {
        "source": "tiny",
        "out": str(tmp_path / "a"),
        "files": nbytes,
        "bytes": sum(nbytes.values()),
        "seconds": 2.5,
    }
    assert [*document["files"]] == sorted(nbytes)
    monkeypatch.undo()
    text = run("convert", checkpoint, tmp_path / "b").stdout
    kilobytes = f"{sum(nbytes.values()) / 1000:.2f} kB ({sum(nbytes.values()) / 1024:.2f} KiB)"
    assert text == f"{tmp_path / 'b'}: {kilobytes} in {len(nbytes)} files\n"

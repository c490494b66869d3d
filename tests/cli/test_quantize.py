"""`asbuilt quantize`, and `asbuilt convert` to GGUF: files that run, figures that are those of the files, errors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import Result

from asbuilt.checkpoint.load import load, stored_bytes
from asbuilt.checkpoint.source import open_model
from asbuilt.cli.convert import Bar
from asbuilt.errors import InputError
from asbuilt.formats.gguf import read_header
from asbuilt.measure.loss import nats_per_token

Run = Callable[..., Result]
TEXT = "once upon a time there was a model, and it was small. " * 8


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.mkdir(exist_ok=True)
    (path / "some.txt").write_text(TEXT)
    return path / "some.txt"


def refused(result: Result, said: str) -> None:
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(said, result.stderr), result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_what_is_written_is_what_is_said(run: Run, checkpoint: Path, tmp_path: Path, text: Path) -> None:
    out = tmp_path / "q.gguf"
    result = run("quantize", checkpoint, out, "--format", "q8_0", "--text", text, "--tokens", 100, "--json")
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["files"] == {str(out): out.stat().st_size}
    assert sum(one["after"] for one in said["kinds"].values()) == stored_bytes(out)
    assert sum(one["before"] for one in said["kinds"].values()) == stored_bytes(checkpoint)
    assert said["kinds"]["norm"]["before"] == said["kinds"]["norm"]["after"]
    assert said["kinds"]["embedding"]["after"] * 32 * 4 == said["kinds"]["embedding"]["before"] * 34
    stored = read_header(out).tensors.values()
    assert said["types"] == {kind: sum(t.type == kind for t in stored) for kind in said["types"]}
    ids = open_model(checkpoint).tokenizer().encode(TEXT)[:100]  # type: ignore[union-attr]
    for when, model in (("before", load(checkpoint, dtype="float32")), ("after", load(out))):
        with torch.inference_mode():
            wanted = F.cross_entropy(model(torch.tensor([ids]))[0, :-1], torch.tensor(ids[1:]))
        assert math.isclose(said["loss"][when], float(wanted), rel_tol=1e-5)
    assert said["loss"]["tokens"] == 100
    assert said["loss"]["before"] != said["loss"]["after"]
    assert sum(one["bytes"] for one in said["weights"]) == stored_bytes(out)
    assert {one["format"] for one in said["weights"] if one["error"] > 0} == {"q8_0", "f16"}
    words = ("once upon", "--max-new-tokens", 9, "--json")
    assert run("generate", out, *words).exit_code == 0


def test_the_table_and_the_loss_are_printed(run: Run, checkpoint: Path, tmp_path: Path, text: Path) -> None:
    result = run("quantize", checkpoint, tmp_path / "q.gguf", "--format", "q4_0", "--text", text, "--by", "head=f16")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"attention .* 14%", result.stdout)
    assert re.search(r"blocks\.\*\.ffn\.body\.gate +q4_0 +2 .* \d\.\d\d% +\d\.\d\d%", result.stdout)
    assert re.search(r"loss: \d\.\d{4} nats per token before, \d\.\d{4} after \([+-]0\.\d{4}\)", result.stdout)
    assert "3 F16" in result.stdout  # rows of 40 divide into no blocks
    assert read_header(tmp_path / "q.gguf").tensors["output.weight"].type == "F16"


def test_errors_are_weighed_by_a_text(run: Run, checkpoint: Path, tmp_path: Path, text: Path) -> None:
    """The loss is of the last quarter, which was not read; what was found is a file that gives the same weights."""
    words = ("--format", "q4_0", "--tokens", 60)
    calibrated = ("--calibration", text, "--save-imatrix", tmp_path / "i.gguf", "--json")
    result = run("quantize", checkpoint, tmp_path / "q.gguf", *words, *calibrated)
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["calibration"] == {"tokens": 60, "weights": 14}
    ids = open_model(checkpoint).tokenizer().encode(TEXT[len(TEXT) * 3 // 4 :])[:60]  # type: ignore[union-attr]
    assert math.isclose(said["loss"]["before"], nats_per_token(load(checkpoint, dtype="float32"), ids), rel_tol=1e-6)
    assert math.isclose(said["loss"]["after"], nats_per_token(load(tmp_path / "q.gguf"), ids), rel_tol=1e-6)
    assert sum(one["output_error"] is not None for one in said["weights"]) == 14
    again = run("quantize", checkpoint, tmp_path / "again.gguf", *words, "--imatrix", tmp_path / "i.gguf")
    assert again.exit_code == 0, again.stderr
    assert "of outputs" in again.stdout
    plain = run("quantize", checkpoint, tmp_path / "plain.gguf", *words)
    assert plain.exit_code == 0
    weights = {name: load(tmp_path / f"{name}.gguf").state_dict() for name in ("q", "again", "plain")}
    assert all(torch.allclose(weights["q"][path], weights["again"][path], atol=1e-6) for path in weights["q"])
    path = "blocks.0.attention.body.q.weight"
    assert not torch.equal(weights["q"][path], weights["plain"][path])


def test_folders_of_other_formats(run: Run, checkpoint: Path, tmp_path: Path, text: Path) -> None:
    words = ("--format", "int8", "--by", "blocks.0.*=keep", "--text", text, "--tokens", 60, "--json")
    result = run("quantize", checkpoint, tmp_path / "out", *words)
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["types"] == {"int8": 7}
    assert sum(one["after"] for one in said["kinds"].values()) == stored_bytes(tmp_path / "out")
    ids = open_model(checkpoint).tokenizer().encode(TEXT)[:60]  # type: ignore[union-attr]
    assert math.isclose(
        said["loss"]["after"], nats_per_token(load(tmp_path / "out", dtype="float32"), ids), rel_tol=1e-6
    )
    assert run("generate", tmp_path / "out", "once upon", "--max-new-tokens", 3, "--json").exit_code == 0
    billed = json.loads(run("describe", tmp_path / "out", "--json").stdout)
    assert billed["stored_bytes"] == stored_bytes(tmp_path / "out")


@pytest.mark.parametrize(
    ("out", "words", "said"),
    [
        ("q.gguf", ("--format", "q8_0", "--save-imatrix", "i.gguf"), "--save-imatrix: needs --calibration"),
        ("q.gguf", ("--format", "q8_0", "--imatrix", "none.gguf"), "none.gguf"),
        ("q.gguf", ("--format", "q8_0", "--calibration", "none.txt"), "text: .*cannot be read"),
        ("q.gguf", ("--format", "q8_0", "--calibration", "x", "--imatrix", "y"), "--imatrix: goes without"),
        ("out", ("--format", "q8_0"), r"--format: is not written to a folder.*q8_0"),
        ("out", ("--format", "int8", "--by", "head=q8_0"), "by: must be GLOB=keep.*GGUF"),
        ("out", ("--format", "mxfp4", "--by", "x=keep"), "by: no weight has such a path"),
        ("q.gguf", ("--format", "int4"), "--format: cannot be written.*int4.*q4_k"),
        ("q.gguf", ("--format", "q8_0", "--by", "nothing"), "by: must be GLOB=FORMAT.*nothing"),
        ("q.gguf", ("--format", "q8_0", "--by", "head=q9"), "by: cannot be written.*q9"),
        ("q.gguf", ("--format", "q8_0", "--by", "blocks.7.*=q4_0"), r"by: no weight has such a path.*blocks\.7"),
        ("q.gguf", ("--format", "q8_0", "--text", "none.txt"), "text: .*cannot be read"),
        ("q.gguf", ("--format", "q8_0", "--max-shard-size", "x"), "--max-shard-size"),
    ],
)
def test_wrong_input_is_one_message_and_leaves_nothing(
    run: Run, checkpoint: Path, tmp_path: Path, out: str, words: tuple[str, ...], said: str
) -> None:
    before = sorted(tmp_path.iterdir())
    refused(run("quantize", checkpoint, tmp_path / out, *words), said)
    assert sorted(tmp_path.iterdir()) == before


def test_a_description_has_nothing_to_quantise(run: Run, tmp_path: Path) -> None:
    refused(run("quantize", "gpt2", tmp_path / "q.gguf", "--format", "q8_0"), "has no weights")


def test_an_interruption_leaves_nothing(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Bar, done: int, whole: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bar, "__call__", interrupt)
    before = sorted(tmp_path.iterdir())
    out = tmp_path / "q.gguf"
    for words in (("quantize", checkpoint, out, "--format", "q8_0"), ("convert", checkpoint, out)):
        assert run(*words).exit_code == 130
        assert sorted(tmp_path.iterdir()) == before


def test_convert_writes_gguf_and_back(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.gguf"
    result = run("convert", checkpoint, out, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["files"] == {"made.gguf": out.stat().st_size}
    words = ("once upon", "--max-new-tokens", 9, "--json")
    texts = [json.loads(run("generate", model, *words).stdout)["text"] for model in (checkpoint, out)]
    assert texts[0] == texts[1]
    assert open_model(out).chat_template == open_model(checkpoint).chat_template
    assert run("convert", out, tmp_path / "again", "--dtype", "fp32").exit_code == 0
    mine, again = load(checkpoint).state_dict(), load(tmp_path / "again").state_dict()
    assert all(torch.equal(mine[name], again[name]) for name in mine)
    result = run("convert", checkpoint, tmp_path / "q.gguf", "--dtype", "q5_1", "--max-shard-size", "20KB")
    assert result.exit_code == 0, result.stderr
    parts = sorted(tmp_path.glob("q-*.gguf"))
    assert len(parts) > 1
    assert "Q5_1" in {tensor.type for tensor in read_header(parts[-1]).tensors.values()}
    refused(run("convert", checkpoint, out), "already exists")
    refused(run("convert", checkpoint, tmp_path / "x.gguf", "--dtype", "int4"), "--dtype: cannot be written")


def test_windows_of_a_text_begin_anew(checkpoint: Path) -> None:
    model, ids = load(checkpoint, dtype="float32"), torch.randint(250, (40,)).tolist()
    whole = nats_per_token(model, ids)
    first, second = nats_per_token(model, ids[:16]), nats_per_token(model, ids[16:32])
    last = nats_per_token(model, ids[32:])
    assert math.isclose(nats_per_token(model, ids, window=16), (15 * first + 15 * second + 7 * last) / 37, rel_tol=1e-5)
    assert not math.isclose(whole, nats_per_token(model, ids, window=16), rel_tol=1e-4)
    begun = nats_per_token(model, ids[:15], first=7)
    assert math.isclose(begun, nats_per_token(model, [7, *ids[:15]]), rel_tol=1e-6)
    assert math.isclose(nats_per_token(model, ids[:17], window=16), first, rel_tol=1e-6)  # a last token alone
    with pytest.raises(InputError, match="too short for a loss"):
        nats_per_token(model, [3])

"""`asbuilt measure`: the report is printed as it is, and the exit code says whether it is a good one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asbuilt.cli.measure as command
import asbuilt.measure
import asbuilt.memory
from asbuilt.kernels.speed import Speed
from asbuilt.measure import Report, Row
from asbuilt.measure.calibrate import machine
from asbuilt.nn.model import Model

Run = Callable[..., Result]
ROWS = st.builds(
    Row,
    figure=st.sampled_from(("parameters", "weights")),
    unit=st.sampled_from(("bytes", "tokens/s")),
    predicted=st.integers(0, 10**12),
    measured=st.integers(0, 10**12),
    tolerance=st.sampled_from((0.0, 0.01, 0.2)),
)


def report(rows: list[Row]) -> Report:
    return Report(model="m", dtype="fp32", machine={"machine": machine()}, rows=tuple(rows))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROWS, min_size=1, max_size=4))
def test_report_is_printed_and_decides_the_exit_code(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row]
) -> None:
    made = report(rows)
    monkeypatch.setattr(asbuilt.measure, "measure", lambda *_, **__: made)
    printed = run("measure", checkpoint, "--json")
    assert printed.exit_code == (0 if made.ok else 1), printed.exception
    said = json.loads(printed.stdout, parse_constant=pytest.fail)
    assert [(r["figure"], r["unit"], r["predicted"], r["measured"], r["ok"]) for r in said["rows"]] == [
        (row.figure, row.unit, row.predicted, row.measured, row.ok) for row in rows
    ]
    assert said["machine"]
    text = run("measure", checkpoint).stdout
    assert text.count("MISSED") == sum(not row.ok for row in rows)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_model_that_is_measured(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """The checkpoint's own weights in the dtype asked for; `--refresh` is handed on."""
    from safetensors.torch import load_file

    seen: list[tuple[Model, bool]] = []

    def measure(model: Model, *, refresh: bool, **_: object) -> Report:
        seen.append((model, refresh))
        return report([])

    monkeypatch.setattr(asbuilt.measure, "measure", measure)
    assert run("measure", checkpoint, "--dtype", dtype, "--refresh").exit_code == 0
    ((model, refresh),) = seen
    stored = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert torch.equal(model.get_parameter("embedding.weight"), stored.to(wanted))
    assert refresh


def test_a_machine_that_does_not_say_its_memory(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no sysconf."""
    monkeypatch.delattr(os, "sysconf", raising=False)
    monkeypatch.setattr(asbuilt.memory, "MEMINFO", Path("nowhere"))
    monkeypatch.setattr(asbuilt.measure, "measure", lambda *_, **__: report([]))
    assert run("measure", checkpoint).exit_code == 0


def test_a_model_too_large_for_the_machine(run: Run) -> None:
    result = run("measure", "llama-3.1-405b")
    assert result.exit_code == 2
    assert "needs 852" in result.stderr


@pytest.mark.parametrize("name", ["clip-vit-base-patch32", "bert-base-uncased", "vit-base-patch16-224"])
def test_what_predicts_no_next_token_is_refused(run: Run, name: str) -> None:
    refused = run("measure", name)
    assert (refused.exit_code, "only causal language models" in refused.stderr) == (2, True)


def row(figure: str, unit: str, predicted: float, measured: float, tolerance: float) -> Row:
    return Row(figure=figure, unit=unit, predicted=predicted, measured=measured, tolerance=tolerance)


KNOWN = [
    row("parameters", "", 1_000_000, 1_000_000, 0.0),
    row("weights, fp32", "bytes", 4_000_000, 4_000_001, 0.0),
    row("saved", "bytes", 1000, 1009, 0.01),
    row("its loss", "bytes", 1000, 1011, 0.01),
    row("prefill", "tokens/s", 200.0, 241.0, 0.2),
    row("decode", "tokens/s", 200.0, 170.0, 0.2),
    row("nothing", "bytes", 0, 5, 0.0),
]


def known(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row], *words: str) -> Result:
    monkeypatch.setattr(asbuilt.measure, "measure", lambda *_, **__: report(rows))
    return run("measure", checkpoint, *words)


def test_the_table_sets_measured_beside_predicted(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = known(run, checkpoint, monkeypatch, KNOWN)
    assert result.exit_code == 1
    first, empty, title, header, *lines = result.stdout.splitlines()
    assert first.startswith("m in fp32 on ")
    assert first.endswith(" threads")
    assert (empty, title) == ("", "Predicted and measured")
    assert header.split() == ["figure", "unit", "predicted", "measured", "difference"]
    assert [re.split(r"  +", line.strip()) for line in lines] == [
        ["parameters", "1,000,000", "1,000,000", "0", "exact"],
        ["weights, fp32", "bytes", "4,000,000", "4,000,001", "+0.00%", "MISSED: should be exact"],
        ["saved", "bytes", "1,000", "1,009", "+0.90%", "within 1%"],
        ["its loss", "bytes", "1,000", "1,011", "+1.10%", "MISSED: should be within 1%"],
        ["prefill", "tokens/s", "200.0", "241.0", "+20.50%", "MISSED: should be within 20%"],
        ["decode", "tokens/s", "200.0", "170.0", "-15.00%", "within 20%"],
        ["nothing", "bytes", "0", "5", "+inf%", "MISSED: should be exact"],
    ]


def test_the_document_is_the_table(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(known(run, checkpoint, monkeypatch, KNOWN, "--json").stdout)
    assert (document["model"], document["dtype"], document["ok"]) == ("m", "fp32", False)
    assert document["rows"][3] == {
        "figure": "its loss",
        "unit": "bytes",
        "predicted": 1000,
        "measured": 1011,
        "error": pytest.approx(0.011),
        "tolerance": 0.01,
        "ok": False,
    }
    assert document["rows"][6]["error"] is None
    assert [one["ok"] for one in document["rows"]] == [True, False, True, False, False, True, False]
    assert document["machine"]["machine"]["threads"] >= 1


@pytest.mark.parametrize(("rows", "code"), [(KNOWN[:1], 0), (KNOWN[:2], 1), (KNOWN[3:4], 1), (KNOWN[4:6], 0)])
def test_a_speed_that_misses_is_no_answer_no(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row], code: int
) -> None:
    """Other work on the machine spoils speeds, never bytes."""
    assert known(run, checkpoint, monkeypatch, rows).exit_code == code


def test_what_is_needed_is_held_against_the_memory(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights and one training step of 64 tokens, in each dtype, to the byte."""
    from asbuilt import cost
    from asbuilt.checkpoint.source import open_model
    from asbuilt.spec import Pass

    monkeypatch.setattr(asbuilt.measure, "measure", lambda *_, **__: report([]))
    spec = open_model(checkpoint).spec
    for dtype, width in (("fp32", 4), ("bf16", 2)):
        kept = cost.saved(spec, Pass(tokens=64, width=width))
        needed = width * cost.total_parameters(spec) + kept.all + kept.loss
        for have, code in ((needed, 0), (needed - 1, 2)):
            monkeypatch.setattr(asbuilt.memory, "total", lambda have=have: have)
            assert run("measure", checkpoint, "--dtype", dtype).exit_code == code


def test_the_dtype_is_the_checkpoints_where_it_is_one_of_the_two(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []

    def measure(model: Model, **_: object) -> Report:
        seen.append(model.dtype)
        return report([])

    monkeypatch.setattr(asbuilt.measure, "measure", measure)
    for faster in (2.0, 0.5):
        times = {torch.float32: 1.0, torch.bfloat16: 1 / faster}
        made = [Speed(times[dtype], times[dtype]) for dtype in (torch.bfloat16, torch.float32)]
        monkeypatch.setattr("asbuilt.api.measure.speeds_here", lambda dtypes, made=made: tuple(made))
        for dtype in ("bf16", "fp16", "fp32"):
            folder = tmp_path / f"{dtype} {faster}"
            assert run("convert", checkpoint, folder, "--dtype", dtype).exit_code == 0
            assert run("measure", folder).exit_code == 0
    assert seen == [torch.bfloat16, *[torch.float32] * 5]


def test_one_training_step_is_of_at_most_512_tokens(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A description without weights is run with random ones; a folder without them is a mistake."""
    from asbuilt import cost
    from asbuilt.checkpoint.source import open_model
    from asbuilt.spec import Pass

    seen: list[Model] = []
    monkeypatch.setattr(asbuilt.measure, "measure", lambda model, **_: seen.append(model) or report([]))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": 24, "n_head": 3, "vocab_size": 50}))
    spec = open_model(path).spec
    assert spec.max_positions == 1024
    kept = cost.saved(spec, Pass(tokens=512, width=4))
    needed = 4 * cost.total_parameters(spec) + kept.all + kept.loss
    for have, code in ((needed, 0), (needed - 1, 2), (None, 0)):
        monkeypatch.setattr(asbuilt.memory, "total", lambda have=have: have)
        assert run("measure", path).exit_code == code
    assert {model.dtype for model in seen} == {torch.float32}
    assert not any(model.training for model in seen)
    without = run("measure", tmp_path)
    assert (without.exit_code, "no weights" in without.stderr, len(seen)) == (2, True, 2)


def test_what_it_is_at_is_said_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal, said in ((True, "reading ...\nwarning: busy\n"), (False, "warning: busy\n")):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal, raising=False)
            command._say("reading")
            command._warn("busy")
        assert capsys.readouterr().err == said


def test_notes_stand_below(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = replace(report(KNOWN[:1]), notes=("one", "two"))
    monkeypatch.setattr(asbuilt.measure, "measure", lambda *_, **__: made)
    assert run("measure", checkpoint).stdout.splitlines()[-2:] == ["note: one", "note: two"]
    assert json.loads(run("measure", checkpoint, "--json").stdout)["notes"] == ["one", "two"]

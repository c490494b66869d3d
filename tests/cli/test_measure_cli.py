"""`asbuilt measure`: the report is printed as it is, and the exit code says whether it is a good one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from click.testing import Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asbuilt.measure
import asbuilt.memory
from asbuilt.measure import Calibration, Report, Row
from asbuilt.measure.calibrate import machine
from asbuilt.nn.modules import Model

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
    numbers = {field.name: 1.0 for field in fields(Calibration)}
    calibration = Calibration(**(numbers | {"machine": machine(), "rates": {}}))  # type: ignore[arg-type]
    return Report(model="m", dtype="fp32", machine=calibration, rows=tuple(rows))


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
    assert torch.equal(model.table_VM, stored.to(wanted))
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
    assert "too large" in result.stderr


@pytest.mark.parametrize("name", ["clip-vit-base-patch32", "bert-base-uncased", "vit-base-patch16-224"])
def test_what_predicts_no_next_token_is_refused(run: Run, name: str) -> None:
    refused = run("measure", name)
    assert (refused.exit_code, "next token" in refused.stderr) == (2, True)

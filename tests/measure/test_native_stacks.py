"""Speeds of layers that one native call computes: what is predicted from stacks, and what a report then holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from click.testing import CliRunner

import asbuilt
from asbuilt.catalog.machine import parse_numbers
from asbuilt.checkpoint.load import Contents
from asbuilt.checkpoint.packed import packed_spec
from asbuilt.checkpoint.save import save
from asbuilt.checkpoint.source import open_model
from asbuilt.cli.main import cli
from asbuilt.kernels import native
from asbuilt.measure import native_stacks, report, timing
from asbuilt.measure.micro import StackMixer
from asbuilt.measure.native_stacks import LayerKind, Speeds, StackRates, head, layer, predicted_seconds, widths
from asbuilt.measure.rates import TimeGrid
from asbuilt.nn import build
from asbuilt.plan.serve.expected import LEVELS
from asbuilt.spec import GatedDeltaNet, LanguageModel, RMSNorm, ShortConvolution
from asbuilt.spec.linear import maps_by_path

# seconds proportional to bytes, and to tokens times numbers
LINE = TimeGrid(((10**4, 10**5, 10**6),), (1e-5, 1e-4, 1e-3))
PLANE = TimeGrid(((64, 512), (10**4, 10**6)), tuple(1e-9 * t * n for t in (64, 512) for n in (10**4, 10**6)))


def rates(bytes_per_number: float, start: float = 0.0) -> StackRates:
    return StackRates(LINE, PLANE, start, bytes_per_number)


def of(format: str, mixer: StackMixer = "attention") -> LayerKind:
    return LayerKind(format, mixer)


FP32 = of("fp32")


def model(tied: bool = False) -> LanguageModel:
    return asbuilt.decoder(d_model=64, n_layers=3, n_heads=2, n_kv_heads=1, d_ff=96, n_vocab=200, tied=tied)


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_is_the_sum_of_its_layers_and_head(tied: bool) -> None:
    spec = model(tied)
    block = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
    assert layer(spec, 1, "fp32") == {FP32: block}
    assert head(spec, "bf16") == {"bf16": 200 * 64}
    known = Speeds({FP32: rates(4.0, 1e-6)}, {"fp32": 7e-9})
    prefill, step = predicted_seconds(spec, "fp32", known, 128)
    assert step == pytest.approx(1e-6 + 1e-9 * (4 * 3 * block + 7 * 200 * 64), rel=1e-6)
    assert prefill == pytest.approx(1e-6 + 1e-9 * (7 * 200 * 64 + 3 * 128 * block), rel=1e-6)


def test_a_layer_of_several_formats_takes_of_each_its_share() -> None:
    spec = model()
    paths = {path: "q4_k" if "down" in path else "q8_0" for path in maps_by_path(spec) if ".0." in path}
    paths = {path: "q8_0" if "ffn" in path else "q4_0" for path in paths}
    mixed = packed_spec(spec, paths)
    inner, outer = 3 * 64 * 96, 64 * (64 + 32 + 32 + 64)
    assert layer(mixed, 0, "fp32") == {of("q8_0"): inner, of("q4_0"): outer}
    slow = replace(rates(1.0), decode=TimeGrid(LINE.axes, tuple(3 * one for one in LINE.seconds)))
    given = {of("q8_0"): slow, of("q4_0"): rates(0.5), FP32: rates(4.0)}
    _, step = predicted_seconds(mixed, "fp32", Speeds(given, {"fp32": 4e-9}), 64)
    others = 4 * (2 * (inner + outer) + 200 * 64)
    first = 3 * inner + 0.5 * outer  # each byte of q8_0 takes three times as long
    assert step == pytest.approx(1e-9 * (first + others), rel=1e-6)


def test_layers_are_of_their_mixers() -> None:
    net = GatedDeltaNet(
        d_model=64,
        n_key_heads=2,
        n_value_heads=4,
        d_key=16,
        d_value=8,
        norm=RMSNorm(d=8),
        conv=ShortConvolution(channels=96, kernel=4),
    )
    spec = model()
    first, second, _ = spec.blocks
    mixed = replace(second, branches=(replace(second.branches[0], body=net), second.branches[1]))
    spec = replace(spec, blocks=(first, mixed))
    inner = 3 * 64 * 96
    of_net = 64 * (2 * 32 + 32 + 32 + 4 + 4) + 32 * 64  # q and k, v, gate, beta, decay; o
    assert [layer(spec, i, "fp32") for i in (0, 1)] == [
        {FP32: inner + 64 * (64 + 32 + 32 + 64)},
        {of("fp32", "delta_net"): inner + of_net},
    ]


def test_two_stacks_are_timed_around_a_layers_size() -> None:
    """Of width w a layer has 12 w^2 numbers: w^2 each of q and o, half of k and v, 3 w^2 of gate, up and down."""
    for width, pair in (
        (8, (256, 512)),
        (300, (256, 512)),
        (512, (512, 1024)),
        (700, (512, 1024)),
        (9000, (1024, 2048)),
    ):
        assert widths(12 * width**2) == pair


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(native.SWITCH, "1")
    native.library.cache_clear()
    native.number.cache_clear()
    if native.library() is None:
        pytest.skip("the native kernels are not installed")
    yield
    native.library.cache_clear()
    native.number.cache_clear()


@pytest.mark.parametrize("mixer", ["attention", "delta_net"])
@pytest.mark.parametrize("format", ["q8_0", "fp32"])
@pytest.mark.usefixtures("library")
def test_stacks_are_timed_by_kind(format: str, mixer: StackMixer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_stacks, "MEMORY", 2**16)
    with torch.inference_mode():
        found = native_stacks.Pair(of(format, mixer), "fp32", (128, 256)).rates()
        assert 0 < native_stacks.row_seconds(format, "fp32") < math.inf
    assert all(0 < one < math.inf for one in (*found.decode.seconds, *found.prefill.seconds))
    assert found.bytes_per_number == pytest.approx(34 / 32 if format == "q8_0" else 4.0, rel=0.05)  # and norms


class Counted:
    """In place of pairs of stacks: counts how often they are timed, and drifts as told."""

    asked: ClassVar[list[str]] = []
    drifts: ClassVar[list[float]] = []
    timed = 0

    def __init__(self, kind: LayerKind, *_: object) -> None:
        self.asked.append(kind.format)

    def rates(self) -> StackRates:
        Counted.timed += 1
        return rates(1.0)

    def drift(self) -> float:
        return self.drifts.pop(0) if self.drifts else 1.0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    Counted.asked, Counted.drifts, Counted.timed = [], [], 0
    monkeypatch.setattr(native_stacks, "Pair", Counted)
    monkeypatch.setattr(native_stacks, "row_seconds", lambda *_: 1e-9)
    monkeypatch.setattr(report, "calibrate", lambda **_: pytest.fail("nothing is predicted from the calibration"))
    return Counted


@pytest.mark.usefixtures("library")
def test_a_file_is_measured_packed(tmp_path: Path, counted: type[Counted]) -> None:
    """Its speeds are those of the native layers, its exact figures those of the blocks; expanded if asked."""
    save(build(replace(model(), max_positions=64)), tmp_path / "m")
    words = ["quantize", str(tmp_path / "m"), str(tmp_path / "m.gguf"), "--format", "q8_0"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    found = asbuilt.measure(str(tmp_path / "m.gguf"))
    rows = {row.figure: row for row in found.rows}
    assert {"q8_0"} <= set(counted.asked) <= {"q8_0", "q6_k", "fp32"}
    assert found.native == native.instructions()
    assert found.document()["machine"]["machine"]["threads"] >= 1
    assert rows["parameters"].ok
    weights = next(row for name, row in rows.items() if name.startswith("weights"))
    assert weights.ok
    assert "q8_0" in weights.figure
    assert not any("training" in name for name in rows)
    expanded = asbuilt.measure(str(tmp_path / "m.gguf"), packed=False)
    assert {row.figure for row in expanded.rows} >= {"weights, fp32", "saved by its loss"}


@pytest.mark.usefixtures("library")
def test_a_plan_for_this_machine_expects_what_its_stacks_take(
    tmp_path: Path, counted: type[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a packed file as it is; of other formats, of engines, and of weights that are not packed, what is assumed."""
    numbers = parse_numbers("memory=64GB,bandwidth=30GB/s,fp32=200G,bf16=200G")
    monkeypatch.setattr("asbuilt.measure.this_machine", lambda **_: numbers)
    spec = replace(model(), max_positions=512)
    save(build(spec), tmp_path / "m")
    words = ["quantize", str(tmp_path / "m"), str(tmp_path / "m.gguf"), "--format", "q8_0"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    made = asbuilt.plan(str(tmp_path / "m.gguf"), "this")
    held = {format for i in range(3) for format, _ in layer(contents(tmp_path / "m.gguf"), i, "fp32")}
    assert counted.timed == len(held)
    assert "q8_0" in held
    prompt, past, _ = report.sizes(spec)
    found = Speeds({of(one): rates(1.0) for one in held}, dict.fromkeys(("q8_0", "q6_k", "fp32"), 1e-9))
    prefill, step = predicted_seconds(contents(tmp_path / "m.gguf"), "fp32", found, prompt)
    for level in LEVELS:
        at = made.roofline.at(level)
        assert at.prefill(prompt).seconds == pytest.approx(prefill, rel=1e-3)
        assert at.decode(1, past + 1).seconds == pytest.approx(step, rel=1e-3)
    assert made.document()["expected"]["sources"] == {}
    assert any("timed on this machine" in str(cell) for table in made.tables() for row in table.rows for cell in row)
    file, folder = str(tmp_path / "m.gguf"), str(tmp_path / "m")
    asked = CliRunner().invoke(cli, ["plan", "serve", file, "--gpu", "this", "--json"])
    assert json.loads(asked.stdout)["expected"] == made.document()["expected"]
    counted.timed = len(held)
    given = CliRunner().invoke(cli, ["plan", "serve", file, "--gpu", "this", "--compute-efficiency", "0.5", "--json"])
    assert json.loads(given.stdout)["expected"] != made.document()["expected"]
    others = asbuilt.plan(file, "this", dtype="q4_0"), asbuilt.plan(folder, "this"), asbuilt.plan(spec, "this")
    assert [other.roofline.timed for other in others] == [None] * 3
    assert counted.timed == len(held)


def contents(path: Path) -> LanguageModel:
    """A file's description with the formats of its blocks."""
    found = Contents(open_model(str(path)), packed=None).spec
    assert isinstance(found, LanguageModel)
    return found


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("drifts", "times"), [([1.1], 1), ([1.3, 1.0], 2), ([1.3, 1.4], 2)])
def test_stacks_are_timed_again_where_the_machine_changed(
    drifts: list[float], times: int, counted: type[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; what changes still is told."""
    monkeypatch.setattr(timing.Others, "share", lambda self: 0.5)
    counted.drifts = list(drifts)
    made = build(replace(model(), max_positions=64)).eval()
    found = report.measure(made)
    assert (counted.timed, counted.drifts) == (times, [])
    assert [note for note in found.notes if "factor of 1.40" in note] == list(found.notes[:1])[: drifts[-1] > 1.2]
    assert found.notes[-2:] == (
        "other processes used 50% of the CPUs while stacks of layers were timed",
        "other processes used 50% of the CPUs while speeds were measured",
    )


def test_the_drift_of_stacks_is_of_the_lower_quartiles_of_a_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the way from the least time to the next, as quantiles of four are."""
    pair = object.__new__(native_stacks.Pair)
    pair.times = [1.0, 2.0]
    rounds = [[1.5, 2.0], [1.5, 1.5], [1.5, 2.2], [1.3, 9.0]]
    monkeypatch.setattr(native_stacks.Pair, "_round", lambda _: rounds.pop(0))
    assert pair.drift() == pytest.approx(1.35)
    assert not rounds
    rounds[:] = [[1.5, 2.0], [1.1, 2.0], [1.0, 2.0]]
    assert pair.drift() == pytest.approx(1.0)
    assert len(rounds) == 1

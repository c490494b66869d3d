"""Speeds, on a machine on which every call takes a known time: what the calibration finds, predicts and measures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fake_machine import (
    NUMBERS_RATE,
    NUMBERS_START,
    PRODUCT_RATE,
    READ_RATE,
    SLOW,
    VIEW,
    FakeMachine,
    fake_machine,
)

from asbuilt.measure import calibrate, measure, micro, report, run, timing
from asbuilt.measure.calibrate import DRIFT, LOOKS
from asbuilt.measure.rates import DTYPES, Calibration, LinearTime, Rates, TimeGrid, lower_quartile
from asbuilt.measure.report import PREFILL as PREFILL_TOKENS
from asbuilt.measure.report import PREFILLS, PROMPT, ROUNDS, STEPS, TIME, Report, Row
from asbuilt.measure.trace import Call, Trace
from asbuilt.nn import build
from asbuilt.nn.model import Model

SECONDS = 1e-9  # that the fake clock is off by


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeMachine]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(micro, "PROBE_STEPS", 6)
    monkeypatch.setattr(report, "counted", lambda model, say: ())  # has tests of its own
    monkeypatch.setattr(micro, "PROBE_PREFILLS", 1)
    with fake_machine(monkeypatch) as machine:
        yield machine


@pytest.fixture
def calibration(machine: FakeMachine) -> Calibration:
    return calibrate()


def model(dtype: torch.dtype, layers: int = 3, width: int = 192) -> Model:
    return build(micro.stack(layers, width), dtype=dtype).eval()


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_the_calibration_finds_what_the_calls_take(calibration: Calibration, name: str) -> None:
    rates, dtype = calibration.rates[name], DTYPES[name]
    assert rates.row_rate == pytest.approx(READ_RATE / SLOW[dtype], rel=0.005)
    assert rates.product_rate == pytest.approx(PRODUCT_RATE / SLOW[dtype], rel=0.005)
    for table in (rates.vector, rates.matrix, rates.attention, rates.attention_read):
        assert min(table.seconds) > 0
    # one row: (128, 512) is 4 or 2 bytes a number, read at the rate, after the view that turns the matrix
    assert rates.vector.at(128, 512) == pytest.approx(
        VIEW + SLOW[dtype] * 128 * 512 * dtype.itemsize / READ_RATE, abs=SECONDS
    )
    # 16 rows of 128 numbers to 512: two FLOPs each
    assert rates.matrix.at(16, 128, 512) == pytest.approx(
        VIEW + SLOW[dtype] * 2 * 16 * 128 * 512 / PRODUCT_RATE, abs=SECONDS
    )
    # 4 heads of 20 queries and keys, 32 wide, both products with full scores: 4 x 4 x 20 x 20 x 32 at 2 GFLOP/s
    assert rates.attention.at(4, 20, 32) == pytest.approx(4 * 4 * 20 * 20 * 32 / 2e9, abs=SECONDS)
    # 4 heads of 16 keys and values, 32 wide
    assert rates.attention_read.at(4, 16, 32) == pytest.approx(
        2 * 4 * 16 * 32 * dtype.itemsize / READ_RATE, abs=SECONDS
    )


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_lines_are_a_start_and_a_rate(calibration: Calibration, name: str) -> None:
    """A call of one operand reads and writes as many bytes; 2^16 numbers give the rate, 768 the start."""
    width, few, many = DTYPES[name].itemsize, 768, 2**16
    for function in ("silu", "gelu", "gelu tanh", "tanh", "sigmoid", "exp", "softmax", "sin"):
        line = calibration.rates[name].lines[function]
        assert line.start == pytest.approx(NUMBERS_START + 2 * few * width / NUMBERS_RATE, abs=SECONDS)
        assert 2 * many * width / line.rate == pytest.approx(2 * (many - few) * width / NUMBERS_RATE, abs=SECONDS)
    # x * x and x + x read two operands, x.roll and x * 0.5 one: the mean of 3, 3, 2 and 2 times the bytes
    arithmetic = calibration.rates[name].lines["arithmetic"]
    assert arithmetic.start == pytest.approx(NUMBERS_START + 2.5 * few * width / NUMBERS_RATE, abs=SECONDS)
    more = 3 * many - 2.5 * few
    assert 2 * many * width / arithmetic.rate == pytest.approx(more * width / NUMBERS_RATE, abs=SECONDS)
    assert calibration.rates[name].lines["view"].start == pytest.approx(VIEW, abs=SECONDS)


def test_reading(calibration: Calibration) -> None:
    nbytes = 2**22
    taken = NUMBERS_START + (nbytes + 4) / NUMBERS_RATE
    assert calibration.read_bandwidth == pytest.approx(nbytes / taken, rel=1e-6)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_how_much_longer_small_calls_take_within_a_model(
    machine: FakeMachine, calibration: Calibration, place: int
) -> None:
    """What a step takes here beyond its products, over what its small calls take without Python's modules."""
    layers, width = micro.STACKS[place]
    built = model(torch.float32, layers, width)
    ids = torch.zeros(1, 1, dtype=torch.long)
    with torch.inference_mode():
        cache, _ = run._prefill(built, ids, room=2)
        built(ids, cache=cache, last=True)
        machine.counted.clear()
        built(ids, cache=cache, last=True)
    small = [(name, seconds) for name, seconds in machine.counted if name not in ("mm", "attention")]
    rest = sum(seconds for _, seconds in small)
    # without modules, and without what a device that holds no numbers is not asked for
    unseen = ("module", "_local_scalar_dense", "zeros", "detach_")
    alone = sum(VIEW if seconds == VIEW else NUMBERS_START for name, seconds in small if name not in unseen)
    assert rest > 1.2 * alone  # or it would not matter
    between = calibration.rates["fp32"].between
    assert between.seconds[place] == pytest.approx(rest / alone, rel=0.04)
    # keys and values are half as wide as queries; gate, up and down are three times as wide; 8 width tokens
    block = width * width * (2 + 2 * 0.5 + 3 * 3)
    assert between.axes[0][place] == 4 * (layers * block + 8 * width * width)


def test_it_is_level_beyond_the_stacks_that_were_timed(calibration: Calibration) -> None:
    rates = replace(calibration.rates["fp32"], between=TimeGrid(((100, 400),), (1.0, 4.0)))
    assert [rates.slowed(nbytes) for nbytes in (0, 100, 400, 10**12)] == pytest.approx([1.0, 1.0, 4.0, 4.0])
    assert rates.slowed(200) == pytest.approx(2.0)  # the middle of both


def test_a_model_takes_its_work_and_its_starts_as_often_as_is_said() -> None:
    """One product of 8 x 2 numbers, one sum of 16 bytes, one view; all by hand."""
    flat = TimeGrid(((1, 2), (1, 2)), (3.0,) * 4)
    lines = {"arithmetic": LinearTime(start=0.5, rate=4.0), "view": LinearTime(start=0.25, rate=1.0)}
    rates = Rates(
        vector=flat,
        matrix=flat,
        attention=flat,
        attention_read=flat,
        lines=lines,
        between=TimeGrid(((16, 64),), (2.0, 8.0)),
        product_rate=1,
        row_rate=1,
    )
    calls = (
        Call("mm", "vector", 32, (8, 2), matrix=32),
        Call("add", "numbers", 16),
        Call("t", "numbers", 0, line="view"),
    )
    known = Calibration(machine={}, read_bandwidth=1, rates={"fp32": rates}, probes={}, others=None)
    assert Trace(calls).seconds(known, "fp32") == pytest.approx(3.0 + 16 / 4 + 4.0 * (0.5 + 0.25))


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_predicted_is_measured(calibration: Calibration, name: str) -> None:
    found = measure(model(DTYPES[name]), name="a model")
    timed = [row for row in found.rows if row.timed]
    assert [row.figure for row in timed] == ["prefill, 70 tokens", "decode after 35 tokens"]
    assert [abs(row.error) < 0.04 for row in timed] == [True, True], timed
    assert [row.tolerance for row in timed] == [TIME, TIME]
    assert found.notes == ()
    assert (found.model, found.dtype) == ("a model", name)


def test_measured_is_what_the_model_takes_and_predicted_what_the_calibration_says(calibration: Calibration) -> None:
    """Two ways in which a report could agree with itself: each side is worked out here without the other."""
    built = model(torch.float32)
    prefill, decode = (row for row in measure(built).rows if row.timed)
    assert prefill.measured == pytest.approx(70 / run.prefill_seconds(built, 70, 1))
    assert decode.measured == pytest.approx(1 / run.decode_seconds(built, 35, 17), rel=0.002)
    assert prefill.predicted != prefill.measured
    assert decode.predicted != decode.measured


def test_a_step_by_hand(machine: FakeMachine) -> None:
    """One block of width 128 in float32, two heads of 64 that share keys and values, an MLP of 384, 1024 tokens."""
    built = model(torch.float32, 1, 128)
    run.decode_seconds(built, 32, 1)
    machine.counted.clear()
    run.decode_seconds(built, 32, 2)
    products = [seconds for name, seconds in machine.counted if name in ("mm", "attention")]
    matrices = (
        128 * (128 + 2 * 64),
        128 * 128,
        128 * 2 * 384,
        384 * 128,
        128 * 1024,
    )  # qkv, output, gate and up, down, head
    for keys, step in (33, products[-12:-6]), (34, products[-6:]):  # after one token, and after two
        numbers = matrices[0], 2 * keys * 64, *matrices[1:]
        assert step == pytest.approx([4 * number / READ_RATE for number in numbers])


def test_what_is_done_the_first_time_is_not_timed(machine: FakeMachine) -> None:
    once = run.prefill_seconds(model(torch.float32), 96, 1)
    assert run.prefill_seconds(model(torch.float32), 96, 1) == pytest.approx(once, rel=1e-9)
    memory = micro._Memory(torch.float32)
    calls = [micro._matrix(3, 40, 24)]  # a size of its own, so that the first is the first
    assert micro._in_turn(calls, memory, 1) == pytest.approx(micro._in_turn(calls, memory, 1), rel=1e-6)


def test_the_lower_quartile_of_steps(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours slow most steps down; a quarter of them say what the machine can do."""
    assert lower_quartile([4.0, 1.0, 3.0, 2.0, 5.0, 6.0, 7.0]) == 2.0
    assert lower_quartile([3.0]) == 3.0


def test_a_line_and_a_table_by_hand() -> None:
    assert LinearTime(start=2.0, rate=4.0).seconds(12.0) == 5.0
    assert TimeGrid(((1, 4), (1, 16)), (1.0, 2.0, 4.0, 8.0)).at(2, 4) == pytest.approx(8.0**0.5)  # the middle of both


def test_what_is_promised() -> None:
    """As README and docs/plan.md state it."""
    assert (report.SAVED, report.MEMORY, report.TIME) == (0.01, 0.03, 0.20)
    assert (PREFILL_TOKENS, PROMPT, STEPS, ROUNDS, PREFILLS) == (512, 128, 64, 4, 3)
    assert (DRIFT, LOOKS) == (1.2, 4)


class TestAMachineWhoseSpeedChanges:
    """It is calibrated anew where it no longer runs as it did, and its owner is told where it does not hold still."""

    def count(self, monkeypatch: pytest.MonkeyPatch) -> list[None]:
        counted: list[None] = []
        measured = micro.measured
        monkeypatch.setattr(micro, "measured", lambda machine: (counted.append(None), measured(machine))[1])
        return counted

    def test_between_two_runs(
        self, machine: FakeMachine, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counted, said = self.count(monkeypatch), list[str]()
        machine.speed = 1.15
        assert calibrate(say=said.append) == calibration
        machine.speed = 0.8
        slower = calibrate(say=said.append)
        assert len(counted) == 1
        assert slower.rates["fp32"].row_rate == pytest.approx(0.8 * READ_RATE, rel=0.005)
        assert calibrate() == slower
        machine.speed = 1.0
        assert calibrate().rates["fp32"].row_rate == pytest.approx(READ_RATE, rel=0.005)
        assert len(counted) == 2
        assert any("a factor of 1.25" in text for text in said)

    def test_while_it_is_calibrated(self, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was measured then is neither kept nor passed on in silence."""
        measured = micro.measured

        def slowing(identity: object) -> Calibration:
            found = measured(identity)  # type: ignore[arg-type]
            machine.speed /= 2
            return found

        monkeypatch.setattr(micro, "measured", slowing)
        warned: list[str] = []
        calibrate(warn=warned.append)
        calibrate(warn=warned.append)
        assert len(warned) == 2
        assert "a factor of 2.00" in warned[0]

    def test_while_a_model_is_measured(
        self, machine: FakeMachine, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Slower from the first decode on: measured again at that speed, and predicted for it."""
        counted, decode = self.count(monkeypatch), run.decode_seconds

        def slow(*args: object) -> float:
            machine.speed = 0.5
            return decode(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(run, "decode_seconds", slow)
        found = measure(model(torch.float32))
        assert len(counted) == 1
        assert [abs(row.error) < 0.04 for row in found.rows if row.timed] == [True, True]
        assert found.notes == ()

    def test_all_the_time(
        self, machine: FakeMachine, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decode = run.decode_seconds

        def slower(*args: object) -> float:
            machine.speed *= 0.8
            return decode(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(run, "decode_seconds", slower)
        assert "the machine's speed changed" in measure(model(torch.float32)).notes[0]


def test_a_report_is_good_where_all_but_the_speeds_are() -> None:
    def row(unit: str, measured: float) -> Row:
        return Row(figure="", unit=unit, predicted=100, measured=measured, tolerance=0.2)

    def ok(*rows: Row) -> bool:
        return Report(model="", dtype="", machine=None, rows=rows).ok  # type: ignore[arg-type]

    assert ok(row("tokens/s", 500), row("bytes", 120))
    assert not ok(row("tokens/s", 100), row("bytes", 121))
    assert [row("", measured).error for measured in (100, 150, 50)] == [0.0, 0.5, -0.5]
    assert Row(figure="", unit="", predicted=0, measured=1, tolerance=0.2).error == float("inf")


def test_a_busy_machine_is_told(
    machine: FakeMachine, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing.Others, "share", lambda self: 0.25)
    assert measure(model(torch.float32)).notes == ("other processes used 25% of the CPUs while speeds were measured",)
    assert measure(model(torch.float32), refresh=True).notes[0].endswith("25% of the CPUs while it was calibrated")
    monkeypatch.setattr(timing.Others, "share", lambda self: 0.09)
    assert measure(model(torch.float32), refresh=True).notes == ()


def test_the_lower_quartile_of_rounds(
    machine: FakeMachine, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the way from the least time to the next, as quantiles of four are."""
    times = {"prefill_seconds": [8.0, 2.0, 4.0, 4.0], "decode_seconds": [0.5, 0.25, 0.125, 0.25]}
    monkeypatch.setattr(micro, "Probe", lambda: lambda: calibration.probes)
    for name, kept in times.items():
        monkeypatch.setattr(run, name, lambda *_, left=kept: left.pop())
    prefill, decode = (row for row in measure(model(torch.float32)).rows if row.timed)
    assert (prefill.measured, decode.measured) == (
        70 / 2.5,
        pytest.approx(1 / 0.15625),
    )  # a quarter of the way from 2 to 4

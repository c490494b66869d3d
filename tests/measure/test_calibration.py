"""The calibration that is kept: found again, and measured anew where the file is anything else."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from asbuilt.measure import calibrate, micro
from asbuilt.measure.calibrate import LOOKS, cache_path, machine
from asbuilt.measure.rates import DTYPES, Calibration, LinearTime, Rates, TimeGrid


def a_calibration(speed: float = 1.0) -> Calibration:
    def table(axes: tuple[tuple[int, ...], ...]) -> TimeGrid:
        points = 1
        for axis in axes:
            points *= len(axis)
        return TimeGrid(axes, tuple(0.001 + i for i in range(points)))

    tables = {name: table(axes) for name, axes in micro.GRIDS.items()}
    lines = {name: LinearTime(1e-6, 1e9) for name in micro.LINES}
    between = table(((10**7, 10**8, 10**9),))
    rates = Rates(**tables, lines=lines, between=between, product_rate=1e11, row_rate=1e10)
    kinds = "reading", *(f"{name} {kind}" for name in DTYPES for kind in micro.KINDS)
    probes = dict.fromkeys(kinds, 0.01 / speed)
    return Calibration(machine(), 2e10 * speed, dict.fromkeys(DTYPES, rates), probes, 0.0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Counts the calibrations that are made; each says so in its bandwidth."""
    made: list[int] = []

    def measure(identity: object) -> Calibration:
        made.append(len(made))
        return replace(a_calibration(), read_bandwidth=1e10 + len(made))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(micro, "measured", measure)
    monkeypatch.setattr(micro, "Probe", lambda: lambda: a_calibration().probes)
    return made


def kept() -> Path:
    path = cache_path()
    assert path is not None
    return path


def test_kept_once_and_the_same_again(measured: list[int]) -> None:
    first = calibrate()
    assert (calibrate(), len(measured)) == (first, 1)
    assert calibrate(refresh=True) != first
    assert len(measured) == 2
    assert calibrate().read_bandwidth == 1e10 + 2
    assert list(kept().parent.iterdir()) == [kept()]


def test_each_machine_has_its_own(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate()
    identity = machine()
    assert identity.keys() >= {"processor", "cores", "threads", "memory_bytes", "torch", "python", "system"}
    module = sys.modules["asbuilt.measure.calibrate"]  # the function has the module's name
    for key in identity:
        monkeypatch.setattr(module, "machine", lambda key=key: identity | {key: "another"})
        assert not kept().exists(), key


def change(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def changed(plain: Any) -> None:  # noqa: ANN401
        *parents, last = path.split("/")
        for parent in parents:
            plain = plain[int(parent) if isinstance(plain, list) else parent]
        plain[int(last) if isinstance(plain, list) else last] = value

    return changed


def drop(path: str) -> Callable[[dict[str, Any]], None]:
    def dropped(plain: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for parent in parents:
            plain = plain[parent]
        del plain[last]

    return dropped


BROKEN = [
    *(change("read_bandwidth", value) for value in (0, -1.0, "fast", None, True, [], 10**400, float("nan"))),
    *(change("rates/fp32/between", value) for value in ({}, [], None, {"axes": [[1, 2]], "seconds": [1.0, 1.0]})),
    *(change("rates/fp32/between/axes/0/0", value) for value in (0, -1, "x", None, 10**12)),
    *(change("rates/bf16/between/seconds/0", value) for value in (0, -1.0, "x", None)),
    *(change("others", value) for value in (-0.1, 1.5, "some")),
    *(change("probes", value) for value in ({}, [], None, {"fp32 decode": 1.0})),
    *(change("probes/bf16 prefill", value) for value in (0, -1, "x", None)),
    *(change("machine", value) for value in ({}, None, {"processor": "another"})),
    *(change("machine/processor", value) for value in ("another", 3)),
    *(change("rates", value) for value in ({}, [], None, {"fp32": {}})),
    *(change("rates/fp32/lines", value) for value in ({}, [], None)),
    *(change("rates/fp32/lines/silu/rate", value) for value in (0, -1, "x", None)),
    *(change("rates/fp32/lines/silu/start", value) for value in (0, -1e-9, None)),
    *(change("rates/bf16/vector/seconds", value) for value in ([], [1.0], None, "x")),
    *(change("rates/bf16/vector/seconds/3", value) for value in (0, -1.0, "x", None, [])),
    *(change("rates/bf16/matrix/axes", value) for value in ([], [[1, 2]], None)),
    *(change("rates/bf16/product_rate", value) for value in (0, "x")),
    *(change("rates/bf16/row_rate", value) for value in (0, -5)),
    *(drop(name) for name in ("machine", "read_bandwidth", "probes", "others", "rates")),
    *(drop(f"rates/fp32/{name}") for name in ("attention", "lines", "between", "row_rate")),
    change("more", 1),
    change("rates/fp32/more", 1),
]


@pytest.mark.parametrize("breaks", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_measured_anew_and_said_once(
    measured: list[int], breaks: Callable[[dict[str, Any]], None]
) -> None:
    plain = json.loads(json.dumps(asdict(a_calibration())))
    breaks(plain)
    kept().parent.mkdir(parents=True)
    kept().write_text(json.dumps(plain))
    said: list[str] = []
    found = calibrate(warn=said.append)
    assert len(measured) == 1
    assert len(said) == 1
    assert str(kept()) in said[0]
    assert calibrate(warn=said.append) == found
    assert (len(measured), len(said)) == (1, 1)


def test_the_file_as_written_is_read(measured: list[int]) -> None:
    kept().parent.mkdir(parents=True)
    kept().write_text(json.dumps(asdict(a_calibration())))
    assert calibrate(warn=pytest.fail) == a_calibration()
    assert measured == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "\x00", '"x"', "{" * 10**5, "\ud800".encode("utf8", "surrogatepass")]
)
def test_what_is_no_json(measured: list[int], text: str | bytes) -> None:
    kept().parent.mkdir(parents=True)
    kept().write_bytes(text if isinstance(text, bytes) else text.encode())
    said: list[str] = []
    assert calibrate(warn=said.append).read_bandwidth > 0
    assert (len(said), len(measured)) == (1, 1)


def in_its_place(kind: str) -> None:
    path = kept()
    path.parent.mkdir(parents=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "huge":
            with path.open("wb") as file:
                file.truncate(10**10)
        case "broken link":
            path.symlink_to("nowhere")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge", "broken link"])
def test_something_else_in_its_place(measured: list[int], kind: str) -> None:
    """It neither hangs nor eats memory, and leaves nothing beside it."""
    in_its_place(kind)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said: list[str] = []
    assert calibrate(warn=said.append).read_bandwidth > 0
    assert len(measured) == 1
    assert str(kept().parent) in said[0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB
    assert list(kept().parent.iterdir()) == [kept()]


def test_a_home_that_cannot_be_written_to(measured: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said: list[str] = []
    assert calibrate(warn=said.append).read_bandwidth > 0
    assert len(said) == 1
    assert "every run calibrates again" in said[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing fails halfway: nothing is left, and it is said."""
    monkeypatch.setattr(json, "dump", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    said: list[str] = []
    calibrate(warn=said.append)
    assert "No space left" in said[0]
    assert list(kept().parent.iterdir()) == []


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("relative/cache", ".", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert kept().parent == tmp_path / ".cache" / "asbuilt"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert kept().parent == tmp_path / "elsewhere" / "asbuilt"


def test_a_neighbour_for_seconds_is_looked_past(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as slow in all looks but the last: nothing is measured anew."""
    calibrate()
    base = a_calibration().probes
    slow = {name: 2 * seconds for name, seconds in base.items()}
    looks = [base, *[slow] * (LOOKS - 1)]
    monkeypatch.setattr(micro, "Probe", lambda: looks.pop)
    calibrate()
    assert (len(measured), looks) == (1, [])


def test_the_machine_it_was_made_on_runs_as_fast(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Any probe that is off by more than 20%, look after look,, either way, has it measured anew."""
    calibrate()
    base = a_calibration().probes
    for name in base:
        for factor, again in ((1.19, 0), (1 / 1.19, 0), (1.21, 1), (1 / 1.21, 1)):
            before = len(measured)
            first = base | {name: base[name] * factor}
            probed = [base, *[first] * LOOKS]
            monkeypatch.setattr(micro, "Probe", lambda probed=probed: lambda: probed.pop() if probed[1:] else base)
            calibrate()
            assert len(measured) - before == again, (name, factor)


def test_a_processor_is_named_by_its_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc/cpuinfo has it, once for each core; elsewhere as Python's own library does."""
    module = sys.modules["asbuilt.measure.calibrate"]  # the function has the module's name
    monkeypatch.setattr(module.platform, "processor", lambda: "by its library")
    lines = "processor\t: 0\nmodel name\t: A Processor\nflags\t: a b\nmodel name\t: A Processor, the second\n"
    monkeypatch.setattr(Path, "read_text", lambda self: lines)
    assert machine()["processor"] == "A Processor"
    monkeypatch.setattr(Path, "read_text", lambda self: "Features : fp asimd\n")
    assert machine()["processor"] == "by its library"

    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert machine()["processor"] == "by its library"


@pytest.mark.parametrize(("size", "times"), [(2**20, 0), (2**20 + 1, 1)])
def test_a_file_of_a_mebibyte_is_the_largest_that_is_read(measured: list[int], size: int, times: int) -> None:
    kept().parent.mkdir(parents=True)
    kept().write_text(json.dumps(asdict(a_calibration())).ljust(size))
    calibrate()
    assert len(measured) == times

"""How much of the processors other processes took: told from the system's count, less this process's own time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from asbuilt.measure import timing


@pytest.fixture
def stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "stat"
    monkeypatch.setattr(timing, "STAT", path)
    monkeypatch.setattr(timing, "_processors", lambda: {0, 2})
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_CLK_TCK": 100}[name])
    return path


def lines(first: str, second: str, third: str) -> str:
    return f"cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 {first}\ncpu1 {second}\ncpu2 {third}\nintr 5\n"


def shared(stat: Path, monkeypatch: pytest.MonkeyPatch, after: str, seconds: float, own: float) -> float | None:
    now, used = [100.0], [3.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing, "_own_seconds", lambda: used[0])
    stat.write_text(lines("10 20 30 400 50 60 70 80 90 90", "0 0 0 0 0 0 0 0 0 0", "1 1 1 1 1 1 1 1 1 1"))
    others = timing.Others()
    stat.write_text(after)
    now[0], used[0] = now[0] + seconds, used[0] + own
    return others.share()


# In ticks of 10 ms, of processors 0 and 2: user +100, nice +50, system +40 | irq +30, softirq +20, steal +60: 3 s busy.
AFTER = lines("110 70 70 9999 9999 60 70 80 999 999", "500 500 500 500 500 500 500 500 0 0", "1 1 1 1 1 31 21 61 1 1")


def test_their_share(stat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy for 3 s on two processors in 4 s, 1 s of it ourselves: 2 of 8."""
    assert shared(stat, monkeypatch, AFTER, 4.0, 1.0) == pytest.approx(0.25)


def test_it_is_a_share(stat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared(stat, monkeypatch, AFTER, 4.0, 9.0) == 0.0
    assert shared(stat, monkeypatch, AFTER, 0.5, 0.0) == 1.0


@pytest.mark.parametrize("text", ["", "cpu 1 2", "cpu0 x", "cpu0 1 2 3\ncpu2 1 2 3", "cpu0 1 1 1 1 1 1 1 1 1 1"])
def test_a_system_that_does_not_tell(stat: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    assert shared(stat, monkeypatch, text, 1.0, 0.0) is None
    stat.unlink()
    assert timing.Others().share() is None


@pytest.mark.skipif(not timing.STAT.exists(), reason="needs /proc/stat")
def test_this_process_is_not_among_the_others() -> None:
    """Alone on one processor it takes all of it: the share left to others falls by what it took."""
    others, end = timing.Others(), time.perf_counter() + 0.5
    while time.perf_counter() < end:
        pass
    share, cores = others.share(), len(timing._processors())
    assert share is not None
    assert share <= 1 - (timing._own_seconds() - others.own) / (time.perf_counter() - others.start) / cores + 0.1


def test_seconds_are_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(timing, "clock", lambda: now[0])
    assert timing.seconds(lambda: now.__setitem__(0, now[0] + 2.5)) == 2.5

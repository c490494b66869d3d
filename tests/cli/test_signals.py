"""What a signal does, by where it comes: between frames that import, that work, or neither; nothing is sent here."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asbuilt.cli import signals
from asbuilt.cli.signals import Stopped

IMPORTING = "<frozen importlib._bootstrap>"


class Ended(BaseException):
    """What `os._exit` would have done."""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing asked yet, no process ended, and all handlers as they were afterwards."""

    def end(code: int) -> None:
        raise Ended(code)

    before = {number: signal.getsignal(number) for number in (*signals._numbers(), signal.SIGALRM)}
    monkeypatch.setattr(signals, "_Asked", type("Asked", (signals._Asked,), {}))
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def reminders(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """The timers that were set."""
    found: list[tuple[int, float]] = []
    monkeypatch.setattr(signal, "setitimer", lambda *timer: found.append(timer))
    return found


def frames(*of: str) -> Any:  # noqa: ANN401  what has the attributes of a frame
    """A frame and those below it: a module's name, or IMPORTING; None is a module without a name."""
    below: Any = None
    for name in reversed(of):
        file, named = (name, {}) if name.startswith("<") else (f"{name}.py", {"__name__": name} if name else {})
        below = SimpleNamespace(f_code=SimpleNamespace(co_filename=file), f_globals=named, f_back=below)
    return below


def ended(call: Callable[[], object]) -> int | type[BaseException] | None:
    """The exit code, or what was raised."""
    try:
        call()
    except Ended as end:
        return end.args[0]
    except Stopped:
        return Stopped
    return None


def test_a_hand_that_hammers_is_one_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within two seconds; the first may come while the clock of the system stands at zero."""
    told = [
        (0.0, 15, Stopped, 143),
        (1.99, 2, None, 143),
        (2.0, 2, Stopped, 130),
        (3.9, 1, None, 130),
        (4.5, 1, Stopped, 129),
    ]
    assert signals.exit_code(7) == 7
    for now, number, raised, code in told:
        monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda now=now: now))
        assert ended(lambda number=number: signals._stop(number, frames("asbuilt.cost"))) is raised
        assert signals.exit_code(7) == code


@pytest.mark.parametrize(
    ("stack", "outcome", "reminded"),
    [
        (("asbuilt.cost", "asbuilt.cli.main"), Stopped, False),
        (("torch", IMPORTING, "asbuilt.cli.generate", "asbuilt.cli.main"), 143, False),
        (("torch", IMPORTING, "asbuilt.__main__"), 143, False),
        (("torch", IMPORTING, IMPORTING, "torch", IMPORTING, "asbuilt", "click"), 143, False),
        (("torch", IMPORTING, "asbuilt.checkpoint.save", "asbuilt.cli.convert"), None, True),
        (("torch", IMPORTING, "asbuilt.cli.convert", "click", "asbuilt.checkpoint.save"), None, True),
        # what is imported is no work that was begun
        (("asbuilt.nn", IMPORTING, "asbuilt.cli.generate"), 143, False),
        (("torch", IMPORTING), Stopped, False),
        (("torch", IMPORTING, ""), 143, False),
    ],
    ids=str,
)
def test_where_a_signal_comes(
    stack: tuple[str, ...], outcome: object, reminded: bool, reminders: list[tuple[int, float]]
) -> None:
    """An import at the bottom of a command ends it at once, one amid work is waited for a hundredth of a second."""
    signals._Asked.number = 15
    assert ended(lambda: signals._raise(frames(*stack))) == outcome
    assert reminders == ([(signal.ITIMER_REAL, 0.01)] if reminded else [])
    if reminded:
        assert ended(lambda: signals._remind(14, frames("asbuilt.checkpoint.save"))) is Stopped


def test_an_alarm_of_somebody_else_is_nothing() -> None:
    assert ended(lambda: signals._remind(14, frames("asbuilt.cost"))) is None


def test_without_timers_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "setitimer")
    signals._Asked.number = 15
    assert ended(lambda: signals._raise(frames("torch", IMPORTING, "asbuilt.checkpoint.save"))) is Stopped


def test_the_import_statement_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a module that imports a module: the first, which stands here."""
    (tmp_path / "outer_one.py").write_text("import inner_one")
    (tmp_path / "inner_one.py").write_text(
        "import sys\nfrom asbuilt.cli.signals import _imports_from\nfound = _imports_from(sys._getframe())"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import outer_one  # type: ignore[import-not-found]

    assert outer_one.inner_one.found is sys._getframe()
    assert signals._imports_from(sys._getframe()) is None
    assert signals._imports_from(None) is None


def test_which_signals_are_taken_and_given_back() -> None:
    """`nohup` has SIGHUP ignored, and so it stays; after the end the others end the process at once."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has jobs in the background ignore it
    signals.install()
    taken = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    assert taken == [signals._stop, signals._stop, signals._remind]
    assert sys.unraisablehook is signals._unraisable
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as a library may have it
    signals.done()
    assert [signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)] == [signal.SIG_IGN, signal.SIG_DFL]
    last: Any = signal.getsignal(signal.SIGTERM)
    assert ended(lambda: last(15, None)) == 143


def test_what_a_finaliser_swallows(monkeypatch: pytest.MonkeyPatch, reminders: list[tuple[int, float]]) -> None:
    """Ours is raised again in a moment, any other is Python's to print."""
    printed: list[Any] = []
    monkeypatch.setattr(sys, "__unraisablehook__", printed.append)
    ours: Any = SimpleNamespace(exc_value=Stopped())
    other: Any = SimpleNamespace(exc_value=ValueError())
    signals._unraisable(ours)
    assert (printed, reminders) == ([], [(signal.ITIMER_REAL, 0.01)])
    signals._unraisable(other)
    assert (printed, len(reminders)) == ([other], 1)
    monkeypatch.delattr(signal, "setitimer")
    signals._unraisable(ours)
    assert printed == [other, ours]


@pytest.mark.parametrize(("number", "code"), [(0, 3), (15, 143)])
def test_the_last_of_a_process(number: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered for the end is run, streams are flushed, whatever either raises."""
    done: list[str] = []

    def note(what: str) -> Callable[[], None]:
        def fail() -> None:
            done.append(what)
            raise ValueError

        return fail

    monkeypatch.setattr(atexit, "_run_exitfuncs", note("functions"))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, SimpleNamespace(flush=note(name)))
    signals._Asked.number = number
    assert ended(lambda: signals.leave(3)) == code
    assert done == ["functions", "stdout", "stderr"]

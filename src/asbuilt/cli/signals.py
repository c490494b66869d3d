"""What stops a command: SIGINT, SIGTERM and SIGHUP unwind it, so that what it has begun is undone; it exits 128 + n.

Three places must not be interrupted by an exception. Extension modules that are being initialised print it or abort: at
the bottom of a command nothing has been begun, so an import there ends the process at once, and one that the library
makes amid its work is waited for. A finaliser swallows it: it is raised again a moment later. And the undoing itself: a
signal that comes within two seconds of another is the same hand, and is passed over.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
SAME_HAND, MOMENT = 2.0, 0.01  # seconds
IMPORTING = "<frozen importlib"


class Stopped(BaseException):
    """A signal asks the command to stop.

    No KeyboardInterrupt: click, and other libraries, have an answer of their own to that.
    """


class _Asked:
    """Which signal asked for the end, and when."""

    number = 0
    at = -SAME_HAND


def install() -> None:
    """Has the signals raise `Stopped`; those that whoever started us has ignored (nohup) stay so."""
    for number in _numbers():
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, _remind)
    sys.unraisablehook = _unraisable


def done() -> None:
    """Says that the command has ended: what comes now ends the process at once, and prints nothing."""
    for number in _numbers():
        if signal.getsignal(number) == _stop:
            signal.signal(number, lambda number, _: os._exit(128 + number))


def leave(code: int) -> NoReturn:
    """Ends the process, nothing being left to undo: a signal while the interpreter is taken down would be printed."""
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(exit_code(code))


def exit_code(usual: int) -> int:
    """Returns 128 + n where signal n asked for the end, the usual code otherwise."""
    return 128 + _Asked.number if _Asked.number else usual


def _numbers() -> list[int]:
    return [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


def _stop(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if now - _Asked.at >= SAME_HAND:
        _Asked.number, _Asked.at = number, now
        _raise(frame)


def _remind(_: int, frame: FrameType | None) -> None:
    if _Asked.number:
        _raise(frame)


def _raise(frame: FrameType | None) -> None:
    imports = _imports_from(frame)
    if imports is None:
        raise Stopped
    if not any(map(_is_working, _callers(imports))):
        os._exit(128 + _Asked.number)
    if not _again_soon():
        raise Stopped


def _again_soon() -> bool:
    """Has `_remind` called in a moment; returns whether this system can do that."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, MOMENT)
        return True
    return False


def _callers(frame: FrameType | None) -> list[FrameType]:
    """The frame and all below it."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _imports_from(frame: FrameType | None) -> FrameType | None:
    """Returns the frame of the first import statement that is being run, if any is."""
    callers = _callers(frame)
    inside = [i for i, found in enumerate(callers) if found.f_code.co_filename.startswith(IMPORTING)]
    return callers[inside[-1] + 1] if inside and inside[-1] + 1 < len(callers) else None


def _is_working(frame: FrameType) -> bool:
    """Whether the frame is a function of the library, not of the command line: it may have begun something."""
    name = frame.f_globals.get("__name__", "")
    return name.startswith("asbuilt.") and not name.startswith(("asbuilt.cli", "asbuilt.__main__"))


def _unraisable(caught: sys.UnraisableHookArgs) -> None:
    if not (isinstance(caught.exc_value, Stopped) and _again_soon()):
        sys.__unraisablehook__(caught)

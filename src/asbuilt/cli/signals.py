"""How signals stop a command: SIGINT, SIGTERM and SIGHUP unwind it so that it cleans up; it exits with 128 + n.

Three places must not be interrupted by an exception. Extension modules that are being initialised print it or abort:
during a command's own imports there is nothing to clean up yet, so the process ends at once, while imports that the
library makes during its work are allowed to finish. Finalisers swallow it: it is raised again a moment later. And the
cleanup itself: a second signal within two seconds of the first is ignored.
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
    """A signal asked the command to stop.

    Not a KeyboardInterrupt, which click and other libraries handle in their own way.
    """


class _Asked:
    """Which signal asked the command to stop, and when."""

    number = 0
    at = -SAME_HAND


def install() -> None:
    """Makes the signals raise `Stopped`; signals ignored by the parent process (nohup) stay ignored."""
    for number in _numbers():
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, _remind)
    sys.unraisablehook = _unraisable


def done() -> None:
    """Marks the command as ended: a later signal ends the process at once and prints nothing."""
    for number in _numbers():
        if signal.getsignal(number) == _stop:
            signal.signal(number, lambda number, _: os._exit(128 + number))


def leave(code: int) -> NoReturn:
    """Ends the process at once: a signal during the interpreter's shutdown would print a traceback."""
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(exit_code(code))


def exit_code(usual: int) -> int:
    """Returns 128 + n if signal n asked the command to stop, the usual code otherwise."""
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
    """Schedules `_remind` in a moment; returns whether the system supports that."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, MOMENT)
        return True
    return False


def _callers(frame: FrameType | None) -> list[FrameType]:
    """Returns the frame and its callers."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _imports_from(frame: FrameType | None) -> FrameType | None:
    """Returns the frame of the outermost import statement being run, if any."""
    callers = _callers(frame)
    inside = [i for i, found in enumerate(callers) if found.f_code.co_filename.startswith(IMPORTING)]
    return callers[inside[-1] + 1] if inside and inside[-1] + 1 < len(callers) else None


def _is_working(frame: FrameType) -> bool:
    """Returns whether the frame is a function of the library rather than the command line, and may need cleanup."""
    name = frame.f_globals.get("__name__", "")
    return name.startswith("asbuilt.") and not name.startswith(("asbuilt.cli", "asbuilt.__main__"))


def _unraisable(caught: sys.UnraisableHookArgs) -> None:
    if not (isinstance(caught.exc_value, Stopped) and _again_soon()):
        sys.__unraisablehook__(caught)

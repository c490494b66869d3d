"""The streams that a command writes to: what is shown on them, and what happens where they are closed, full or left.

Everything that reaches a terminal or stderr passes through here, whoever wrote it: our tables, click's usage errors, a
library's warnings, a traceback. Only stdout's failure is an answer that did not arrive; a message that nobody can read
is silence.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import sys
from typing import Any, TextIO

from asbuilt.shown import prose

# A library's progress bar (tqdm, as the hub's is): back to where the line began, or up to another bar's line.
BAR = re.compile(r"\r|(\x1b\[A)+\Z")
READER_LEFT = 141  # 128 + SIGPIPE, what a shell says of any program whose reader left


class Lost(Exception):
    """What stdout was to carry cannot be written; `exit_code` says whether its reader left."""

    def __init__(self, code: int, why: str) -> None:
        self.exit_code = READER_LEFT if code == errno.EPIPE else 1
        super().__init__(f"stdout cannot be written: {why}")


class _Raw(io.RawIOBase):
    """Bytes to a file descriptor; after the first failure they go nowhere."""

    def __init__(self, under: io.RawIOBase, *, needed: bool) -> None:
        self._under, self._needed, self._lost = under, needed, False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._under.fileno()

    def isatty(self) -> bool:
        return self._under.isatty()

    def write(self, data: Any, /) -> int:  # noqa: ANN401  whatever holds bytes
        """Writes some of the data; raises `Lost` where this is stdout and it cannot be written."""
        while not self._lost:
            try:
                written = self._under.write(data)
            except OSError as error:
                self._lost = True
                if self._needed:
                    raise Lost(error.errno or 0, error.strerror or str(error)) from error
            else:
                if written is not None:
                    return written
                select.select([], [self.fileno()], [])  # a pipe that does not block is full
        return len(data)


class Guarded(io.TextIOWrapper):
    """Text whose control characters are escaped where `escaping`; what draws with them itself uses `draw`."""

    def __init__(self, like: TextIO, raw: _Raw, *, escaping: bool) -> None:
        lines = raw.isatty() or escaping
        super().__init__(io.BufferedWriter(raw), encoding=like.encoding, errors="replace", line_buffering=lines)
        self._like = like  # which would close the descriptor if nobody held it
        self._escaping, self._left = escaping, ""

    def write(self, text: str, /) -> int:
        """Writes the text, escaped; returns its length."""
        drawn = BAR.match(text) if self._escaping and self.isatty() else None
        begun = drawn[0] if drawn else ""
        super().write(begun + prose(text[len(begun) :], self._left) if self._escaping else text)
        self._left = text[-1:]
        return len(text)

    def draw(self, text: str) -> None:
        """Writes the text as it is, and at once."""
        super().write(text)
        self.flush()


def draw(stream: TextIO | None, text: str) -> None:
    """Writes what holds control characters of ours, such as colours; nothing where there is no such stream."""
    if isinstance(stream, Guarded):
        stream.draw(text)
    elif stream is not None:
        stream.write(text)


def guard() -> None:
    """Puts the guarded streams in place of this process's own; raises `Lost` where stdout is closed.

    Descriptors that are closed are opened on nothing, so that no file that is opened later becomes stdout or stderr.
    """
    closed = [number for number in range(3) if not _open(number)]
    for _ in closed:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free
    if sys.stderr is None:  # what is printed to None goes to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = guarded(sys.stderr, needed=False, escaping=True)
    if sys.stdout is None or 1 in closed:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise Lost(errno.EBADF, "it is closed")
    sys.stdout = guarded(sys.stdout, needed=True, escaping=sys.stdout.isatty())


def _open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def guarded(stream: TextIO, *, needed: bool, escaping: bool) -> TextIO:
    """Returns the stream guarded; one that is no file of the system, such as a test's, as it is."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    raw = stream.buffer
    return Guarded(stream, _Raw(getattr(raw, "raw", raw), needed=needed), escaping=escaping)

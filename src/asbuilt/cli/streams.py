"""The streams that a command writes to: escaping, and what happens when they are closed, full or no longer read.

Everything that reaches a terminal or stderr passes through here: tables, click's usage errors, libraries' warnings,
tracebacks. Only a failure of stdout is an error; a message that stderr cannot take is dropped.
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

# A library's progress bar (tqdm, as the hub uses): a return to the start of the line, or to another bar's line.
BAR = re.compile(r"\r|(\x1b\[A)+\Z")
READER_LEFT = 141  # 128 + SIGPIPE, as shells report for a program whose reader closed the pipe


class Lost(Exception):
    """stdout cannot be written; `exit_code` tells whether its reader closed it."""

    def __init__(self, code: int, why: str) -> None:
        self.exit_code = READER_LEFT if code == errno.EPIPE else 1
        super().__init__(f"stdout cannot be written: {why}")


class _Raw(io.RawIOBase):
    """Writes bytes to a file descriptor; after the first failure they are discarded."""

    def __init__(self, under: io.RawIOBase, *, needed: bool) -> None:
        self._under, self._needed, self._lost = under, needed, False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._under.fileno()

    def isatty(self) -> bool:
        return self._under.isatty()

    def write(self, data: Any, /) -> int:  # noqa: ANN401  any buffer
        """Writes some of the data; raises `Lost` if this is stdout and it cannot be written."""
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
                select.select([], [self.fileno()], [])  # a non-blocking pipe is full
        return len(data)


class Guarded(io.TextIOWrapper):
    """Text whose control characters are escaped if `escaping`; `draw` writes them unescaped."""

    def __init__(self, like: TextIO, raw: _Raw, *, escaping: bool) -> None:
        lines = raw.isatty() or escaping
        super().__init__(io.BufferedWriter(raw), encoding=like.encoding, errors="replace", line_buffering=lines)
        self._like = like  # kept alive: its finaliser would close the descriptor
        self._escaping, self._left = escaping, ""

    def write(self, text: str, /) -> int:
        """Writes the text, escaped; returns its length."""
        drawn = BAR.match(text) if self._escaping and self.isatty() else None
        begun = drawn[0] if drawn else ""
        super().write(begun + prose(text[len(begun) :], self._left) if self._escaping else text)
        self._left = text[-1:]
        return len(text)

    def draw(self, text: str) -> None:
        """Writes the text unescaped, and flushes."""
        super().write(text)
        self.flush()


def draw(stream: TextIO | None, text: str) -> None:
    """Writes text with intended control characters, such as colours; does nothing without a stream."""
    if isinstance(stream, Guarded):
        stream.draw(text)
    elif stream is not None:
        stream.write(text)


def guard() -> None:
    """Replaces this process's streams by guarded ones; raises `Lost` if stdout is closed.

    Closed descriptors are opened on /dev/null, so that no file opened later becomes stdout or stderr.
    """
    closed = [number for number in range(3) if not _open(number)]
    for _ in closed:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free descriptor
    if sys.stderr is None:  # print(file=None) would go to stdout
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
    """Returns the stream guarded, or unchanged if it has no file descriptor, as in a test."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    raw = stream.buffer
    return Guarded(stream, _Raw(getattr(raw, "raw", raw), needed=needed), escaping=escaping)

"""A terminal of this process: what a command writes to it, as the terminal would get it."""

from __future__ import annotations

import os
import pty
import re
import threading
from collections.abc import Callable, Iterator

import pytest

from asbuilt.cli import streams
from asbuilt.cli.main import cli

# What we write ourselves: tables' bold, and how much of a conversion is done.
STYLE = re.compile(r"\x1b\[[0-9;]*m|\r( | \d|\d\d)\d% of ")

OnTerminal = Callable[..., tuple[int, str]]


def command_on_terminal(monkeypatch: pytest.MonkeyPatch) -> OnTerminal:
    """Returns what runs `asbuilt` with both streams on a terminal of so many columns: exit code, and all it wrote."""

    def run(*words: object, columns: int = 80) -> tuple[int, str]:
        master, slave = pty.openpty()
        parts: list[bytes] = []
        reader = threading.Thread(target=lambda: parts.extend(_all_of(master)))
        reader.start()
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        with monkeypatch.context() as patch, os.fdopen(slave, "w", encoding="utf-8") as terminal:
            for name, needed in (("stdout", True), ("stderr", False)):
                patch.setattr("sys." + name, streams.guarded(terminal, needed=needed, escaping=True))
            with pytest.raises(SystemExit) as ended:
                cli.main([str(word) for word in words], prog_name="asbuilt")
        reader.join()
        os.close(master)
        assert isinstance(ended.value.code, int)
        return ended.value.code, b"".join(parts).decode().replace("\r\n", "\n")

    return run


def _all_of(descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # the other end is closed
            return
        if not data:
            return
        yield data


def obeyed(text: str) -> list[str]:
    """Returns what a terminal would obey or not draw in the text, our own styles and line ends aside."""
    return [c for c in STYLE.sub("", text) if not c.isprintable() and c not in "\n"]

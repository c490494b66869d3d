"""Lines from a user: with the terminal's editing, or from a pipe; and what is shown beside answers."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from asbuilt.cli.output import warn
from asbuilt.cli.signals import SAME_HAND
from asbuilt.cli.streams import draw
from asbuilt.errors import InputError
from asbuilt.shown import line

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'  # around a message of several lines
LONGEST = 1 << 26  # bytes of a line


def interactive() -> bool:
    """Returns whether a person types and reads."""
    return bool(sys.stdin and sys.stdout and sys.stdin.isatty() and sys.stdout.isatty())


def lines() -> Iterator[str]:
    """Yields the lines of stdin, without their ends; raises InputError for one that is not UTF-8 or too long."""
    if sys.stdin is None:
        raise InputError("is closed", field="stdin", fix="pipe questions to it, one a line")
    stdin, number = sys.stdin.buffer, 0
    while data := stdin.readline(LONGEST + 1):
        number += 1
        if len(data) > LONGEST:
            raise InputError("too long", field=f"line {number} of stdin", allowed=f"at most {LONGEST:,} bytes")
        try:
            yield data.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            said = f"not UTF-8: {error.reason} at byte {error.start}"
            raise InputError(said, field=f"line {number} of stdin") from error


def typed(words: tuple[str, ...]) -> Iterator[str]:
    """Yields what is typed at prompts, of several lines between triple quotes, until the end of the file.

    The keys of readline edit; Tab completes `words`.
    """
    _edit(words)
    while True:
        try:
            text = input(PROMPT)
            while text.startswith(QUOTES) and not (text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES)):
                text += "\n" + input(MORE)
        except EOFError:
            print(flush=True)
            return
        except UnicodeDecodeError:
            warn("that is not UTF-8")
            continue
        except BaseException:  # Ctrl-C: the shell's own prompt begins a line
            print(flush=True)
            raise
        yield text[len(QUOTES) : -len(QUOTES)] if text.startswith(QUOTES) else text


def _edit(words: tuple[str, ...]) -> None:
    """Lets readline edit the lines, where Python has it."""
    with contextlib.suppress(ImportError):
        import readline

        found: list[str] = []

        def complete(text: str, number: int) -> str | None:
            if number == 0:
                found[:] = [word for word in words if text and word.startswith(text)]
            return found[number] if number < len(found) else None

        readline.set_completer(complete)
        readline.set_completer_delims(" \n")
        readline.parse_and_bind("tab: complete")


def aside(text: str) -> None:
    """Prints a line beside the answers on stderr, dim on a terminal."""
    plain = not sys.stderr.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if plain:
        warn(text)
    else:
        draw(sys.stderr, f"\x1b[2m{line(text)}\x1b[0m\n")


@contextlib.contextmanager
def interrupting(stop: Callable[[], None]) -> Iterator[None]:
    """Has Ctrl-C call `stop`, once; another one, unless by the same hand, does what it did before."""
    before: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before == signal.SIG_IGN:
        yield
        return

    pressed: list[float] = []

    def press(number: int, frame: Any) -> None:  # noqa: ANN401
        pressed.append(time.monotonic())
        if len(pressed) == 1:
            stop()
        elif pressed[-1] - pressed[0] >= SAME_HAND and callable(before):
            before(number, frame)

    signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

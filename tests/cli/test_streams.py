"""Streams that are closed, full or left, and signals: an exit code that says so, at most one message, no traceback."""

from __future__ import annotations

import errno
import io
import os
import pty
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asbuilt.cli import streams

ASBUILT = [sys.executable, "-m", "asbuilt"]
NOWHERE = "Error: stdout cannot be written: "


def shell(words: str, redirected: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs `asbuilt words` with streams as the shell redirects them."""
    command = f'exec "$PYTHON" -m asbuilt {words} {redirected}'
    env = os.environ | {"PYTHON": sys.executable} | more
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("words", ["describe gpt2", "models --json", "--help", "plan serve --help"])
def test_a_full_disk_is_one_message(words: str) -> None:
    ran = shell(words, ">/dev/full")
    assert (ran.returncode, ran.stderr) == (1, NOWHERE + "No space left on device\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_message_that_nobody_can_read_is_silence() -> None:
    ran = shell("describe nothing", "2>/dev/full")
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", "")


@pytest.mark.parametrize(
    ("words", "redirected", "code", "said"),
    [
        ("describe gpt2", ">&-", 1, ("", NOWHERE + "it is closed\n")),
        ("describe gpt2", "1</dev/null", 1, ("", NOWHERE + "Bad file descriptor\n")),
        ("describe gpt2", ">&- 2>&-", 1, ("", "")),
        ("describe gpt2", "2>&-", 0, ("gpt2 (gpt2): 124,439,808 parameters", "")),
        ("describe nothing", "2>&-", 2, ("", "")),
        ("describe gpt2", "<&-", 0, ("gpt2 (gpt2): 124,439,808 parameters", "")),
        ("generate gpt2", "<&-", 1, ("", "Error: stdin is closed: give a PROMPT\n")),
        ("generate gpt2", "0>/dev/null", 1, ("", "Error: stdin cannot be read: Bad file descriptor\n")),
        ("describe gpt2", "<&- 2>/dev/null", 0, ("gpt2 (gpt2): 124,439,808 parameters", "")),
    ],
)
def test_closed_streams(words: str, redirected: str, code: int, said: tuple[str, str]) -> None:
    ran = shell(words, redirected)
    assert (ran.returncode, ran.stderr) == (code, said[1])
    assert ran.stdout.startswith(said[0])
    assert bool(ran.stdout) == bool(said[0])


def test_what_is_opened_later_does_not_become_a_closed_stream() -> None:
    """A file opened where stdout was would get the answer, and a C library's messages would go into its middle."""
    script = "import os\nfrom asbuilt.cli import streams\ntry: streams.guard()\nexcept streams.Lost: pass\n"
    script += "assert os.open(os.devnull, os.O_RDONLY) > 2"
    subprocess.run(["sh", "-c", f'"{sys.executable}" -c "$0" <&- >&- 2>&-', script], check=True)


def test_a_reader_that_leaves_ends_it_as_sigpipe_would() -> None:
    """As in `asbuilt models | head -1`: not 1, which is the answer no."""
    with subprocess.Popen([*ASBUILT, "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        assert ran.stderr is not None
        ran.stdout.close()
        assert ran.stderr.read() == ""
    assert ran.returncode == 128 + signal.SIGPIPE


def test_a_pipe_that_does_not_block_is_waited_for() -> None:
    """Node and others give such pipes: what does not fit at once is no failure."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with subprocess.Popen(
        [*ASBUILT, "describe", "llama-3-8b", "--json"], stdout=writing, stderr=subprocess.PIPE
    ) as ran:
        os.close(writing)
        time.sleep(1)  # until it is full
        with open(reading, "rb") as pipe:
            written = pipe.read()
    assert ran.returncode == 0
    assert written.endswith(b"}\n")


# Nothing of ours can be done about a signal while Python itself starts, so `main` says when it is there.
STARTED = "import os, sys\nfrom asbuilt.__main__ import main\nos.write(int(sys.argv.pop(1)), b'.')\nmain()"


def as_in_a_terminal() -> None:
    """In a child: signals as an interactive shell leaves them; a background job ignores some, its children too."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def stopped(words: list[str], number: signal.Signals, delay: float, *, times: int = 1) -> tuple[int, str]:
    """Sends the signal `delay` seconds after `main` began; returns the exit code as a shell has it, and stderr."""
    reading, writing = os.pipe()
    command = [sys.executable, "-c", STARTED, str(writing), *words]
    with subprocess.Popen(
        command,
        pass_fds=[writing],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=as_in_a_terminal,
    ) as ran:
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        time.sleep(delay)
        for _ in range(times):
            ran.send_signal(number)
            time.sleep(0.002)
        _, said = ran.communicate()
    return ran.returncode if ran.returncode >= 0 else 128 - ran.returncode, said.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_waits_for_a_prompt(checkpoint: Path, number: signal.Signals) -> None:
    assert stopped(["generate", str(checkpoint)], number, 1.0) == (128 + number, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_imports(number: signal.Signals) -> None:
    """At five moments of importing torch, which takes longer than that."""
    for _ in range(5):
        delay = random.uniform(0.02, 1.0)
        code, said = stopped(["generate", "gpt2", "x"], number, delay)
        assert (code, said) == (128 + number, "") or (code == 2 and "no weights" in said), (delay, code, said)


def test_ctrl_c_at_the_very_beginning() -> None:
    assert stopped(["generate", "gpt2"], signal.SIGINT, 0.0) == (130, "")


def test_a_hand_that_hammers_ctrl_c(checkpoint: Path) -> None:
    assert stopped(["generate", str(checkpoint)], signal.SIGINT, 1.0, times=5) == (130, "")


def test_what_was_begun_is_undone_and_ignored_signals_stay_so(tmp_path: Path) -> None:
    """In this process's child: a folder that is being written is gone, and `nohup` keeps its word."""
    script = """
import os, signal, sys
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from asbuilt.cli import signals
from asbuilt.checkpoint.save import aside
signals.install()
os.kill(os.getpid(), signal.SIGHUP)
try:
    with aside(Path(sys.argv[1]) / "out", 0) as partial:
        (partial / "x").write_text("x")
        os.kill(os.getpid(), signal.SIGTERM)
        import time; time.sleep(5)
except signals.Stopped:
    sys.exit(signals.exit_code(1))
"""
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (128 + signal.SIGTERM, "")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_that_a_finaliser_swallows_is_raised_again() -> None:
    script = """
import os, signal, sys, time
from asbuilt.cli import signals
class Caught:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
signals.install()
try:
    caught = Caught()
    del caught
    time.sleep(5)
except signals.Stopped:
    sys.exit(signals.exit_code(1))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, preexec_fn=as_in_a_terminal)
    assert (ran.returncode, ran.stderr) == (130, "")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("\r 50%|#####     | a.safetensors", "\r 50%|#####     | a.safetensors"),
        ("\x1b[A\x1b[A", "\x1b[A\x1b[A"),
        ("\r 50%| a\x1b]0;t\x07\rb", "\r" + r" 50%| a\x1b]0;t\x07\rb"),
        ("\r\x1b[2J", "\r" + r"\x1b[2J"),
        ("a\rb", r"a\rb"),
        ("\x1b[Ab", r"\x1b[Ab"),
        ("\x1b[2J", r"\x1b[2J"),
    ],
)
def test_a_librarys_progress_bar_is_drawn(written: str, shown: str) -> None:
    """On a terminal, as tqdm draws it; what its text holds is a stranger's, and the terminal is sent nowhere else."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as terminal:
        stream = streams.guarded(terminal, needed=False, escaping=True)
        stream.write(written)
        stream.flush()
        got = os.read(master, 4096).decode()
    os.close(master)
    assert got == shown


def test_no_progress_bar_is_drawn_into_a_pipe(tmp_path: Path) -> None:
    with (tmp_path / "err").open("w") as file:
        streams.guarded(file, needed=False, escaping=True).write("\r 50%")
    assert (tmp_path / "err").read_text() == r"\r 50%"


def test_no_module_of_the_folder_one_stands_in_is_imported(tmp_path: Path) -> None:
    """But for those that Python itself imports before it comes to a module, found by an empty one."""
    names = [name for name in sys.stdlib_module_names if not name.startswith("_")]
    names += [
        "__future__",
        "click",
        "rich",
        "torch",
        "numpy",
        "matplotlib",
        "tokenizers",
        "safetensors",
        "sitecustomize",
    ]
    for name in names:
        (tmp_path / f"{name}.py").write_text(
            f"open('ran', 'a').write('{name} ')\nraise ImportError('{name} of this folder')"
        )
    fatal = []
    for _ in range(40):  # what is imported before any module can be is taken away, one by one
        (tmp_path / "ran").write_text("")
        (tmp_path / "empty.py").write_text("")
        subprocess.run([sys.executable, "-m", "empty"], cwd=tmp_path, capture_output=True)
        early = (tmp_path / "ran").read_text().split()
        if not early:
            break
        fatal += early
        for name in {*early}:
            (tmp_path / f"{name}.py").unlink()
    (tmp_path / "ran").write_text("")
    ran = subprocess.run([*ASBUILT, "describe", "gpt2"], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr, (tmp_path / "ran").read_text()) == (0, "", ""), fatal
    assert len(fatal) < 12
    ran = subprocess.run([*ASBUILT, "generate", "gpt2", "x"], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, (tmp_path / "ran").read_text()) == (2, "")
    assert "no weights" in ran.stderr


# Streams of this process.


class Descriptor(io.RawIOBase):
    """A raw file that does what it is told: takes so many bytes, none for now, or fails."""

    def __init__(self, *answers: int | OSError | None, terminal: bool = False) -> None:
        self.answers, self.terminal, self.got = list(answers), terminal, b""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1

    def isatty(self) -> bool:
        return self.terminal

    def write(self, data: Any, /) -> int | None:  # noqa: ANN401
        answer = self.answers.pop(0) if self.answers else len(data)
        if isinstance(answer, OSError):
            raise answer
        self.got += bytes(data[: answer or 0])
        return answer


def over(raw: Descriptor, *, needed: bool, escaping: bool = False) -> Any:  # noqa: ANN401  a Guarded
    made = io.TextIOWrapper(io.BufferedWriter(raw), encoding="ascii")
    return streams.guarded(made, needed=needed, escaping=escaping)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 1, "stdout cannot be written: No space left on device"),
        (OSError(errno.EPIPE, "Broken pipe"), 141, "stdout cannot be written: Broken pipe"),
        (OSError("odd"), 1, "stdout cannot be written: odd"),
    ],
)
def test_what_fails_is_lost_once_and_silent_afterwards(error: OSError, code: int, said: str) -> None:
    raw = Descriptor(2, error)
    stream = over(raw, needed=True)
    stream.write("abcd")
    with pytest.raises(streams.Lost) as lost:
        stream.flush()
    assert (lost.value.exit_code, str(lost.value), raw.got) == (code, said, b"ab")
    stream.write("efgh")
    stream.flush()
    assert raw.got == b"ab"
    unneeded = Descriptor(2, error)
    stream = over(unneeded, needed=False)
    for text in ("abcd", "efgh"):
        stream.write(text)
        stream.flush()
    assert unneeded.got == b"ab"


def test_what_cannot_be_taken_for_now_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(streams, "select", SimpleNamespace(select=lambda *lists: waited.append(lists)))
    raw = Descriptor(1, None, None, 2)
    stream = over(raw, needed=True)
    stream.write("abcd")
    stream.flush()
    assert (raw.got, waited) == (b"abcd", [([], [1], [])] * 2)


def test_lines_appear_at_once_where_somebody_may_read_them() -> None:
    """On a terminal, and on stderr, whose text is escaped; a pipe gets what has come together."""
    for terminal, escaping, written in ((True, False, b"a\n"), (False, True, b"a\n"), (False, False, b"")):
        raw = Descriptor(terminal=terminal)
        stream = over(raw, needed=True, escaping=escaping)
        assert stream.isatty() is terminal
        assert stream.fileno() == 1
        assert stream.writable()
        assert stream.write("a\n") == 2
        assert raw.got == written
        stream.flush()
        assert raw.got == b"a\n"


def test_text_is_escaped_and_what_is_drawn_is_not() -> None:
    """What the stream's encoding lacks is `?`; what is no terminal's is written as it is."""
    raw = Descriptor(terminal=True)
    stream = over(raw, needed=True, escaping=True)
    stream.write("é\x1b[1m")
    stream.draw("\x1b[1mb")
    streams.draw(stream, "\x1b[0m")
    stream.flush()
    assert raw.got == rb"?\x1b[1m" + b"\x1b[1mb\x1b[0m"
    plain = io.StringIO()
    streams.draw(plain, "\x1b[0m")
    streams.draw(None, "x")
    assert plain.getvalue() == "\x1b[0m"
    as_it_is = Descriptor()
    stream = over(as_it_is, needed=True)
    stream.write("\x1b[1m\r 5%")
    stream.flush()
    assert as_it_is.got == b"\x1b[1m\r 5%"


def test_a_joiner_joins_what_was_written_before() -> None:
    """Between two Devanagari letters it stays, alone it is no letter's."""
    for before, shown in (
        ("\u0915", "\u0915\u200d\u0915"),
        ("a\u0915", "a\u0915\u200d\u0915"),
        ("a", r"a\u200d" + "\u0915"),
    ):
        raw = Descriptor()
        made = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")
        stream = streams.guarded(made, needed=True, escaping=True)
        stream.write(before)
        stream.write("\u200d\u0915")
        stream.flush()
        assert raw.got.decode() == shown


def test_what_is_drawn_is_there_at_once() -> None:
    raw = Descriptor()
    stream = over(raw, needed=True)
    streams.draw(stream, "x")
    assert raw.got == b"x"


def test_a_stream_that_is_no_file_stays() -> None:
    stream: Any = io.StringIO()
    assert streams.guarded(stream, needed=True, escaping=True) is stream

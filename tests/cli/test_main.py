"""How the command line ends: exit codes, what is said last, and that it is said once."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Callable
from typing import Any

import click
import pytest
from click.testing import Result

from asbuilt.cli import main as module
from asbuilt.cli import signals, streams
from asbuilt.cli.main import COMMANDS, cli

Run = Callable[..., Result]


def command(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    """Has `describe gpt2` call this and nothing else."""
    found = cli.get_command(click.Context(cli), "describe")
    assert found is not None
    monkeypatch.setattr(found, "callback", lambda **_: run())


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`main` without the streams and signals of this process; what it has called of ours, in order."""
    called: list[str] = []
    monkeypatch.setattr(streams, "guard", lambda: called.append("guard"))
    monkeypatch.setattr(signals, "done", lambda: called.append("done"))
    monkeypatch.setattr(signals, "_Asked", type("Asked", (signals._Asked,), {}))
    return called


FULL, LEFT = streams.Lost(errno.ENOSPC, "No space left on device"), streams.Lost(errno.EPIPE, "Broken pipe")
SAID = "Error: stdout cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("error", "asked", "code", "said"),
    [
        (SystemExit(0), 0, 0, ""),
        (SystemExit(2), 0, 2, ""),
        (SystemExit(None), 0, 1, ""),
        (SystemExit("text"), 0, 1, ""),
        (SystemExit(0), 15, 143, ""),
        (FULL, 0, 1, SAID),
        (LEFT, 0, 141, ""),
        (LEFT, 15, 143, ""),
        (ValueError("of a library that was interrupted"), 2, 130, ""),
    ],
    ids=str,
)
def test_the_exit_code_of_the_process(
    error: BaseException,
    asked: int,
    code: int,
    said: str,
    process: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    signals._Asked.number = asked
    names: list[str] = []
    monkeypatch.setattr(cli, "main", lambda prog_name: names.append(prog_name) or raising(error)())
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert (ended.value.code, capsys.readouterr().err, process, names) == (code, said, ["guard", "done"], ["asbuilt"])


def test_a_fault_of_ours_is_a_traceback(process: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "main", raising(ValueError("ours")))
    with pytest.raises(ValueError, match="ours"):
        module.main()
    assert process == ["guard"]


def test_streams_that_cannot_be_guarded_are_said(
    process: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(streams, "guard", raising(streams.Lost(errno.EBADF, "it is closed")))
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert (ended.value.code, capsys.readouterr().err) == (1, "Error: stdout cannot be written: it is closed\n")
    assert process == ["done"]


@pytest.mark.parametrize("error", [click.Abort(), KeyboardInterrupt(), signals.Stopped()], ids=repr)
@pytest.mark.parametrize(("asked", "code"), [(0, 130), (15, 143)])
def test_who_stops_a_command_hears_nothing(
    error: BaseException, asked: int, code: int, process: list[str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs, and while the words are read."""
    signals._Asked.number = asked
    command(monkeypatch, raising(error))
    result = run("describe", "gpt2")
    assert (result.exit_code, result.output) == (code, "")
    monkeypatch.setattr(click.Group, "main", raising(error))
    result = run("describe", "gpt2")
    assert (result.exit_code, result.output) == (code, "")
    assert process == []


def test_what_a_command_returns_is_no_exit_code_unless_it_is_a_number(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for returned, code in ((None, 0), ("text", 0), (3, 3)):
        command(monkeypatch, lambda returned=returned: returned)
        assert run("describe", "gpt2").exit_code == code


def test_what_is_written_is_flushed_before_the_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full may say so only then."""

    class Full(io.StringIO):
        def flush(self) -> None:
            raise FULL

    command(monkeypatch, lambda: sys.stdout.write("x"))
    said = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", said)
    with pytest.raises(SystemExit) as ended:
        cli.main(["describe", "gpt2"], prog_name="asbuilt")
    assert (ended.value.code, said.getvalue()) == (1, SAID)


def test_matplotlib_is_of_another_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, extra in (("matplotlib.pyplot", "plots"), ("torch.nn", "torch"), ("psutil", "torch")):
        command(monkeypatch, raising(ModuleNotFoundError(name=name)))
        refused = run("describe", "gpt2")
        missing = name.partition(".")[0]
        said = f"this command needs {missing}, which is not installed: pip install 'asbuilt[{extra}]'"
        assert (refused.exit_code, refused.stderr) == (2, f"Error: {said}\n")
    for unknown in (ModuleNotFoundError(), ModuleNotFoundError(name="nothing.torch")):
        command(monkeypatch, raising(unknown))
        assert run("describe", "gpt2").exception is unknown


@pytest.mark.parametrize(("free", "have"), [(6 * 10**9, ", 6.00 GB (5.59 GiB) are free"), (None, "")])
def test_memory_that_was_asked_for_and_that_there_is(
    free: int | None, have: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asbuilt.memory.free", lambda: free)
    advice = "use a smaller model, a shorter text or a narrower --dtype"
    for error, needed in (
        (MemoryError(), ""),
        (RuntimeError("you tried to allocate 64 bytes."), ": 64 bytes more was needed"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB."), ": 2.50 GiB more was needed"),
    ):
        command(monkeypatch, raising(error))
        refused = run("describe", "gpt2")
        assert (refused.exit_code, refused.stderr) == (
            2,
            f"Error: not enough memory{needed}{have}; {advice}\n",
        )


def test_help_is_shown_whole_and_by_both_names(run: Run) -> None:
    whole = run("--help")
    assert whole.exit_code == 0
    assert run("-h").stdout == whole.stdout
    nothing = run()
    assert (nothing.exit_code, nothing.stdout) == (2, "")
    assert [line.split()[0] for line in nothing.stderr.split("Commands:\n")[1].splitlines()] == list(COMMANDS)


@pytest.mark.parametrize(("columns", "widest"), [(300, 118), (80, 78)])
def test_help_is_no_wider_than_can_be_read(
    columns: int, widest: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """120 columns, of which click leaves two; as wide as the terminal where that is narrower."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        cli.main(["plan", "serve", "--help"], prog_name="asbuilt")
    assert max(map(len, capsys.readouterr().out.splitlines())) in range(widest - 3, widest + 1)

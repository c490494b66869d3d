"""The child that tries strangers' files: what it may take, what it dies of, and that the next one is a new one."""

from __future__ import annotations

import io
import json
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from folders import tokenizer_json, write

from asbuilt.text import chat, worker
from asbuilt.text.tokenizer_worker import Distant
from asbuilt.text.worker import Request, Worker, WorkerError

MIB = 1 << 20


def rendering(template: str = "a", *, seconds: float = 0.8, memory: int = 64 * MIB, **context: object) -> Request:
    said = {"template": template, "context": context, "max_chars": 2000}
    return Request(said=said, seconds=seconds, memory=memory)


@pytest.fixture
def child() -> Any:  # noqa: ANN401
    """A worker whose child is there."""
    found = Worker("template_worker", "the template")
    assert found.pid is None
    assert found.close() == 0
    assert found.ask(rendering()) == "a"
    yield found
    found.close()
    assert found.pid is None


def limits(pid: int | None) -> dict[str, list[str]]:
    """What the system holds the process to: soft and hard, by the name that /proc gives them."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()[1:]
    return {line[:26].strip(): line[26:].split()[:2] for line in lines}


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGPROF, "the template took more than 0.8 s of CPU time"),
        (signal.SIGXCPU, "the template took more than 0.8 s of CPU time"),
        (signal.SIGALRM, "the template was not ready after 48 s"),
        *(
            (number, "the template asked for more than 64 MiB of memory")
            for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGKILL)
        ),
        (signal.SIGTERM, "the process that runs the template ended with code -15"),
    ],
)
def test_what_a_child_died_of(child: Worker, number: signal.Signals, said: str) -> None:
    assert child.pid is not None
    os.kill(child.pid, number)
    with pytest.raises(WorkerError) as caught:
        child.ask(rendering())
    assert (str(caught.value), child.pid) == (said, None)
    assert child.ask(rendering("{{ x }}", x="é")) == "é"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_a_child_that_waits_is_not_waited_for() -> None:
    """It takes no CPU time, and would never answer."""
    script = "import threading; from asbuilt.text.worker import serve; serve(lambda request: threading.Event().wait())"
    line = json.dumps({"seconds": 5, "memory": 48 * MIB, "wait": 0.1, "keeps": False}) + "\n"
    done = subprocess.run([sys.executable, "-c", script], input=line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGALRM, "")


def test_a_child_may_wait_60_times_its_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = io.StringIO()
    child = Worker("template_worker", "the template")
    monkeypatch.setattr(child, "_cause_of_death", lambda _: "it died")
    process = SimpleNamespace(stdin=sent, stdout=io.StringIO())
    with pytest.raises(WorkerError, match="it died"):
        child._exchange(cast(Any, process), rendering(seconds=2))
    assert json.loads(sent.getvalue())["wait"] == 120


def test_ctrl_c_is_not_the_child_s(child: Worker) -> None:
    before = child.pid
    assert before is not None
    os.kill(before, signal.SIGINT)
    assert (child.ask(rendering()), child.pid) == ("a", before)


def test_an_interrupted_question_ends_the_child(child: Worker) -> None:
    """Else its answer would be taken for the next one's."""
    process = child._process
    assert process is not None
    assert process.stdout is not None

    class Interrupted(io.StringIO):
        def readline(self, size: int = -1, /) -> str:
            raise KeyboardInterrupt

    process.stdout.close()
    process.stdout = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        child.ask(rendering())
    assert (process.returncode, child.pid, process.stdout.closed) == (-signal.SIGKILL, None, True)
    assert child.ask(rendering("b")) == "b"


def test_a_file_that_cannot_be_read_leaves_no_child(tmp_path: Path) -> None:
    path = write(tmp_path, "{") / "tokenizer.json"
    distant = Distant(path, 1)
    for _ in range(2):
        with pytest.raises(WorkerError, match="EOF"):
            distant.facts()
        assert distant._worker.pid is None


def test_messages_have_a_length(child: Worker) -> None:
    with pytest.raises(WorkerError) as caught:
        child.ask(rendering("{{ raise_exception('x' * 1000) }}"))
    assert len(str(caught.value)) == 400


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="no /proc here")
def test_a_child_is_limited_while_it_works_only(child: Worker) -> None:
    found = limits(child.pid)
    assert found["Max core file size"] == ["0", "0"]
    assert found["Max data size"] == limits(os.getpid())["Max data size"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_memory_that_is_held_is_counted_as_the_system_does() -> None:
    """Four GiB of addresses, to the MiB or two that anything else may take."""
    before = worker._held() or 0
    with mmap.mmap(-1, 4 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        assert abs((worker._held() or 0) - before - (4 << 30)) < 2 * MIB


def test_a_limit_that_is_there_already_is_kept() -> None:
    """In a process that may hold at most 1 GiB, and has said 512 MiB."""
    script = """
import resource
from asbuilt.text.worker import _held, _limit
kind, hard = resource.RLIMIT_DATA, 1 << 30
resource.setrlimit(kind, (1 << 29, hard))
_limit(0, 1 << 40, _held())
assert resource.getrlimit(kind) == (hard, hard)
_limit(0, 1 << 20, _held())
assert resource.getrlimit(kind)[0] - _held() in range(1, (1 << 20) + 1)
_limit(0, 0, _held())
assert resource.getrlimit(kind)[0] <= _held()
_limit(0, 0)
assert resource.getrlimit(kind) == (hard, hard)
_limit(0, -1)
assert resource.getrlimit(kind) == (hard, hard)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_what_is_left_behind_counts_among_the_next_ones_memory() -> None:
    """Each time 30 MiB are kept, of 48 that may be taken: the second time too much, but where it was to be kept."""
    script = """
from asbuilt.text.worker import serve
kept = []
serve(lambda request: kept.append(bytearray(30 << 20)))
"""
    for keeps, wanted in ((False, ["answer", "error", "error"]), (True, ["answer"] * 3)):
        line = json.dumps({"seconds": 5, "memory": 48 * MIB, "wait": 60, "keeps": keeps}) + "\n"
        done = subprocess.run(
            [sys.executable, "-c", script], input=3 * line, capture_output=True, text=True, check=True
        )
        assert [next(iter(json.loads(said))) for said in done.stdout.splitlines()] == wanted


def taken(request: Request) -> tuple[float, int]:
    return round(request.seconds, 9), request.memory


def test_what_a_template_may_take_grows_with_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.8 s and 64 MiB, and for each byte of template and messages a microsecond and 48 bytes."""
    asked: list[Request] = []
    monkeypatch.setattr(Worker, "ask", lambda _, request: asked.append(request))
    chat.render("x" * 1000, [], named={"bos_token": "s"})
    given = 1000 + len('{"messages": [], "tools": null, "documents": null, "add_generation_prompt": true}')
    assert taken(asked[0]) == (0.8 + given * 1e-6, 64 * MIB + 48 * given)


def test_what_a_tokenizer_may_take_grows_with_the_file_and_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a file 0.8 s and 48 MiB, 0.4 microseconds and 48 bytes for each of its own; for a text 10 and 1200."""
    asked: list[Request] = []
    monkeypatch.setattr(Worker, "ask", lambda _, request: asked.append(request) or ([], []))
    distant = Distant(tmp_path / "tokenizer.json", 10_000_000)
    of_file = (4.8, 48 * MIB + 480_000_000)
    begin = distant._worker._begin
    assert begin is not None
    assert taken(begin) == of_file
    for method in (distant.facts, distant.n_vocab, distant.saved):
        method()
    distant.encode("é" * 1000, False, False)
    distant.decode([0] * 100, False)
    distant.id("abc")
    distant.token(5)
    of_texts = [2000, 1600, 3, 0]  # bytes of UTF-8, 16 of an id, letters of a token, nothing
    expected = [(round(0.8 + n * 1e-5, 9), 48 * MIB + 1200 * n) for n in of_texts]
    assert [taken(request) for request in asked] == [of_file] * 3 + expected


def test_a_child_answers_as_the_library_here(tmp_path: Path) -> None:
    path = write(tmp_path, tokenizer_json()) / "tokenizer.json"
    distant = Distant(path, path.stat().st_size)
    assert distant.n_vocab() == 9  # eight letters and a space
    assert distant.encode("ab", False, False) == ([0, 1], [])
    assert (distant.id("c"), distant.id("q"), distant.token(2), distant.token(9)) == (2, None, "c", None)
    assert distant.facts() == {"added": [], "decoder": None, "unknown": None}
    assert distant.decode([7, -1, 1 << 32], False) == "h"

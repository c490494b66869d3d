"""Strangers' programs and tables, chat templates and tokenizers, at work in a process of their own, within limits.

What such a file asks for is known only when it has been tried: a join that wants all memory, a pattern that tries every
split of a text, a table that trips an assertion of the library. So a child process tries it, and the system ends the
child where it uses too much: a line of JSON in, a line of JSON out, until its input closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START = "import sys; sys.path.insert(0, sys.argv[1]); from asbuilt.text import {0}; del sys.path[0]; {0}.main()"
MOST_SAID = 400
# Seconds by the clock that a child may take for each of processor time: others may have the processor, or it hangs.
WAIT = 60
ENDED_BY_TIME = tuple(getattr(signal, name, None) for name in ("SIGPROF", "SIGXCPU"))
ENDED_BY_MEMORY = tuple(getattr(signal, name, None) for name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGKILL"))


class WorkerError(Exception):
    """A request that failed: what the child said of it, or what it died of."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked, and the processor time and bytes that it may take.

    The bytes are beyond those of the child at its start, or after the last request that `keeps` what it makes: what
    others leave behind, a library's cache say, counts among the next one's.
    """

    said: dict[str, Any]
    seconds: float
    memory: int
    keeps: bool = False


class Worker:
    """The child process: started when first needed, asked by one thread at a time, replaced when it dies.

    `what` names the stranger's file in messages. `begin` is asked of each new child before anything else.
    """

    def __init__(self, module: str, what: str, begin: Request | None = None) -> None:
        self._module, self._what, self._begin = module, what, begin
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, lambda: None)

    def ask(self, request: Request) -> Any:  # noqa: ANN401  what JSON can hold
        """Returns the answer; raises WorkerError where there is none."""
        with self._lock:
            process = self._process or self._start()
            return self._exchange(process, request)

    def _exchange(self, process: subprocess.Popen[str], request: Request) -> Any:  # noqa: ANN401
        limits = {"seconds": request.seconds, "memory": request.memory, "wait": WAIT * request.seconds}
        line = json.dumps(request.said | limits | {"keeps": request.keeps})
        answer = ""
        try:
            assert process.stdin
            assert process.stdout
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            pass
        except BaseException:  # Ctrl-C while it works: its answer must not be taken for the next one's
            process.kill()
            self.close()
            raise
        said = json.loads(answer) if answer else {"error": self._cause_of_death(request)}
        if "error" in said:
            raise WorkerError(said["error"])
        return said["answer"]

    def _start(self) -> subprocess.Popen[str]:
        # -P keeps the folder we stand in off the import path. A panic in Rust that may print its backtrace reads the
        # library's symbols for it, and where no memory is left for them it waits for itself without end.
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-c", START.format(self._module), str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env=os.environ | {"RUST_BACKTRACE": "0"},
        )
        self._close.detach()
        self._close = weakref.finalize(self, _end, process)
        if self._begin is not None:
            try:
                self._exchange(process, self._begin)
            except WorkerError:
                self.close()
                raise
        return process

    def _cause_of_death(self, request: Request) -> str:
        code = self.close()
        if -code in ENDED_BY_TIME:
            return f"{self._what} took more than {request.seconds:.1f} s of processor time"
        if -code == getattr(signal, "SIGALRM", None):
            return f"{self._what} was not ready after {WAIT * request.seconds:.0f} s"
        if -code in ENDED_BY_MEMORY:
            return f"{self._what} asked for more than {request.memory >> 20} MiB of memory"
        return f"the process that tries {self._what} ended with code {code}"

    @property
    def pid(self) -> int | None:
        """The child's number, None while there is none."""
        return None if self._process is None else self._process.pid

    def close(self) -> int:
        """Ends the child, if there is one, and returns its exit code."""
        process, self._process = self._process, None
        return 0 if process is None else _end(process)


def _end(process: subprocess.Popen[str]) -> int:
    assert process.stdin
    assert process.stdout
    with contextlib.suppress(OSError):
        process.stdin.close()
    code = process.wait()
    process.stdout.close()
    return code


# The child's side.


def serve(answer: Callable[[dict[str, Any]], Any]) -> None:
    """Answers requests until the input closes; a signal or a failed allocation ends the process, and the asker sees it.

    Whatever an answer raises is its error, a panic of a library in Rust too, which is no Exception.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the asker's, who ends this process by closing its input
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    held = _held()
    for line in sys.stdin:
        request = json.loads(line)
        _limit(request["seconds"], request["memory"], held, request["wait"])
        try:
            said = {"answer": answer(request)}
        except MemoryError:
            said = {"error": f"it asked for more than {request['memory'] >> 20} MiB of memory"}
        except BaseException as error:
            # a stranger's message may be a megabyte
            said = {"error": (str(error).strip() or type(error).__name__)[:MOST_SAID]}
        _limit(0, -1)
        held = _held() if request["keeps"] else held
        print(json.dumps(said), flush=True)


def _limit(seconds: float, memory: int, held: int | None = None, wait: float = 0) -> None:
    """Limits processor time, memory beyond `held`, and time by the clock, from here on.

    No limits are memory -1, memory where it is not known what is held, and 0 seconds.

    Where the system knows no such limit (Windows; macOS has none of memory), what the libraries bound is all there is.
    """
    with contextlib.suppress(AttributeError, ValueError, OSError):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, wait)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        soft = hard if memory < 0 or held is None else held + memory
        resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _held() -> int | None:
    """Returns the bytes of data that this process holds, as the limit counts them; None where it is not known."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return 1024 * int(status.partition("VmData:")[2].split()[0])

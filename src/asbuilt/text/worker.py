"""Runs untrusted chat templates and tokenizers in a separate process, within limits.

The cost of such a file is known only by trying: a join may need all memory, a pattern may backtrack exponentially, a
table may trip an assertion in the library. So a child process tries it, and the system kills the child if it exceeds
its limits. The protocol is one line of JSON in and one line of JSON out, until the input closes.
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
# Wall-clock seconds that a child may take per second of CPU time: the CPU may be busy, or the child may hang.
WAIT = 60
ENDED_BY_TIME = tuple(getattr(signal, name, None) for name in ("SIGPROF", "SIGXCPU"))
ENDED_BY_MEMORY = tuple(getattr(signal, name, None) for name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGKILL"))


class WorkerError(Exception):
    """A request that failed: the child's error message, or its cause of death."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request, and the CPU time and memory that it may take.

    The memory is counted beyond that of the child at its start, or after the last request that `keeps` its result; what
    other requests leave behind, such as a library's cache, counts towards the next one.
    """

    said: dict[str, Any]
    seconds: float
    memory: int
    keeps: bool = False


class Worker:
    """The child process: started on first use, used by one thread at a time, replaced when it dies.

    `what` names the untrusted file in messages. `begin` is the first request to each new child.
    """

    def __init__(self, module: str, what: str, begin: Request | None = None) -> None:
        self._module, self._what, self._begin = module, what, begin
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, lambda: None)

    def ask(self, request: Request) -> Any:  # noqa: ANN401  any JSON value
        """Returns the answer; raises WorkerError if there is none."""
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
        except BaseException:  # Ctrl-C during a request: its answer must not be mistaken for the next one's
            process.kill()
            self.close()
            raise
        said = json.loads(answer) if answer else {"error": self._cause_of_death(request)}
        if "error" in said:
            raise WorkerError(said["error"])
        return said["answer"]

    def _start(self) -> subprocess.Popen[str]:
        # -P keeps the current directory off the import path. A Rust panic that prints a backtrace loads the library's
        # symbols, and deadlocks if there is no memory left for them.
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
            return f"{self._what} took more than {request.seconds:.1f} s of CPU time"
        if -code == getattr(signal, "SIGALRM", None):
            return f"{self._what} was not ready after {WAIT * request.seconds:.0f} s"
        if -code in ENDED_BY_MEMORY:
            return f"{self._what} asked for more than {request.memory >> 20} MiB of memory"
        return f"the process that runs {self._what} ended with code {code}"

    @property
    def pid(self) -> int | None:
        """The child's process id, None if there is no child."""
        return None if self._process is None else self._process.pid

    def close(self) -> int:
        """Ends the child, if any, and returns its exit code."""
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
    """Answers requests until the input closes; a signal or a failed allocation ends the process, as the parent notices.

    Whatever `answer` raises is returned as an error, including a Rust panic, which is not an Exception.
    """
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the parent, which ends this process by closing its input
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
            # an untrusted message may be megabytes long
            said = {"error": (str(error).strip() or type(error).__name__)[:MOST_SAID]}
        _limit(0, -1)
        held = _held() if request["keeps"] else held
        print(json.dumps(said), flush=True)


def _limit(seconds: float, memory: int, held: int | None = None, wait: float = 0) -> None:
    """Limits CPU time, memory beyond `held`, and wall-clock time, from now on.

    Memory -1, unknown `held` memory and 0 seconds mean no limit. Where the system has no such limits (Windows; macOS
    has none of memory), only the libraries' own bounds apply.
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
    """Returns the bytes of data of this process, as the limit counts them; None if unknown."""

    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return 1024 * int(status.partition("VmData:")[2].split()[0])

"""Groups of processes in tests: one that hangs or fails is never taken for one that ended well."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import many_runs
import pytest
from many_runs import Jobs, ended, started

CHILD = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
pathlib.Path(sys.argv[1], rank).touch()
if rank in sys.argv[2:]:
    sys.exit("lost")
time.sleep(600)
"""


@pytest.mark.parametrize("lost", [(), (0,), (1,)], ids=str)
def test_those_that_hang_are_killed_and_say_where_they_were(tmp_path: Path, lost: tuple[int, ...]) -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", CHILD, str(tmp_path), *map(str, lost)]
    processes = started(command, 3)
    while len(list(tmp_path.iterdir())) < len(processes):
        time.sleep(0.05)
    for rank in lost:
        processes[rank].wait()
    for rank, (code, said) in enumerate(ended(processes, limit=1)):
        assert code == (1 if rank in lost else -signal.SIGABRT)
        assert ("lost" if rank in lost else "most recent call first") in said


def test_jobs_name_the_ranks_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_runs, "ended", lambda _: [(0, ""), (-signal.SIGABRT, "hung"), (1, "lost")])
    monkeypatch.setattr(many_runs, "started", lambda *_: [])
    with pytest.raises(AssertionError, match=r"rank 1 ended with -6:\nhung\nrank 2 ended with 1:\nlost"):
        Jobs(tmp_path).run(3)

"""A run in a process of its own that is killed without warning, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

from asbuilt.train import recipe as recipes
from asbuilt.train.recipe import Recipe
from asbuilt.train.state import checkpoints

# Trains, says when a checkpoint's file is being written, and waits there for a moment.
CHILD = """
import sys, time
from pathlib import Path
from asbuilt.train import loop, recipe, state

sync, told = state.sync, Path(sys.argv[2])

def slow(path):
    if path.parent.name.endswith(".partial"):
        told.write_text(path.name)
        time.sleep(0.01)
    sync(path)

state.sync = slow
given = recipe.read(sys.argv[1])
loop.run(given, resume=sys.argv[3] == "resume")
"""


def started(made: Recipe, told: Path, *, resume: bool) -> subprocess.Popen[bytes]:
    file = told.with_name("recipe.toml")
    file.write_text(recipes.dumps(made), encoding="utf-8")
    words = [sys.executable, "-c", CHILD, str(file), str(told), "resume" if resume else "new"]
    return subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)


def killed(made: Recipe, told: Path, delay: float, *, writing: str, resume: bool) -> bool:
    """Kills the run `delay` seconds after its first checkpoint of this life, or while it writes a file of one.

    Returns whether it was killed before its end.
    """
    told.unlink(missing_ok=True)
    one = started(made, told, resume=resume)
    try:
        until = time.monotonic() + 120
        while one.poll() is None and time.monotonic() < until and not _said(told, writing):
            time.sleep(0.001)
        time.sleep(delay)
        if one.poll() is None:
            os.kill(one.pid, signal.SIGKILL)
        said = one.communicate(timeout=60)[1].decode()
        assert one.returncode in (0, -signal.SIGKILL), said
        return one.returncode != 0
    finally:
        one.kill()


def _said(told: Path, writing: str) -> bool:
    return told.exists() and (not writing or told.read_text() == writing)


def require_valid(run: Path) -> int:
    """Requires that every checkpoint under its own name is whole; returns the step of the last, 0 without one."""
    last = 0
    for path in checkpoints(run / "checkpoints"):
        assert load_file(path / "weights.safetensors")
        assert load_file(path / "optimizer.safetensors")
        last = json.loads((path / "state.json").read_text())["position"]["step"]
        assert path.name == f"step-{last:08d}"
    return last

"""Killed and out of room: the last checkpoint is valid, and resuming ends as if the run had never stopped."""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from crashes import killed, require_valid
from small_runs import log, recipe, require_equal, state

from asbuilt import InputError
from asbuilt.train import loop

STEPS = 12
LONG = (f"run.steps={STEPS}", "run.save_every=1", "run.validate_every=0", "run.keep=2")


def test_kills_lose_no_more_than_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    """At a random moment, and while each of a random checkpoint's files is written."""
    made = recipe(tmp_path, "run", *LONG)
    told, resume = tmp_path / "told", False
    for writing in ("", random.choice(("weights.safetensors", "optimizer.safetensors", "state.json"))):
        killed(made, told, random.random() / 4 if not writing else 0.0, writing=writing, resume=resume)
        kept, resume = require_valid(tmp_path / "run"), True
        lines = [line for line in log(tmp_path / "run") if "loss" in line]
        assert kept >= lines[-1]["step"] - 1  # a checkpoint after each step
    outcome = loop.run(made, resume=True)
    assert outcome.steps == STEPS
    loop.run(recipe(tmp_path, "whole", *LONG))
    require_equal(state(tmp_path / "whole", STEPS), state(tmp_path / "run", STEPS))
    assert log(tmp_path / "whole") == log(tmp_path / "run")
    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert left == {f"step-{step:08d}" for step in (STEPS - 1, STEPS)}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64m", "asbuilt", str(folder)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("this process may not mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def filled(file: Path) -> None:
    """Writes until there is no room."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as held:
        while held.write(bytes(1 << 16)):
            pass


def test_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    made = recipe(tmp_path, "disk/run")
    filler = small_disk / "filler"

    def fill(at: loop.Progress) -> None:
        if at.step == 5 and at.validation is None:
            filled(filler)

    said = r"training stopped after step \d: .*; put that right and --resume; .*step-00000003"
    with pytest.raises(InputError, match=said):
        loop.run(made, report=fill)
    assert require_valid(small_disk / "run") == 3
    filler.unlink()
    loop.run(made, resume=True)
    loop.run(recipe(tmp_path, "whole"))
    require_equal(state(tmp_path / "whole", 9), state(small_disk / "run", 9))
    assert log(tmp_path / "whole") == log(small_disk / "run")


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """What a quota does: a write fails half way, in a checkpoint or in the log."""
    made = recipe(tmp_path, "run")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(at: loop.Progress) -> None:
        if at.step == 5 and at.validation is None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (random.choice((1 << 10, 1 << 13)), hard))

    try:
        with pytest.raises(InputError, match=r"training stopped after step \d: .*arge"):
            loop.run(made, report=limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert require_valid(tmp_path / "run") == 3
    loop.run(made, resume=True)
    loop.run(recipe(tmp_path, "whole"))
    require_equal(state(tmp_path / "whole", 9), state(tmp_path / "run", 9))

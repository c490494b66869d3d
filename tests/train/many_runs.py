"""Starting runs by several processes, on gloo and the loopback interface."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import many_worker
import pytest
from small_runs import log
from torch import Tensor

from asbuilt.catalog import machines
from asbuilt.measure.report import MEMORY
from asbuilt.plan.train.stages import StageMemory
from asbuilt.spec import Model
from asbuilt.train import loop
from asbuilt.train import recipe as recipes
from asbuilt.train.many.state import whole
from asbuilt.train.planned import planned
from asbuilt.train.recipe import Recipe
from asbuilt.train.text import text_data

MACHINE = machines.resolve("h100-sxm")
LIMIT = 240  # seconds that processes may take


def drawn(
    models: Mapping[str, tuple[str, ...]], settings: tuple[str, ...], accumulate: tuple[int, int]
) -> dict[str, tuple[str, ...]]:
    """Recipes of up to three models, each with one kind of activation checkpointing, in any order."""
    ways = random.sample(("none", "selective", "full"), len(models))
    return {
        name: (
            *settings,
            *model,
            f"step.checkpointing={way}",
            f"step.accumulate={random.choice(accumulate)}",
            f"step.loss_rows={random.choice((0, 16))}",
        )
        for (name, model), way in zip(models.items(), ways, strict=True)
    }


def free_port() -> int:
    """A port that the system gives to nobody by itself: a group opens many, and one that starts would lose its own."""
    while True:
        with socket.socket() as held:
            try:
                held.bind(("127.0.0.1", port := random.SystemRandom().randrange(10_000, 32_000)))
            except OSError:
                continue
            return port


def environment(**more: object) -> dict[str, str]:
    """Of a process that finds the others on this machine."""
    at = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return os.environ | at | {name: str(value) for name, value in more.items()}


def started(command: list[str], ranks: int) -> list[subprocess.Popen[str]]:
    """Processes of a group, as a launcher other than torchrun starts them."""
    port = free_port()
    return [
        subprocess.Popen(
            command,
            env=environment(WORLD_SIZE=ranks, RANK=rank, LOCAL_RANK=rank, MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def ended(processes: Iterable[subprocess.Popen[str]], limit: float = LIMIT) -> list[tuple[int, str]]:
    """The exit codes and stderr of processes.

    After the limit, or a quarter of it after one has failed, those that still run say where they are and are killed.
    """
    processes = list(processes)
    with ThreadPoolExecutor(len(processes)) as pool:
        said = [pool.submit(one.communicate) for one in processes]
        until = time.monotonic() + limit
        try:
            while time.monotonic() < until and not all(one.done() for one in said):
                if any(one.poll() for one in processes):
                    until = min(until, time.monotonic() + limit / 4)
                time.sleep(0.05)
        finally:
            for one in processes:
                if one.poll() is None:
                    one.send_signal(signal.SIGABRT)
    # there are codes only now that the pool has waited
    return [(one.returncode, text.result()[1]) for one, text in zip(processes, said, strict=True)]


class Jobs:
    """Runs that one group of processes makes one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, list[dict[str, Any]]()

    def add(self, recipe: Recipe, **more: object) -> None:
        file = self.folder / f"{len(self.made)}.toml"
        file.write_text(recipes.dumps(recipe), encoding="utf-8")
        self.made.append({"recipe": str(file), **more})

    def run(self, ranks: int) -> None:
        file = self.folder / f"jobs-{ranks}.json"
        file.write_text(json.dumps(self.made))
        command = [sys.executable, "-X", "faulthandler", many_worker.__file__, str(file)]
        found = ended(started(command, ranks))
        failed = [f"rank {rank} ended with {code}:\n{said[-3000:]}" for rank, (code, said) in enumerate(found) if code]
        assert not failed, "\n".join(failed)


def require_close(one: Path, other: Path) -> None:
    """Requires losses, gradient norms and validations of two runs equal within 1e-5."""
    mine, theirs = log(one), log(other)
    assert len(mine) == len(theirs) > 9
    for a, b in zip(mine, theirs, strict=True):
        assert a == pytest.approx(b, abs=1e-5), (a, b)


def checkpoint(folder: Path, step: int) -> dict[str, Tensor]:
    return whole(folder / "checkpoints" / f"step-{step:08d}")


def sent(file: Path) -> dict[str, int]:
    """Bytes by collective, over all groups."""
    found: dict[str, int] = {}
    for name, _, size in json.loads(file.read_text()):
        found[name] = found.get(name, 0) + size
    return found


def spec_of(given: Recipe) -> Model:
    return loop.described(given, text_data(given.data, 1)[1].n_vocab).spec


def billed(given: Recipe, ranks: int) -> dict[str, int]:
    """Bytes that a rank sends in a step by kind of parallelism, as the plan says."""
    made = recipes.loads(recipes.dumps(given), changes=[f"parallel.ranks={ranks}"])
    traffic = planned(made, spec_of(given), MACHINE).trial.step.communication
    return {name: one.bytes for name, one in traffic.items() if one.bytes}


def stage_of(given: Recipe, ranks: int) -> StageMemory:
    """What the plan says that each of so many ranks holds."""
    made = recipes.loads(recipes.dumps(given), changes=[f"parallel.ranks={ranks}"])
    return planned(made, spec_of(made), MACHINE).trial.fullest


def memories(file: Path, ranks: int) -> list[dict[str, int]]:
    """What each rank held in a job with this file for its `memory`."""
    return [json.loads(file.with_suffix(f".{rank}.json").read_text()) for rank in range(ranks)]


def far(stage: StageMemory, measured: dict[str, int]) -> list[str]:
    """The figures of which the plan is further off than it claims: 3%."""
    predicted = {"state": stage.state.total, "saved": stage.activations + stage.outside, "peak": stage.total}
    errors = {name: value / measured[name] - 1 for name, value in predicted.items()}
    return [name for name, error in errors.items() if abs(error) > MEMORY]

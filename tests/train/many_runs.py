"""Starting runs by several processes, on gloo and the loopback interface."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import many_worker

from asbuilt.train import recipe as recipes
from asbuilt.train.recipe import Recipe

LIMIT = 240  # seconds, after which processes are killed


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


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


def ended(processes: Iterable[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """The exit codes and stderr of processes; all are killed after the limit."""
    processes, until = list(processes), time.monotonic() + LIMIT
    try:
        said = [one.communicate(timeout=max(1.0, until - time.monotonic()))[1] for one in processes]
        return [(one.returncode, text) for one, text in zip(processes, said, strict=True)]
    finally:
        for one in processes:
            one.kill()


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
        for code, said in ended(started([sys.executable, many_worker.__file__, str(file)], ranks)):
            assert code == 0, said[-3000:]

"""CPU seconds of the torch-free commands from the shell, including Python's start, best of five.

Run as `python benchmarks/start.py`. The budgets are 0.2 s for help, 0.3 s to describe and 0.4 s to plan; 2 s
for all published configs.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMANDS = (
    ("--help",),
    ("chat", "--help"),
    ("plan", "serve", "--help"),
    ("plan", "train", "--help"),
    ("describe", "llama-3-8b"),
    ("plan", "serve", "llama-3-8b", "--gpu", "h100-sxm"),
    ("plan", "train", "llama-3-8b", "--gpu", "h100-sxm", "--gpus", "64", "--zero", "3"),
)
MODELS = Path(__file__).parents[2] / "shared" / "models"


def seconds(words: tuple[str, ...], cache: str) -> float:
    """Returns CPU seconds; bytecode is written to its own folder, in case Python is set not to write any."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPYCACHEPREFIX": cache}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "asbuilt", *words], env=env, check=False, capture_output=True)
    assert done.stdout, done.stderr.decode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def all_configs() -> tuple[int, float]:
    """Describes every published config whose family is known, in one process."""
    from asbuilt.checkpoint.source import open_model
    from asbuilt.description.bill import describe
    from asbuilt.errors import InputError

    began, count = time.process_time(), 0
    for path in sorted(MODELS.glob("*.json")):
        try:
            source = open_model(path)
        except InputError:
            continue
        describe(source, seq=1024, batch=1, dtype="bf16", kv_dtype="bf16")
        count += 1
    return count, time.process_time() - began


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        for words in COMMANDS:
            print(f"{min(seconds(words, cache) for _ in range(6)):.3f} s  asbuilt {' '.join(words)}")
    count, spent = all_configs()
    print(f"{spent:.2f} s  {count} published configs described in one process")


if __name__ == "__main__":
    main()

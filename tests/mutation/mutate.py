"""The mutation score: of so many deliberate errors in a folder of src/asbuilt, how many do its tests notice?

    python tests/mutation/mutate.py measure plan --sample 60 --seed 7
    python tests/mutation/mutate.py --errors list.json        [{"file", "old", "new", "what"}, ...]

A first run of the folder's tests records which lines each of them runs through, and how long it takes. Each error then
goes into a copy of the tree, and the tests that run through its line are run there, the quickest first, until one
fails. A line that no test runs through counts as unnoticed. `equivalent.json` lists lines in which an error changes
nothing that a user could see, with the reason; they are left out. Exit code 1 below `--least` percent.

The tests run in forked children of a process that has imported the libraries, so that a run costs what its tests cost.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import coverage
import pytest
from sites import Error, errors

ROOT = Path(__file__).parents[2]
PACKAGE = "src/asbuilt"
# Tests of a folder beside those of the same name: commands are tested as commands.
BESIDE = {
    "measure": ["tests/cli/test_measure_cli.py"],
    "plan": ["tests/cli/test_plan_serve.py", "tests/cli/test_plan_train_cli.py", "tests/cli/test_packed.py"],
    "catalog": ["tests/cli/test_machines_cli.py", "tests/cli/test_models.py"],
    "generate": ["tests/cli/test_generate.py"],
    "checkpoint": ["tests/cli/test_convert_cli.py"],
    "formats": ["tests/checkpoint"],
    "cost": ["tests/cli/test_describe.py"],
    "description": [
        "tests/cli/test_bill.py",
        "tests/cli/test_describe.py",
        "tests/cli/test_describe_by_hand.py",
        "tests/cli/test_describe_printed.py",
    ],
    "api": ["tests/cli/test_diff_cli.py", "tests/cli/test_measure_cli.py", "tests/cli/test_generate.py"],
    "spec": ["tests/cost", "tests/nn", "tests/families/test_totals.py", "tests/checkpoint/test_names.py"],
    "nn": ["tests/cost/test_declarations.py", "tests/generate"],
    "kernels": ["tests/nn", "tests/cost", "tests/spec/test_declared_by_hand.py", "tests/spec/test_fields.py"],
    "cli": [],
}
EQUIVALENT = Path(__file__).parent / "equivalent.json"
# Imported before any test runs, so that no child pays for it; asbuilt itself is imported by the child, mutated.
LIBRARIES = ("torch", "numpy", "safetensors.torch", "tokenizers", "gguf", "hypothesis", "click.testing", "rich.table")
LONGEST = 240  # seconds of tests that one error is tried with, the quickest of those that run its line
# Processor seconds beyond three times what the tests took without an error, and so many times as long by the clock: a
# busy machine is not to be taken for a test that hangs.
PATIENCE, PACE = 20, 10
IDLE = 60  # seconds in which neither a test nor a process that it started has worked: it waits for what never comes


@dataclass
class Seen:
    """What a run without errors recorded: the seconds of each test, and by file and line the tests that ran it."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    def tests(self, file: str, line: int) -> list[str]:
        """Returns the tests to be run for a line, quickest first; all of the folder's for what runs on import."""
        lines = self.lines.get(file, {})
        line = max((seen for seen in lines if seen <= line), default=0)  # the first of a statement over several
        named = {test for test in lines.get(line, set()) if test}
        if not named and line in lines:  # run on import only, or in processes that tests start
            named = set(self.seconds)
        quickest = sorted(named & self.seconds.keys(), key=lambda test: self.seconds[test])
        ends = itertools.accumulate(self.seconds[test] for test in quickest)
        return [test for test, end in zip(quickest, ends, strict=True) if end <= LONGEST]


class Recorder:
    """A pytest plugin that tells coverage which test is running, and keeps how long each took."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.measured, self.seconds = measured, defaultdict[str, float](float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Names the context of all that runs until the next test."""
        self.measured.switch_context(item.nodeid)
        start = sum(os.times()[:4])  # with the processes that it started
        result = yield
        self.seconds[item.nodeid] += sum(os.times()[:4]) - start
        self.measured.switch_context("")
        return result


def main() -> int:
    """Prints the score of each folder, or of a list of errors."""
    asked = _arguments()
    for name in LIBRARIES:
        __import__(name)
    sys.modules["torch"].set_num_threads(1)
    os.environ |= {"CI": "1", "PARITY_SEED": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    noticed = tried = 0
    print(f"seed {asked.seed}", flush=True)
    for folder, chosen in _chosen(asked).items():
        with _copies(asked.jobs) as copies:
            got = _score(folder, chosen, copies)
        noticed, tried = noticed + got, tried + len(chosen)
        print(f"{folder}: {got} of {len(chosen)} noticed ({got / max(1, len(chosen)):.0%})", flush=True)
    print(f"all: {noticed} of {tried} ({noticed / max(1, tried):.0%})")
    return 0 if noticed >= asked.least / 100 * tried else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", help="Folders of src/asbuilt, or files in them.")
    parser.add_argument("--sample", type=int, default=60, help="Errors tried of each folder.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**16))
    parser.add_argument("--errors", type=Path, help="A list of errors to be tried, in place of drawn ones.")
    parser.add_argument("--least", type=float, default=0, help="Exit with 1 below so many percent.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


Chosen = list[tuple[str, Error]]


def _chosen(asked: argparse.Namespace) -> dict[str, Chosen]:
    """Returns the errors to be tried by folder, each with its file."""
    if asked.errors:
        return _listed(json.loads(asked.errors.read_text()), asked.folders)
    return {folder: _drawn(folder, asked.sample, random.Random(asked.seed)) for folder in asked.folders}


def _drawn(folder: str, sample: int, rng: random.Random) -> Chosen:
    path = ROOT / PACKAGE / folder
    files = [path] if path.is_file() else sorted(path.glob("*.py"))
    places = [(str(file.relative_to(ROOT)), error) for file in files for error in _telling(file)]
    return sorted(rng.sample(places, min(sample, len(places))), key=lambda place: (place[0], place[1].start))


def _telling(file: Path) -> list[Error]:
    """Returns the errors of a file but those in lines where, for the reason given, none could be seen."""
    source = file.read_bytes()
    lines = [line.strip() for line in source.decode().splitlines()]
    entries = [e for e in json.loads(EQUIVALENT.read_text()) if ROOT / e["file"] == file]
    silent = {line for entry in entries for line in entry["lines"]}
    if gone := silent - set(lines):
        print(f"  {EQUIVALENT.name} names lines that are no longer in {file.relative_to(ROOT)}: {gone}")
    return [error for error in errors(source) if lines[error.line - 1] not in silent]


def _listed(entries: Sequence[dict[str, Any]], folders: Sequence[str]) -> dict[str, Chosen]:
    chosen: dict[str, Chosen] = defaultdict(list)
    for entry in entries:
        file = ROOT / entry["file"]
        source = file.read_bytes() if file.is_file() else b""
        folder = entry["file"].split("/")[2]
        if folders and folder not in folders:
            continue
        start = source.find(entry["old"].encode())
        if start < 0:
            print(f"  no longer there: {entry['file']}: {entry['what']}")
            continue
        end, line = start + len(entry["old"].encode()), source[:start].count(b"\n") + 1
        chosen[folder].append((entry["file"], Error(start, end, line, entry["old"], entry["new"])))
    return chosen


@contextmanager
def _copies(many: int) -> Iterator[Queue[Path]]:
    """Gives copies of the tree, each beside a link to the shared test data, where there is any."""
    free: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory(prefix="mutate-") as top:
        for number in range(many):
            copy = Path(top) / str(number) / "tree"
            for name in (
                "src",
                "tests",
                "docs",
                "demo",
                "benchmarks",
                "pyproject.toml",
                "README.md",
                "CHANGELOG.md",
                "CONTRIBUTING.md",
            ):
                _copy(ROOT / name, copy / name)
            if (ROOT.parent / "shared").exists():
                (copy.parent / "shared").symlink_to(ROOT.parent / "shared")
            free.put(copy)
        yield free


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    elif source.exists():
        shutil.copy(source, target)


def _score(folder: str, chosen: Chosen, copies: Queue[Path]) -> int:
    """Returns how many of the errors were noticed, and prints the others."""
    paths = [f"tests/{folder.split('/')[0]}", *BESIDE.get(folder.split("/")[0], [])]
    seen = _recorded([path for path in paths if (ROOT / path).exists()], copies, folder)
    print(f"{folder}: {len(seen.seconds)} tests, {sum(seen.seconds.values()):.0f} s without an error", flush=True)

    def noticed(place: tuple[str, Error]) -> bool:
        file, error = place
        tests = seen.tests(str(file), error.line)
        if tests and _fails(file, error, tests, sum(seen.seconds[test] for test in tests), copies):
            return True
        why = "" if tests else " (no test runs it)"
        old, new = (" ".join(text.split())[:100] for text in (error.old, error.new))
        print(f"  survived{why}: {file}:{error.line}: {old}  ->  {new}", flush=True)
        return False

    with ThreadPoolExecutor(copies.qsize()) as pool:
        return sum(pool.map(noticed, chosen))


def _recorded(paths: Sequence[str], copies: Queue[Path], folder: str) -> Seen:
    """Runs the tests without an error; raises SystemExit where they fail already."""
    copy = copies.get()
    kept = copy.parent / "seen.pickle"

    def record() -> int:
        measured = coverage.Coverage(source=[str(copy / PACKAGE)], data_file=None, config_file=False)
        recorder = Recorder(measured)
        measured.start()
        _import_all(copy, folder)
        code = pytest.main([*QUIET, *paths], plugins=[recorder])
        measured.stop()
        data = measured.get_data()
        names = {file: str(Path(file).relative_to(copy)) for file in data.measured_files()}
        lines = {
            name: {n: set(tests) for n, tests in data.contexts_by_lineno(file).items()} for file, name in names.items()
        }
        kept.write_bytes(pickle.dumps(Seen(dict(recorder.seconds), lines)))
        return code

    code = _in_child(copy, record, limit=1800)
    copies.put(copy)
    if code != 0:
        raise SystemExit(f"the tests of {', '.join(paths)} fail without any error (exit code {code})")
    return pickle.loads(kept.read_bytes())


def _import_all(copy: Path, folder: str) -> None:
    """Imports the folder's modules before any test: their top level is run by all tests, not by the first to import."""
    top = copy / PACKAGE / folder
    for file in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
        if file.stem != "__main__":
            parts = file.relative_to(copy / "src").with_suffix("").parts
            importlib.import_module(".".join(parts).removesuffix(".__init__"))


QUIET = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]


def _fails(file: str, error: Error, tests: list[str], seconds: float, copies: Queue[Path]) -> bool:
    copy = copies.get()
    source = (copy / file).read_bytes()
    try:
        (copy / file).write_bytes(error.applied(source))
        return _in_child(copy, lambda: pytest.main([*QUIET, *tests]), limit=3 * int(seconds) + PATIENCE) != 0
    finally:
        (copy / file).write_bytes(source)
        copies.put(copy)


def _in_child(copy: Path, work: Callable[[], int], limit: int) -> int:
    """Runs `work` in a forked child that stands in the copy; negative where it takes more than `limit` seconds."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            code = _as_a_test_run(copy, work)
        finally:
            os._exit(code)
    end = time.monotonic() + PACE * limit
    worked, since = 0, time.monotonic()
    while time.monotonic() < min(end, since + IDLE):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
        if time.monotonic() > since + 1 and (now := _worked(child)) != worked:
            worked, since = now, time.monotonic()
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def _worked(group: int) -> float:
    """Returns what the processes of a group have worked, another number at each call where the system does not say."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            _, _, of_group, *said = stat.read_text().rpartition(")")[2].split()
            ticks += sum(map(int, said[8:10])) if int(of_group) == group else 0
    return ticks if Path("/proc/self/stat").exists() else time.monotonic()


def _as_a_test_run(copy: Path, work: Callable[[], int]) -> int:
    os.setpgrp()
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy / "src")
    nothing = os.open(os.devnull if not os.environ.get("MUTATE_LOUD") else "/dev/stderr", os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    sys.path[:0] = [str(copy / "src"), str(copy / "tests")]
    return int(work())


if __name__ == "__main__":
    sys.exit(main())

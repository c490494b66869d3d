"""What all tests share: one thread, one hypothesis profile, draws that can be repeated, and tests/ on the path.

Every run draws anew. `PARITY_SEED`, printed at its start, repeats what a run drew: parity's models, and whatever a test
draws from `random`. Under CI, and where it is given, hypothesis draws its examples from it too.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import sys
import tempfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, core, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

sys.path.insert(0, str(Path(__file__).parent))

SHARED = Path(__file__).parents[2] / "shared"
# Said before processes that run tests side by side take it over.
REPEATS = os.environ.setdefault("DRAWS_REPEAT", "1" if os.environ.get("CI") or os.environ.get("PARITY_SEED") else "")
SEED = int(os.environ.setdefault("PARITY_SEED", str(random.SystemRandom().randrange(2**32))))
# Torch is the reference everywhere; tests/kernels/test_native.py holds the native kernels to it.
os.environ["ASBUILT_NATIVE"] = "0"
# Nor does a calibration of this machine choose what is tested.
os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir()) / f"asbuilt-tests-{os.getpid()}")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
torch.set_num_threads(1)
settings.register_profile(
    "asbuilt",
    deadline=None,
    derandomize=False,  # under CI hypothesis would draw by each test's source, whatever the seed
    # a change is not to fail by a draw that has nothing to do with it; the same draws again need not be so many
    max_examples=25 if os.environ.get("CI") else 50,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("asbuilt")
if REPEATS:
    core.global_force_seed = SEED
    # hypothesis mixes in constants of whatever modules are loaded by then, which differ with the tests that ran before
    providers._get_local_constants = Constants


@pytest.fixture(autouse=True)
def repeatable(request: pytest.FixtureRequest) -> None:
    """Begins each test's draws from `random` and torch with a seed that is the run's and the test's."""
    seed = zlib.crc32(f"{SEED} {request.node.nodeid}".encode())
    random.seed(seed)
    torch.manual_seed(seed)


def pytest_report_header() -> str:
    also = "" if REPEATS else "; hypothesis prints its own, unless a seed is given"
    return f"draws: PARITY_SEED={SEED} repeats them{also}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many tests did not run for want of ../shared: those that skip, and lists of cases that are empty."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    without = sum("shared" in reason for reason in reasons)
    empty = sum("empty parameter set" in reason for reason in reasons)
    if not SHARED.is_dir() or without or empty:
        terminalreporter.write_line(
            f"without {SHARED}: {without} tests skipped, and {empty} more are whole lists of its cases that are empty"
        )

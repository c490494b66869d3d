"""How much memory there is: the least that anybody says, and nothing where nobody does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asbuilt import memory

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """64 GiB, of which 40 are free, and a container's limit in a file."""
    monkeypatch.setattr(
        os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}.__getitem__, raising=False
    )
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUPS", (tmp_path / "none", tmp_path / "max"))
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemFree: 2 kB\nMemAvailable:  {40 << 20} kB\n")
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "total", "free"),
    [
        ("max\n", 64, 40),
        (f"{50 * GIB}\n", 50, 40),
        (f"{8 * GIB}\n", 8, 8),
        (f"{(1 << 63) - 4096}\n", 64, 40),
        ("", 64, 40),
    ],
)
def test_the_least_of_what_is_said(machine: Path, limit: str, total: int, free: int) -> None:
    (machine / "max").write_text(limit)
    assert (memory.total(), memory.free()) == (total * GIB, free * GIB)


def test_where_nobody_says(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, which has no sysconf."""
    monkeypatch.delattr(os, "sysconf")
    (machine / "meminfo").unlink()
    assert (memory.total(), memory.free()) == (None, None)
    (machine / "meminfo").write_text("MemAvailable:\n")
    assert memory.free() is None


@pytest.mark.skipif(sys.platform == "win32", reason="no such limits")
def test_a_limit_of_the_process() -> None:
    script = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
    script += "from asbuilt import memory; assert memory.total() == memory.free() == 1 << 30, memory.total()"
    subprocess.run([sys.executable, "-c", script], check=True)

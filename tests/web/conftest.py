"""What the tests of this folder share stands beside them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from browser import Page


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server that was started with a small model."""
    words = [sys.executable, "-m", "asbuilt", "web", "smollm2-135m", "--no-open", "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, bufsize=1, env=None)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[0]
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A tab of a fresh browser."""
    import browser

    with browser.browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened

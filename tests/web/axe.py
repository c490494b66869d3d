"""Deque's axe, where it is installed: the accessibility faults of a page that are serious."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from browser import Page

# npm's and Debian's places, and one that is named.
PLACES = ("node_modules/axe-core/axe.min.js", "/usr/share/nodejs/axe-core/axe.min.js", os.environ.get("AXE_CORE", ""))
RUN = """axe.run(document).then((found) => ({
  passed: found.passes.length,
  serious: found.violations.filter((one) => ["serious", "critical"].includes(one.impact))
    .map((one) => [one.id, one.nodes.map((node) => node.html.slice(0, 120))]),
}))"""


def serious(page: Page) -> list[Any]:
    """Returns the serious faults of the page; skips the test where axe is not installed (AXE_CORE names its file)."""
    path = next((Path(place) for place in PLACES if place and Path(place).is_file()), None)
    if path is None:
        pytest.skip("no axe-core here: AXE_CORE=.../axe.min.js")
    page.run(f"{path.read_text(encoding='utf-8')};0")
    found = page.run(RUN)
    assert found["passed"] > 10
    return found["serious"]

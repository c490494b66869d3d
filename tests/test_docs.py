"""The pages that are made from the code are those that the code makes today."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_of_parts_is_current() -> None:
    made = runpy.run_path(str(DOCS / "make_parts.py"))
    assert (DOCS / "parts.md").read_text(encoding="utf-8") == made["page"](), "run python docs/make_parts.py"

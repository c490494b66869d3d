"""The pages that are made from the code are those that the code makes today."""

from __future__ import annotations

import runpy
from dataclasses import fields
from pathlib import Path

from asbuilt.spec.json import PARTS

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_of_parts_is_current() -> None:
    made = runpy.run_path(str(DOCS / "make_parts.py"))
    assert (DOCS / "parts.md").read_text(encoding="utf-8") == made["page"](), "run python docs/make_parts.py"


def test_every_public_field_of_a_part_is_explained() -> None:
    """On the page, and below the field where an editor finds it."""
    made = runpy.run_path(str(DOCS / "make_parts.py"))
    for part in PARTS.values():
        told = made["field_docs"](part)
        for field in fields(part):
            assert told.get(field.name, "").endswith("."), f"{part.__name__}.{field.name} has no docstring"

"""docs/python.md and the Python of other pages, run from top to bottom: what they print is what the page says."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import asbuilt

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "python.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PUBLISHED = "## A published checkpoint"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def run(page: str, names: dict[str, Any]) -> int:
    """Runs the page's code, each block's output held against the text below it; returns how many were compared."""
    printed, compared = None, 0
    for kind, text in BLOCK.findall(page):
        if kind == "python":
            assert printed in (None, ""), f"not on the page: {printed}"
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, str(PAGE), "exec"), names)
            printed = out.getvalue()
        else:
            assert printed == text
            printed, compared = None, compared + 1
    assert printed in (None, "")
    return compared


def test_a_model_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own, found, _ = PAGE.read_text(encoding="utf-8").partition(PUBLISHED)
    assert found
    assert run(own, {}) == own.count("```text") == 6


def test_the_page_of_tokenizers() -> None:
    page = (ROOT / "docs" / "tokenizer.md").read_text(encoding="utf-8")
    assert run(page, {}) == page.count("```text") == 2


def test_the_page_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "train-data.md").read_text(encoding="utf-8")
    assert run(page, {}) == page.count("```text") == 3


def test_a_published_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        file = runpy.run_path(str(ROOT / "demo" / "find_smollm2.py"))["find"]()
    except SystemExit as missing:
        pytest.skip(str(missing))
    (tmp_path / FILE).symlink_to(file)
    assert file.name == FILE
    page = PAGE.read_text(encoding="utf-8").partition(PUBLISHED)[2]
    assert run(page, {"asbuilt": asbuilt, "torch": torch}) == page.count("```text") == 3

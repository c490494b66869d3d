"""Some fresh tokenizer folders and chat templates on every run; the scripts beside this run as many as one likes."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import templates
import tokenizer_folders

from asbuilt.text import chat
from asbuilt.text.tokenizer import Tokenizer


def test_every_mutated_tokenizer_is_read_or_refused() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    assert sum(tokenizer_folders.fuzz(120, seed).values()) == 120


def test_every_mutated_template_is_rendered_or_refused() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    assert sum(templates.fuzz(300, seed).values()) == 300


def test_the_fuzzers_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(*_: object, **__: object) -> str:
        raise KeyError("a")

    monkeypatch.setattr(templates, "render", careless)
    with pytest.raises(AssertionError, match="KeyError"):
        templates.fuzz(1, 1)
    monkeypatch.setattr(Tokenizer, "wrapped", careless)
    with pytest.raises(AssertionError, match="KeyError"):
        tokenizer_folders.fuzz(200, 1)
    assert chat._worker.pid is None or chat._worker.pid > 0

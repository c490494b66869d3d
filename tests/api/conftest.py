"""A tiny checkpoint with a tokenizer, for functions that load what they are given."""

from __future__ import annotations

import random
from pathlib import Path

import byte_tokenizer
import pytest

import asbuilt
from asbuilt.spec import Model


@pytest.fixture
def spec() -> Model:
    """A decoder over bytes and an end token."""
    return asbuilt.decoder(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, n_vocab=257, max_positions=64, name="tiny")


@pytest.fixture
def checkpoint(spec: Model, tmp_path: Path) -> Path:
    """A published family's folder of it, with weights drawn anew."""
    folder = tmp_path / "tiny"
    built = asbuilt.build(spec, seed=random.randrange(2**32))
    asbuilt.save(built, folder, family="llama", carried={})
    byte_tokenizer.write_tokenizer(folder)
    return folder

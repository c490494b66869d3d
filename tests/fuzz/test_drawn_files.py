"""A few hundred freshly damaged files on every run; `files.py` beside this damages as many as one likes."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import files

from asbuilt.errors import InputError
from asbuilt.formats import gguf, safetensors


@pytest.mark.parametrize("kind", files.KINDS)
def test_every_damaged_file_is_read_or_refused(kind: str) -> None:
    seed = random.randrange(2**32)
    outcomes = files.fuzz(kind, 150, seed)
    assert set(outcomes) == {"read", "refused"}, f"seed {seed}"


def test_the_fuzzer_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(cursor: gguf._Cursor, what: str) -> str:
        start = cursor.take(cursor.u64(what), what)
        return cursor.data[start : cursor.at].decode()

    monkeypatch.setattr(gguf._Cursor, "name", careless)
    with pytest.raises(AssertionError, match=r"UnicodeDecodeError.* escaped from case \d+ of seed 1, gguf"):
        files.fuzz("gguf", 300, 1)
    monkeypatch.setattr(safetensors, "_counts", lambda values: True)
    with pytest.raises(AssertionError, match=r"Error.* escaped from case \d+ of seed 1, safetensors"):
        files.fuzz("safetensors", 300, 1)


def test_what_is_not_damaged_is_read(tmp_path: Path) -> None:
    draw = random.Random(3)
    for kind, (make, _, write) in files.KINDS.items():
        place = tmp_path / kind
        place.mkdir()
        assert files.read(write(make(draw), place, files._Calm()))
    (tmp_path / "safetensors" / "config.json").unlink()
    with pytest.raises(InputError):
        files.open_model(tmp_path / "safetensors")

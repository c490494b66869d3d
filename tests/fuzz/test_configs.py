"""A few hundred fresh mutated configs on every run; `configs.py` beside this runs as many as one likes."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import configs


def test_every_mutated_config_is_described_or_refused() -> None:
    if not configs.MODELS.is_dir():
        pytest.skip("../shared/models is absent")
    outcomes = configs.fuzz(400, random.randrange(2**32))
    assert set(outcomes) == {"described", "refused"}


def test_the_fuzzer_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    if not configs.MODELS.is_dir():
        pytest.skip("../shared/models is absent")
    honest = configs.described

    def careless(config: dict[str, object], name: str) -> int | None:
        other = config.get("model_type") != "llama"  # whose published configs all have it
        return honest(config, name) if other or "vocab_size" in config else config["vocab_size"]  # type: ignore[return-value]

    drawn = {"llama": configs.drawn_from()["llama"]}
    monkeypatch.setattr(configs, "drawn_from", lambda: drawn)
    monkeypatch.setattr(configs, "described", careless)
    with pytest.raises(AssertionError, match="KeyError"):
        configs.fuzz(2000, 1)

"""What is not said: each key of config.json left out in turn, or null, means here what it means to transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from cases import CASES
from harness import (
    SEED,
    ParityCase,
    asbuilt_loads,
    check,
    transformers_loads,
    transformers_saves,
)
from transformers import AutoConfig, PreTrainedModel

from asbuilt.errors import InputError
from asbuilt.families import read_config
from asbuilt.nn.model import Model as BuiltModel
from asbuilt.spec import Model

Config = dict[str, Any]
AGAIN = f"PARITY_SEED={SEED} draws it again"
ROPE = "rope_parameters"
# Families of which transformers needs an object for every kind of layer, so that none may be left out.
BY_KIND = ("gemma4_text",)
ROTARY = [
    pytest.param(case, variant, id=f"{case.family}-{variant}")
    for case in CASES.values()
    for variant in case.configs
    if case.family not in BY_KIND and ROPE in case.config(variant).to_dict()
]


def test_a_missing_key_means_the_same(case: ParityCase, variant: str, tmp_path: Path) -> None:
    """Where transformers refuses what is left there is nothing to compare, which must not be the rule."""
    said = _written(case, variant, tmp_path)
    compared = 0
    for key in said.keys() - {"model_type"}:
        left = {name: value for name, value in said.items() if name != key}
        whole = _completed(left, tmp_path)
        if whole is not None:
            compared += 1
            assert _foreign(left, whole.get(key)) or _spec(left) == _spec(whole), f"without {key}; {AGAIN}"
    assert compared > len(said) / 2


def test_null_means_the_same_or_is_refused(case: ParityCase, variant: str, tmp_path: Path) -> None:
    said = _written(case, variant, tmp_path)
    compared = 0
    for key in said.keys() - {"model_type"}:
        have, whole = _spec(said | {key: None}), _completed(said | {key: None}, tmp_path)
        if have is not None and whole is not None:
            compared += 1
            assert have == _spec(whole), f"{key}: null; {AGAIN}"
    assert compared > 0


@pytest.mark.parametrize(("case", "drawn"), ROTARY)
def test_rotary_keys_not_said(case: ParityCase, drawn: str, tmp_path: Path) -> None:
    """transformers fills these in only as it builds its tables, so models are compared, wherever both accept."""
    rng = case.random(drawn, "rotary keys")
    transformers_saves(case.config(drawn), rng.randrange(2**32), tmp_path, case.kind)
    said = json.loads((tmp_path / "config.json").read_text())
    compared = _compared(case, drawn, said, tmp_path, rng, _less(said[ROPE]))
    if not compared and all(
        isinstance(inner, dict) for inner in said[ROPE].values()
    ):  # an object for each kind of layer
        inside = ((what, {**said[ROPE], kind: less}) for kind, one in said[ROPE].items() for what, less in _less(one))
        compared = _compared(case, drawn, said, tmp_path, rng, inside)
    assert compared > 0


def _less(rope: Config) -> Iterator[tuple[str, Config]]:
    """Yields what is not said, and an object that does not say it."""
    for key in rope:
        without = {name: value for name, value in rope.items() if name != key}
        yield from ((f"{key} missing", without), (f"{key} null", without | {key: None}))


def _compared(
    case: ParityCase, drawn: str, said: Config, folder: Path, rng: Random, ropes: Iterable[tuple[str, Config]]
) -> int:
    """Returns how many of the RoPE objects both sides accept; each must be the same model to both."""
    compared = 0
    for what, rope in ropes:
        (folder / "config.json").write_text(json.dumps(said | {ROPE: rope}))
        mine, other = _both(case, folder)
        if mine is None or other is None:
            continue
        inputs = case.kind.inputs(rng, mine.spec)
        compared += 1
        have, want = case.kind.ours(mine, inputs), case.kind.theirs(other, inputs)
        check(case.family, f"{drawn}, {what}", have, want)
    return compared


def _both(case: ParityCase, folder: Path) -> tuple[BuiltModel | None, PreTrainedModel | None]:
    """Returns the folder's model on each side, None where that side refuses it."""
    try:
        mine = asbuilt_loads(folder, kind=case.kind)
    except InputError:
        mine = None
    try:
        other = transformers_loads(folder, kind=case.kind)
        if other.main_input_name == "input_ids":
            other(torch.zeros(1, 1, dtype=torch.long))  # some refuse only as they run
    except Exception:  # whatever its validation, or a table, runs into
        other = None
    return mine, other


def _written(case: ParityCase, variant: str, folder: Path) -> Config:
    case.config(variant).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def _completed(config: Config, folder: Path) -> Config | None:
    """Returns the config with what transformers adds; None where it refuses to."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        return AutoConfig.from_pretrained(folder).to_dict()
    except Exception:  # whatever its validation raises
        return None


def _foreign(config: Config, usual: object) -> bool:
    """Whether a size is refused since the class's default is another model's; it says the default, `usual`."""
    usual = usual[0] if isinstance(usual, list) and usual else usual  # the same for each layer
    try:
        read_config(config, "model")
    except InputError as error:
        return f"missing, and {usual}, the class's default, is that of a model with" in str(error)
    return False


def _spec(config: Config) -> Model | None:
    """Returns our reading; None where we refuse."""
    try:
        return read_config(config, "model").spec
    except InputError:
        return None

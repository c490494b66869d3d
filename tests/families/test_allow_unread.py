"""`--allow-unread KEY` passes over a key that the family does not know, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asbuilt.cli.main import cli
from asbuilt.errors import InputError
from asbuilt.families import read_config

SMALL: dict[str, Any] = {"model_type": "gpt2", "n_layer": 2, "n_embd": 24, "n_head": 3, "vocab_size": 50}


def test_an_unknown_key_can_be_passed_over_by_name() -> None:
    config = {**SMALL, "n_gates": 3}
    with pytest.raises(InputError, match="n_gates"):
        read_config(config, "small")
    assert read_config(config, "small", ["n_gates"]).spec == read_config(SMALL, "small").spec


@pytest.mark.parametrize("key", ["n_layer", "n_head", "activation_function", "model_type", "bos_token_id"])
def test_a_known_key_cannot(key: str) -> None:
    with pytest.raises(InputError):
        read_config({**SMALL, key: SMALL.get(key, "gelu_new")}, "small", [key])


def test_a_key_that_is_not_there_is_a_mistake() -> None:
    with pytest.raises(InputError, match="not in the config"):
        read_config(SMALL, "small", ["n_gates"])


def test_describe_warns_and_running_does_not_take_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, "n_gates": 3}))
    refused = CliRunner().invoke(cli, ["describe", str(path), "--json"])
    assert refused.exit_code == 2
    told = CliRunner().invoke(cli, ["describe", str(path), "--json", "--allow-unread", "n_gates"])
    assert told.exit_code == 0
    assert "n_gates" in told.stderr
    assert json.loads(told.stdout)["family"] == "gpt2"
    assert CliRunner().invoke(cli, ["measure", str(path), "--allow-unread", "n_gates"]).exit_code == 2

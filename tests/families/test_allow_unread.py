"""`--allow-unread KEY` passes over a key that the family does not know, and nothing else, wherever one is opened."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import strategies
import torch
from click import Context, Group
from click.testing import CliRunner

from asbuilt import load, open_model, save
from asbuilt.cli.main import cli
from asbuilt.errors import InputError
from asbuilt.families import read_config, read_gguf
from asbuilt.formats.gguf import GGUFFile

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
    with pytest.raises(InputError, match="no such key in the config"):
        read_config(SMALL, "small", ["n_gates"])


def test_a_path_leads_into_objects() -> None:
    config = {"model_type": "qwen2", "rope_scaling": {"rope_type": "linear", "factor": 2.0, "x_factor": 3}}
    plain = {"model_type": "qwen2", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(InputError, match=r"--allow-unread rope_scaling\.x_factor"):
        read_config(config, "small")
    assert read_config(config, "small", ["rope_scaling.x_factor"]) == read_config(plain, "small")
    for key in ("rope_scaling.factor", "rope_scaling.rope_type", "rope_scaling"):
        with pytest.raises(InputError):
            read_config(config, "small", [key])
    for key in ("rope_scaling.y_factor", "rope_scaling.factor.x", "hidden_size.x"):
        with pytest.raises(InputError, match="no such key in the config"):
            read_config(config, "small", [key])


def test_a_path_that_leads_nowhere_is_said_whole() -> None:
    config = {"model_type": "llava", "text_config": {"vocab_size": 32064, "rope_scaling": None}}
    for key in ("text_config.vocab_sizes", "text_config.rope_scaling.factor", "text_conf.a"):
        with pytest.raises(InputError, match=f"got '{key}'"):
            read_config(config, "x", [key])


def test_a_path_leads_into_a_text_and_a_tower_and_what_lies_in_them() -> None:
    text: dict[str, Any] = {"vocab_size": 32064, "rope_scaling": {"type": "linear", "factor": 2}}
    odd = {**text, "a": 1, "rope_scaling": {**text["rope_scaling"], "b": 1}}
    config = {"model_type": "llava", "text_config": odd, "vision_config": {"c": 1}, "d": 1}
    keys = ["text_config.rope_scaling.b", "text_config.a", "vision_config.c", "d"]
    plain = {"model_type": "llava", "text_config": text, "vision_config": {}}
    assert read_config(config, "x", keys) == read_config(plain, "x")
    passed: list[str] = []
    for key in keys:  # each message names what it takes to get past it
        with pytest.raises(InputError, match=f"--allow-unread {re.escape(key)}$"):
            read_config(config, "x", passed)
        passed.append(key)


def test_a_hint_only_where_a_key_is_nearly_one_that_is_missing() -> None:
    def said(config: dict[str, Any]) -> str:
        with pytest.raises(InputError) as refused:
            read_config({"model_type": "qwen2", **config}, "x")
        return str(refused.value)

    assert "did you mean 'num_hidden_layers'?" in said({"num_hidden_layer": 32})
    assert "did you mean" not in said({"num_hidden_layer": 32, "num_hidden_layers": 32})
    for key in ("gate_bias", "own_version", "interpolate_factor", "lm_head_bias", "rotary_dim"):
        assert "did you mean" not in said({key: 1})


def test_every_command_that_opens_a_model_takes_it(tmp_path: Path) -> None:
    from asbuilt.cli.main import COMMANDS

    plan = cli.get_command(Context(cli), "plan")
    assert isinstance(plan, Group)
    commands = {name: cli.get_command(Context(cli), name) for name in COMMANDS}
    commands |= {name: plan.get_command(Context(plan), name) for name in ("serve", "train")}
    takers = {name for name, made in commands.items() if made and any(p.name == "allow_unread" for p in made.params)}
    assert takers >= {"describe", "generate", "convert", "measure", "embed", "diff", "serve", "train"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, "n_gates": 3}))
    assert CliRunner().invoke(cli, ["describe", str(path), "--json"]).exit_code == 2
    told = CliRunner().invoke(cli, ["describe", str(path), "--json", "--allow-unread", "n_gates"])
    assert told.exit_code == 0
    assert told.stderr.count("n_gates") == 1
    assert json.loads(told.stdout)["family"] == "gpt2"
    for name in ("gpt2", "no-such-model"):
        assert CliRunner().invoke(cli, ["describe", name, "--allow-unread", "n_gates"]).exit_code == 2


def test_loading_passes_over_it_too(tmp_path: Path) -> None:
    """The same weights run and are converted; of two models that are compared, either may have the key."""
    folder, plain = tmp_path / "odd", tmp_path / "plain"
    spec = read_config({**SMALL, "n_positions": 16}, "x").spec
    save(strategies.randomised(spec, 1, torch.float32), plain, family="gpt2", carried={})
    shutil.copytree(plain, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_gates": 3}))
    run = CliRunner()
    assert run.invoke(cli, ["convert", str(folder), str(tmp_path / "no")]).exit_code == 2
    done = run.invoke(cli, ["convert", str(folder), str(tmp_path / "out"), "--allow-unread", "n_gates"])
    assert done.exit_code == 0, done.output
    assert "n_gates" not in json.loads((tmp_path / "out" / "config.json").read_text())
    for other in (plain, tmp_path / "out"):
        found = run.invoke(cli, ["diff", str(folder), str(other), "--json", "--allow-unread", "n_gates"])
        assert json.loads(found.stdout)["same"], found.output
    assert run.invoke(cli, ["diff", str(plain), str(plain), "--allow-unread", "n_gates"]).exit_code == 2
    model = load(open_model(folder, allow_unread=["n_gates"]))
    assert torch.equal(model.embedding.weight, load(plain).embedding.weight)  # type: ignore[arg-type]  # pyright: ignore


def test_a_gguf_file_too() -> None:
    metadata = {
        "general.architecture": "gpt2",
        "gpt2.odd": 1,
        "gpt2.context_length": 8,
        "gpt2.embedding_length": 4,
        "gpt2.block_count": 1,
        "gpt2.feed_forward_length": 16,
        "gpt2.attention.head_count": 2,
        "gpt2.attention.layer_norm_epsilon": 1e-5,
        "gpt2.vocab_size": 9,
    }
    file = GGUFFile(path=Path("x.gguf"), metadata=metadata, tensors={})
    with pytest.raises(InputError, match=r"--allow-unread gpt2\.odd"):
        read_gguf(file, "x")
    assert read_gguf(file, "x", ["gpt2.odd"]).spec.n_vocab == 9
    with pytest.raises(InputError, match="vocab_size"):
        read_gguf(file, "x", ["gpt2.odd", "gpt2.vocab_size"])

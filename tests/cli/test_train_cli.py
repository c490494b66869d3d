"""`asbuilt train` on the command line."""

from __future__ import annotations

import json
import random
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from asbuilt import cost
from asbuilt.catalog import machines
from asbuilt.cli.main import cli
from asbuilt.families import read_config
from asbuilt.spec import Pass
from asbuilt.train import recipe as recipes

TINY = ["model.config.n_layer=1", "model.config.n_embd=8", "model.config.n_head=2", "data.context=4", "data.batch=2"]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("".join(random.choices("abc ", k=200)))
    return ["train", "characters", *TINY, f"data.text={tmp_path / 'text.txt'}", f"run.out={tmp_path / 'out'}"]


def test_a_run_prints_one_document(words: list[str], tmp_path: Path) -> None:
    ran = CliRunner().invoke(cli, [*words, "run.steps=4", "--json"])
    assert ran.exit_code == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert (told["steps"], told["tokens"], told["model"]) == (4, 4 * 8, str(tmp_path / "out" / "model"))
    assert "step 4/4: loss" in ran.stderr
    assert "step 4/4: validation loss" in ran.stderr
    again = CliRunner().invoke(cli, [*words, "run.steps=4", "--json", "--resume"])
    assert json.loads(again.stdout)["validation"] == told["validation"]
    refused = CliRunner().invoke(cli, [*words, "run.steps=4"])
    assert refused.exit_code == 2
    assert "run.out: already exists" in refused.stderr


def test_show_is_the_recipe_and_trains_nothing(words: list[str], tmp_path: Path) -> None:
    shown = CliRunner().invoke(cli, [*words, "--show"])
    document = CliRunner().invoke(cli, [*words, "--show", "--json"])
    assert tomllib.loads(shown.stdout) == json.loads(document.stdout)
    assert tomllib.loads(shown.stdout)["data"]["batch"] == 2
    assert not (tmp_path / "out").exists()


def test_a_wrong_key_is_one_message() -> None:
    ran = CliRunner().invoke(cli, ["train", "characters", "optimizer.rl=1"])
    assert ran.exit_code == 2
    assert "optimizer.rl: unknown key" in ran.stderr


def test_masks_of_documents_are_planned(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """4 bytes of each pair of a row's tokens, once for all layers, and 16 of each token: its position and document."""
    monkeypatch.setattr("asbuilt.measure.this_machine", lambda **_: machines.find("a100-80gb"))
    rows, context = 3, 16
    sizes = [f"data.context={context}", f"data.batch={rows}"]
    plain, masked = (
        json.loads(CliRunner().invoke(cli, [*words, *sizes, *more, "--dry-run", "--json"]).stdout)
        for more in ([], ["data.document_mask=true"])
    )
    made = 4 * rows * context**2 + 8 * rows * context + 8 * (rows - 1) * context
    # a tokenizer that ends documents has other tokens, and so another state
    assert (masked["bytes"] - masked["state_bytes"]) - (plain["bytes"] - plain["state_bytes"]) == made


def test_pairs_of_images_and_texts_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """800 steps of 72 pairs; parameters as built, and FLOPs of a pair as the costs of its batch say."""
    monkeypatch.setattr("asbuilt.measure.this_machine", lambda **_: machines.find("a100-80gb"))
    shown = CliRunner().invoke(cli, ["train", "clip", "--dry-run"])
    assert shown.exit_code == 0, shown.stderr
    assert all(
        words in shown.stdout for words in ("FLOPs per pair, exact", "training pairs", "57,600", "pairs per step")
    )
    made = json.loads(CliRunner().invoke(cli, ["train", "clip", "--dry-run", "--json"]).stdout)
    assert (made["unit"], made["tokens"], made["tokens_per_step"]) == ("pairs", 57600, 72)
    config = recipes.read("clip", []).model.config
    text = config["text_config"] | {"vocab_size": made["n_vocab"], "eos_token_id": made["n_vocab"] - 1}
    spec = read_config(config | {"text_config": text}, "clip").spec
    assert made["parameters"] == cost.total_parameters(spec)
    assert made["state_bytes"] == 16 * made["parameters"]
    run = Pass(tokens=16, batch=72, images=1, width=4)
    assert made["flops_per_token"]["exact"] == pytest.approx(cost.flops(spec, run).training / 72)
    refused = CliRunner().invoke(cli, ["train", "clip", "--dry-run", "parallel.ranks=2"])
    assert refused.exit_code == 2
    assert "parallel.ranks: needs a process alone" in refused.stderr

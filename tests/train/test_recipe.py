"""Recipes: every setting is shown and read back, and what is wrong is named."""

from __future__ import annotations

import tomllib
from dataclasses import fields

import pytest

from asbuilt import InputError
from asbuilt.train import recipe as recipes
from asbuilt.train.recipe import Recipe, documented


@pytest.mark.parametrize("name", recipes.shipped())
def test_shipped_recipes_are_read_and_written_back(name: str) -> None:
    made = recipes.read(name)
    shown = recipes.dumps(made)
    assert recipes.loads(shown) == made
    said = recipes.to_dict(made)
    said["model"] = {key: value for key, value in said["model"].items() if value != {}}  # an empty table is not written
    assert tomllib.loads(shown) == said


def test_every_setting_is_shown_with_what_it_is() -> None:
    made = recipes.read("characters")
    lines = recipes.dumps(made).splitlines()
    for section in fields(Recipe):
        kind = type(getattr(made, section.name))
        said = documented(kind)
        for one in fields(kind):
            assert said[one.name].endswith("."), one.name
            if one.name != "config":
                assert any(line.startswith(f"{one.name} = ") and line.endswith(said[one.name]) for line in lines)


def test_changes_come_last_and_keep_their_type() -> None:
    made = recipes.read(
        "characters", ["optimizer.lr=1", "optimizer.betas=[0.5,0.6]", "data.text=a b.txt", "run.seed=7"]
    )
    assert (made.optimizer.lr, made.optimizer.betas, made.data.text, made.run.seed) == (1.0, (0.5, 0.6), "a b.txt", 7)
    assert type(made.optimizer.lr) is float
    found = {key for key, _, _ in recipes.differences(made, recipes.read("characters"))}
    assert found == {"optimizer.lr", "optimizer.betas", "data.text", "run.seed"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("optimizer.weight_decy=0", "optimizer.weight_decy: unknown key; did you mean 'weight_decay'"),
        ("scheduel.warmup=1", "scheduel: unknown key; did you mean 'schedule'"),
        ("data.lr=1", "it is optimizer.lr"),
        ("run.steps=1.5", "run.steps: must be a whole number"),
        ("run.steps=true", "run.steps: must be a whole number"),
        ("run.steps=0", "run.steps: must be a number of at least 1"),
        ("optimizer.lr=nan", "optimizer.lr: must be a number"),
        ("optimizer.betas=[0.9]", "a list of 2"),
        ("optimizer=3", "must be a section"),
        ("step.precision=fp8", "must be auto, fp32 or bf16"),
        ("model.source=gpt2", "both are given"),
        ("steps", "SECTION.KEY=VALUE"),
        ("data.validation=1.0", "data.validation"),
    ],
)
def test_wrong_settings_are_refused_by_name(change: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        recipes.read("characters", [change])
    assert said in str(caught.value)


def test_unknown_recipes_and_files_that_are_not_toml() -> None:
    with pytest.raises(InputError, match="characters"):
        recipes.read("character")
    with pytest.raises(InputError, match="not TOML"):
        recipes.loads("a = = b")

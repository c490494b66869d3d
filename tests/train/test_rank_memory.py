"""Memory of each of two processes, beside the plan: state, what a forward pass saves, and the peak of a step.

A step is two micro-batches, so that its peak is in the second, when all gradients are there, as the plan assumes.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from many_runs import Jobs, far, memories, stage_of
from small_runs import recipe

from asbuilt.plan.train.moments import Group
from asbuilt.plan.train.stages import StageMemory
from asbuilt.train.recipe import Recipe

SETTINGS = ("run.steps=2", "run.save_every=0", "run.validate_every=0", "data.context=32", "step.accumulate=2")
LARGE, SMALL = 4096, 16  # characters of the text: with so many the loss is the most that a step holds, or a block
MODELS = {
    "gpt": ("model.config.n_embd=64", "model.config.n_head=4", "model.config.n_positions=32"),
    "moe": (
        'model.config={model_type="mixtral", hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16, '
        "num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, "
        "max_position_embeddings=32}",
    ),
    "t5": (
        'model.config={model_type="t5", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0}',
        "data.objective=spans",
    ),
}


def text(folder: Path, characters: int) -> Path:
    """A text of so many different characters."""
    file = folder / f"{characters}.txt"
    file.write_text("".join(chr(0x4E00 + i) for i in range(characters)) * (1 + 4000 // characters), encoding="utf-8")
    return file


Runs = dict[str, tuple[StageMemory, list[dict[str, int]]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The plan and the memory of each rank, of runs by the same two processes."""
    folder = tmp_path_factory.mktemp("memory")
    jobs, made = Jobs(folder), dict[str, Recipe]()

    def add(name: str, characters: int, *changes: str) -> None:
        given = (*SETTINGS, *changes, f"data.batch={2 * random.randint(3, 5)}", f"data.text={text(folder, characters)}")
        made[name] = recipe(folder, name, *given)
        jobs.add(made[name], memory=str(folder / f"{name}.json"))

    ways = random.sample(("none", "selective", "full"), 3)
    for (name, changes), way in zip(MODELS.items(), ways, strict=True):
        add(name, LARGE, *changes, f"step.checkpointing={way}")
    add("copies", LARGE, *MODELS["gpt"], f"step.checkpointing={ways[0]}", "parallel.shard=1")
    add("vocabulary", LARGE, *MODELS["gpt"], f"step.checkpointing={ways[2]}", "parallel.tensor=2")
    add("block", SMALL, *MODELS["gpt"], f"step.checkpointing={ways[1]}")
    jobs.run(2)
    return {name: (stage_of(one, 2), memories(folder / f"{name}.json", 2)) for name, one in made.items()}


@pytest.mark.parametrize("name", [*MODELS, "copies", "vocabulary", "block"])
def test_each_rank_holds_what_is_planned(name: str, runs: Runs) -> None:
    stage, ranks = runs[name]
    assert (stage.moment.kind == "block") == (name == "block")
    for measured in ranks:
        assert not far(stage, measured), (stage, measured)


def test_errors_in_the_plan_are_noticed(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another ZeRO stage, other checkpointing, and weights that are gathered without a copy beside the shard."""
    for name in MODELS:
        stage, (measured, _) = runs[name]
        assert "state" in far(replace(stage, layout=replace(stage.layout, zero=2)), measured)
        other = "full" if stage.job.checkpointing == "none" else "none"
        assert "saved" in far(replace(stage, job=replace(stage.job, checkpointing=other)), measured)
    right = Group.of
    monkeypatch.setattr(Group, "of", lambda *of: right(*of)._replace(weights=0))
    for name in (*MODELS, "copies"):
        stage, (measured, _) = runs[name]
        assert far(replace(stage), measured) == ["peak"], name

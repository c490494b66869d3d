"""Expert parallelism: two and four processes have parts of the experts, and train as one process with all of them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from many_runs import Jobs, billed, checkpoint, require_close
from mixtures import MIXTURES, padding
from small_runs import log, recipe, require_equal

from asbuilt import InputError, load
from asbuilt.families import read_config
from asbuilt.train import loop
from asbuilt.train.divisible import require_spread
from asbuilt.train.many.group import arranged
from asbuilt.train.recipe import Recipe

WHOLE = ("data.batch=4", "run.validate_every=4")


def drawn() -> dict[str, tuple[str, ...]]:
    """Recipes of the three models, each with one kind of activation checkpointing, in any order."""
    ways = random.sample(("none", "selective", "full"), 3)
    return {
        name: (*WHOLE, *model, f"step.checkpointing={way}", f"step.accumulate={random.choice((1, 2))}")
        for (name, model), way in zip(MIXTURES.items(), ways, strict=True)
    }


def by_kind(file: Path, ranks: int) -> dict[str, int]:
    """Bytes that a rank sends by kind of parallelism, the mean of all: one has more rows for experts than another."""
    found: dict[str, int] = {}
    for rank in range(ranks):
        for name, _, size in json.loads(file.with_suffix(f".{rank}.json").read_text()):
            kind = "expert" if name == "all_to_all_single" else "data"
            found[kind] = found.get(kind, 0) + size
    return {kind: round(size / ranks) for kind, size in found.items() if size}


def require_billed(file: Path, made: Recipe, ranks: int) -> None:
    """Requires the bytes sent to be those of the plan, and of what FSDP pads."""
    found, said = by_kind(file, ranks), billed(made, ranks)
    said["data"] += padding(made, ranks)
    assert found == said


def require_as_one(folder: Path, one: Path) -> None:
    """Requires losses, gradient norms, loads and balances of a run to be those of one process, and the weights."""
    require_close(folder, one)
    assert any("fullest_expert" in line for line in log(folder))
    mine, theirs = load(folder / "model").state_dict(), load(one / "model").state_dict()
    assert mine.keys() == theirs.keys()
    for path, tensor in mine.items():
        assert tensor.sub(theirs[path]).abs().max() < 1e-4, path


def test_two_processes_have_half_of_the_experts_each(tmp_path: Path) -> None:
    jobs, given, made = Jobs(tmp_path), drawn(), {}
    for name, some in given.items():
        loop.run(recipe(tmp_path, f"{name}-one", *some))
        shard = random.choice((0, 1))
        made[name] = recipe(tmp_path, name, *some, "parallel.expert=2", f"parallel.shard={shard}")
        jobs.add(made[name], sent=str(tmp_path / f"{name}.json"))
    stopped = recipe(tmp_path, "stopped", *given["deepseek"], "parallel.expert=2")
    jobs.add(stopped, dies=random.choice((4, 5, 8)))
    jobs.add(stopped, resume=True)
    jobs.add(recipe(tmp_path, "unstopped", *given["deepseek"], "parallel.expert=2"))
    # one process goes on with what two have begun
    begun = recipe(tmp_path, "begun", *given["qwen-moe"])
    jobs.add(recipe(tmp_path, "begun", *given["qwen-moe"], "parallel.expert=2"), dies=4)
    jobs.run(2)
    loop.run(begun, resume=True)
    for name in given:
        require_as_one(tmp_path / name, tmp_path / f"{name}-one")
        require_billed(tmp_path / f"{name}.json", made[name], 2)
    require_close(tmp_path / "begun", tmp_path / "qwen-moe-one")
    require_equal(checkpoint(tmp_path / "stopped", 9), checkpoint(tmp_path / "unstopped", 9))


def test_four_processes_divide_and_copy_experts(tmp_path: Path) -> None:
    given = drawn()
    go_on = recipe(tmp_path, "go-on", *given["mixtral"], "parallel.expert=2")
    (tmp_path / "two").mkdir()
    two = Jobs(tmp_path / "two")
    two.add(go_on, dies=random.choice((4, 5)))
    two.run(2)
    jobs, made = Jobs(tmp_path), {}
    jobs.add(recipe(tmp_path, "go-on", *given["mixtral"], "parallel.expert=4"), resume=True)
    # all weights are divided, or copied, or divided in two copies: each expert by two ranks, on two ranks, or on one
    arrangements = random.sample((("2", "0"), ("2", "1"), ("2", "2")), 3)
    for (name, some), (expert, shard) in zip(given.items(), arrangements, strict=True):
        loop.run(recipe(tmp_path, f"{name}-one", *some))
        made[name] = recipe(tmp_path, name, *some, f"parallel.expert={expert}", f"parallel.shard={shard}")
        jobs.add(made[name], sent=str(tmp_path / f"{name}.json"))
    jobs.run(4)
    for name, one in made.items():
        require_as_one(tmp_path / name, tmp_path / f"{name}-one")
        if one.parallel.shard != 2:  # which no plan has
            require_billed(tmp_path / f"{name}.json", one, 4)
    require_close(tmp_path / "go-on", tmp_path / "mixtral-one")


def test_checkpoints_of_experts_divided_by_columns_too(tmp_path: Path) -> None:
    """Of four processes, by one and by two; of two by four; and by as many as wrote it, bit by bit."""
    name = random.choice(("mixtral", "qwen-moe"))
    some = drawn()[name]
    both = (*some, "parallel.tensor=2", "parallel.expert=2", f"parallel.shard={random.choice((0, 1))}")
    half = (*some, random.choice(("parallel.tensor=2", "parallel.expert=2")))
    loop.run(recipe(tmp_path, "one", *some))
    groups = {number: tmp_path / f"group-{number}" for number in range(3)}
    for folder in groups.values():
        folder.mkdir()
    first, four, last = (Jobs(folder) for folder in groups.values())
    first.add(recipe(tmp_path, "grown", *half), dies=random.choice((4, 5)))
    first.run(2)
    four.add(recipe(tmp_path, "grown", *both), resume=True)
    stopped = recipe(tmp_path, "stopped", *both)
    four.add(stopped, dies=random.choice((4, 5, 8)))
    four.add(stopped, resume=True)
    four.add(recipe(tmp_path, "unstopped", *both))
    four.add(recipe(tmp_path, "halved", *both), dies=random.choice((4, 5)))
    four.run(4)
    shutil.copytree(tmp_path / "halved", tmp_path / "alone")
    last.add(recipe(tmp_path, "halved", *half), resume=True)
    last.run(2)
    loop.run(recipe(tmp_path, "alone", *some), resume=True)
    for folder in ("grown", "stopped", "halved", "alone"):
        require_as_one(tmp_path / folder, tmp_path / "one")
    require_equal(checkpoint(tmp_path / "stopped", 9), checkpoint(tmp_path / "unstopped", 9))


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        (("parallel.expert=3",), 4, r"parallel\.expert: must be a divisor of the 4 ranks"),
        (
            ("parallel.expert=4", "parallel.shard=2"),
            4,
            r"parallel\.expert: .* divisor of the 2 ranks that divide",
        ),
        (("parallel.expert=4", "parallel.tensor=2"), 4, r"parallel\.expert: must be a divisor of the 2 ranks"),
    ],
)
def test_ranks_that_do_not_divide_are_refused(tmp_path: Path, changes: tuple[str, ...], ranks: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        arranged(recipe(tmp_path, "run", "data.batch=4", *changes), ranks)


def test_experts_that_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    sizes = {"hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 11}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2}
    spec = read_config({"model_type": "mixtral", **sizes, **heads, **experts}, "config").spec
    require_spread(spec, 3)
    with pytest.raises(InputError, match=r"parallel\.expert: blocks\.0.*n_experts = 6 must be a multiple"):
        require_spread(spec, 4)
    dense = recipe(tmp_path, "run", *WHOLE, "parallel.expert=2")
    for refuse in (lambda: loop.prepare(dense), lambda: billed(dense, 2)):
        with pytest.raises(InputError, match=r"parallel\.expert: the model has no experts"):
            refuse()
    assert not (tmp_path / "run").exists()

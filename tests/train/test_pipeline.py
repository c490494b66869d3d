"""Pipelines: two and four processes have stages of a model, and train as one process with all of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from many_runs import Jobs, billed, checkpoint, drawn, require_close
from small_runs import recipe, require_equal

from asbuilt import InputError, load
from asbuilt.train import loop
from asbuilt.train.many.group import arranged
from asbuilt.train.recipe import Recipe

WHOLE = ("data.batch=4", "run.validate_every=4", "parallel.shard=1")
GPT = ("model.config.n_layer=5", "model.config.tie_word_embeddings=false")
LLAMA = (
    'model.config={model_type="llama", hidden_size=16, intermediate_size=24, num_hidden_layers=4, '
    "num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8, vocab_size=131}",
)
QWEN = (
    'model.config={model_type="qwen3", hidden_size=16, intermediate_size=24, num_hidden_layers=4, head_dim=6, '
    "num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8, tie_word_embeddings=false}",
    "step.z_loss=0.01",
)
MIXTRAL = (
    'model.config={model_type="mixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=2, head_dim=8, '
    "num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2}"
)
MODELS = {"gpt": GPT, "llama": LLAMA, "qwen": QWEN}
EVEN = MODELS | {"gpt": (*GPT, "model.config.n_layer=4")}  # blocks that two ranks of two stages have equally
TWICE = ("parallel.pipeline=2", "parallel.interleave=2")
BY_COLLECTIVE = {"send": "pipeline", "allreduce": "data"}


def by_kind(file: Path, ranks: int) -> dict[str, int]:
    """Bytes that the busiest rank sends by kind of parallelism."""
    most: dict[str, int] = {}
    for rank in range(ranks):
        found: dict[str, int] = {}
        for name, _, size in json.loads(file.with_suffix(f".{rank}.json").read_text()):
            found[BY_COLLECTIVE[name]] = found.get(BY_COLLECTIVE[name], 0) + size
        most = {kind: max(found.get(kind, 0), most.get(kind, 0)) for kind in {*most, *found}}
    return {kind: size for kind, size in most.items() if size}


def require_as_one(folder: Path, one: Path) -> None:
    """Requires losses and gradient norms of a run to be those of one process, and the weights."""
    require_close(folder, one)
    mine, theirs = load(folder / "model").state_dict(), load(one / "model").state_dict()
    assert mine.keys() == theirs.keys()
    for path, tensor in mine.items():
        assert tensor.sub(theirs[path]).abs().max() < 1e-4, path


def test_two_processes_have_one_stage_each_and_two(tmp_path: Path) -> None:
    once = {name: (some, ("parallel.pipeline=2",)) for name, some in drawn(MODELS, WHOLE, (4, 5)).items()}
    twice = {f"{name}-2": (some, TWICE) for name, some in drawn(EVEN, WHOLE, (4, 6)).items()}
    jobs, given, made = Jobs(tmp_path), once | twice, dict[str, Recipe]()
    for name, (some, ways) in given.items():
        loop.run(recipe(tmp_path, f"{name}-one", *some))
        made[name] = recipe(tmp_path, name, *some, *ways)
        jobs.add(made[name], sent=str(tmp_path / f"{name}.json"))
    stopped, begun = ("gpt", "llama-2"), ("qwen", "gpt-2")
    for name in stopped:
        one = recipe(tmp_path, f"{name}-stopped", *given[name][0], *given[name][1])
        jobs.add(one, dies=random.choice((4, 5, 8)))
        jobs.add(one, resume=True)
    for name in begun:
        jobs.add(recipe(tmp_path, f"{name}-begun", *given[name][0], *given[name][1]), dies=4)
    jobs.run(2)
    for name in given:
        require_as_one(tmp_path / name, tmp_path / f"{name}-one")
        assert by_kind(tmp_path / f"{name}.json", 2) == billed(made[name], 2)
    for name in stopped:
        require_equal(checkpoint(tmp_path / f"{name}-stopped", 9), checkpoint(tmp_path / name, 9))
    for name in begun:  # one process goes on with what two have begun
        loop.run(recipe(tmp_path, f"{name}-begun", *given[name][0]), resume=True)
        require_close(tmp_path / f"{name}-begun", tmp_path / f"{name}-one")


def test_four_processes_have_stages_copies_and_layers(tmp_path: Path) -> None:
    given, made = drawn(MODELS, WHOLE, (4, 5)), dict[str, Recipe]()
    go_on = recipe(tmp_path, "go-on", *given["llama"], "parallel.pipeline=2")
    (tmp_path / "two").mkdir()
    two = Jobs(tmp_path / "two")
    two.add(go_on, dies=random.choice((4, 5)))
    two.run(2)
    jobs = Jobs(tmp_path)
    jobs.add(recipe(tmp_path, "go-on", *given["llama"], "parallel.pipeline=4"), resume=True)
    # four stages; two copies of two; two of layers that two ranks compute together
    more = [("parallel.pipeline=4",), ("parallel.pipeline=2",), ("parallel.pipeline=2", "parallel.tensor=2")]
    cases = {name: (some, one) for (name, some), one in zip(given.items(), random.sample(more, 3), strict=True)}
    # two copies of two ranks with two stages each
    cases["twice"] = ((*given["llama"], "step.accumulate=4"), TWICE)
    for name, (some, one) in cases.items():
        loop.run(recipe(tmp_path, f"{name}-one", *some))
        made[name] = recipe(tmp_path, name, *some, *one)
        jobs.add(made[name], sent=str(tmp_path / f"{name}.json"))
    jobs.run(4)
    for name, one in made.items():
        require_as_one(tmp_path / name, tmp_path / f"{name}-one")
        if one.parallel.tensor == 1:
            assert by_kind(tmp_path / f"{name}.json", 4) == billed(one, 4)
    require_close(tmp_path / "go-on", tmp_path / "llama-one")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("model.config.n_layer=1",), "the model has 1 blocks"),
        (("model.config.tie_word_embeddings=true",), "the head is tied to the embedding"),
        (("step.accumulate=1",), r"step\.accumulate = 1 must be at least as many"),
        (("data.packing=documents",), "without padding alone"),
        (("parallel.shard=0",), r"parallel\.shard must be 1"),
        ((MIXTRAL,), r"blocks\.0.*\(MixtureOfExperts\): stages do not run it"),
    ],
)
def test_what_stages_cannot_train_is_refused_before_it_starts(
    tmp_path: Path, changes: tuple[str, ...], said: str
) -> None:
    made = recipe(tmp_path, "run", *WHOLE, *GPT, "step.accumulate=2", "parallel.pipeline=2", *changes)
    for refuse in (lambda: loop.prepare(made), lambda: billed(made, 2)):
        with pytest.raises(InputError, match=rf"parallel\.pipeline: .*{said}"):
            refuse()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("model.config.n_layer=6",), r"2 ranks x 2 chunks must divide the model's 6 blocks \(got 2; must be 1 or 3\)"),
        (("step.accumulate=3",), r"step\.accumulate = 3 must be a multiple of parallel\.pipeline = 2"),
        (("parallel.pipeline=1",), r"parallel\.pipeline = 1 has no stages"),
    ],
)
def test_chunks_that_do_not_divide_are_refused_before_it_starts(
    tmp_path: Path, changes: tuple[str, ...], said: str
) -> None:
    made = recipe(tmp_path, "run", *WHOLE, *EVEN["gpt"], "step.accumulate=4", *TWICE, *changes)
    for refuse in (lambda: loop.prepare(made), lambda: billed(made, 2)):
        with pytest.raises(InputError, match=rf"parallel\.interleave: {said}"):
            refuse()


def test_ranks_that_no_stages_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"parallel\.pipeline: must be such that tensor x pipeline = 6 divides"):
        arranged(recipe(tmp_path, "run", *WHOLE, "parallel.pipeline=3", "parallel.tensor=2"), 4)

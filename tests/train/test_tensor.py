"""Tensor parallelism: two and four processes compute each layer together as one does alone, and send what is said."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from many_runs import MACHINE, Jobs, billed, checkpoint, drawn, require_close, spec_of
from mixtures import MIXTURES, padding
from small_runs import recipe, require_equal

from asbuilt import InputError, load
from asbuilt.families import read_config
from asbuilt.train import loop
from asbuilt.train.divisible import tensor_share
from asbuilt.train.planned import planned
from asbuilt.train.recipe import Recipe

WHOLE = ("data.batch=4", "run.validate_every=4")
# A vocabulary that is padded to 192, and heads that share keys and values.
LLAMA = (
    'model.config={model_type="llama", hidden_size=16, intermediate_size=24, num_hidden_layers=2, '
    "num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8, vocab_size=131}"
)
# Norms of each head, whose gradients are summed, and a tied head.
QWEN = (
    'model.config={model_type="qwen3", hidden_size=16, intermediate_size=24, num_hidden_layers=3, '
    "num_attention_heads=4, num_key_value_heads=2, head_dim=6, max_position_embeddings=8, tie_word_embeddings=true}"
)
MODELS = {"gpt": (), "llama": (LLAMA,), "qwen": (QWEN, "step.z_loss=0.01")}
BY_GROUP = {"mesh_tensor": "tensor", "mesh_replicate": "data", "mesh_shard": "data"}


MIXED = {name: MIXTURES[name] for name in ("mixtral", "qwen-moe")}


def by_kind(file: Path, ranks: int, alone: str) -> dict[str, int]:
    """Bytes that a rank sends by kind of parallelism, the mean of all; a group of all processes is of `alone`."""
    found: dict[str, int] = {}
    for rank in range(ranks):
        for name, group, size in json.loads(file.with_suffix(f".{rank}.json").read_text()):
            kind = "expert" if name == "all_to_all_single" else BY_GROUP.get(group, alone)
            found[kind] = found.get(kind, 0) + size
    return {kind: round(size / ranks) for kind, size in found.items() if size}


def require_same_model(one: Path, other: Path) -> None:
    """Requires two exported folders to hold the same weights, up to rounding."""
    mine, theirs = load(one).state_dict(), load(other).state_dict()
    assert mine.keys() == theirs.keys()
    for path, tensor in mine.items():
        assert torch.allclose(tensor, theirs[path], atol=1e-4), path


def test_two_processes_compute_each_layer_together(tmp_path: Path) -> None:
    jobs, given, made = Jobs(tmp_path), drawn(MODELS, WHOLE, (1, 2)) | drawn(MIXED, WHOLE, (1, 2)), {}
    for name, some in given.items():
        loop.run(recipe(tmp_path, f"{name}-one", *some))
        made[name] = recipe(tmp_path, name, *some, "parallel.tensor=2")
        jobs.add(made[name], sent=str(tmp_path / f"{name}.json"))
    stopped = recipe(tmp_path, "stopped", *given["llama"], "parallel.tensor=2")
    jobs.add(stopped, dies=random.choice((4, 5, 8)))
    jobs.add(stopped, resume=True)
    # one process goes on with what two have begun, and two with what one has
    begun = ("llama", "mixtral")
    for name in begun:
        jobs.add(recipe(tmp_path, f"{name}-begun", *given[name], "parallel.tensor=2"), dies=4)
    jobs.run(2)
    for name in begun:
        loop.run(recipe(tmp_path, f"{name}-begun", *given[name]), resume=True)
        require_close(tmp_path / f"{name}-begun", tmp_path / f"{name}-one")
    for name in given:
        require_close(tmp_path / name, tmp_path / f"{name}-one")
        assert by_kind(tmp_path / f"{name}.json", 2, "tensor") == billed(made[name], 2)
        require_same_model(tmp_path / name / "model", tmp_path / f"{name}-one" / "model")
    require_equal(checkpoint(tmp_path / "stopped", 9), checkpoint(tmp_path / "llama", 9))


def test_four_processes_divide_layers_and_batches(tmp_path: Path) -> None:
    jobs, given, made = Jobs(tmp_path), drawn(MODELS, WHOLE, (1, 2)), dict[str, Recipe]()
    go_on = recipe(tmp_path, "go-on", *given["llama"], "parallel.tensor=2")
    (tmp_path / "two").mkdir()
    two = Jobs(tmp_path / "two")
    two.add(go_on, dies=random.choice((4, 5)))
    two.run(2)
    jobs.add(go_on, resume=True)
    # weights are divided over the ranks that share batches (0), or copied (1)
    shards = random.sample((0, 1, random.choice((0, 1))), 3)
    more: dict[str, tuple[str, ...]] = {
        name: ("parallel.tensor=2", f"parallel.shard={n}") for name, n in zip(given, shards, strict=True)
    }
    given["wide"] = (*given["gpt"], "model.config.n_head=4")
    more["wide"] = ("parallel.tensor=4", "parallel.vocabulary=false")
    # columns of each expert by two ranks, and half of the experts by two of these pairs, or all by each
    for (name, some), spread in zip(drawn(MIXED, WHOLE, (1, 2)).items(), random.sample((1, 2), 2), strict=True):
        given[name] = some
        more[name] = ("parallel.tensor=2", f"parallel.expert={spread}", f"parallel.shard={random.choice((0, 1))}")
    for name, some in given.items():
        loop.run(recipe(tmp_path, f"{name}-one", *some))
        made[name] = recipe(tmp_path, name, *some, *more[name])
        jobs.add(made[name], sent=str(tmp_path / f"{name}.json"))
    jobs.run(4)
    for name in given:
        require_close(tmp_path / name, tmp_path / f"{name}-one")
        said = billed(made[name], 4)
        if name in MIXED:
            said["data"] += padding(made[name], 2)
        assert by_kind(tmp_path / f"{name}.json", 4, "tensor") == said
        require_same_model(tmp_path / name / "model", tmp_path / f"{name}-one" / "model")
    require_close(tmp_path / "go-on", tmp_path / "llama-one")


GPT_OSS = {"model_type": "gpt_oss", "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
BASE = {"hidden_size": 12, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 40}


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        ({"model_type": "llama", "num_key_value_heads": 3}, 2, r"n_kv_heads = 3 must be a multiple of 2"),
        ({"model_type": "llama", "num_key_value_heads": 1}, 2, r"blocks\.0\..*n_kv_heads = 1 must be a multiple"),
        ({"model_type": "llama", "num_attention_heads": 3}, 2, r"n_heads = 3 must be a multiple of 2"),
        ({"model_type": "llama", "intermediate_size": 15}, 2, r"d_ff = 15 must be a multiple of 2"),
        ({"model_type": "olmo2", "vocab_size": 40}, 2, r"\(Attention\): q_norm is over all heads"),
        (GPT_OSS, 2, r"\(MixtureOfExperts\): each rank would add the biases of its last maps"),
        ({"model_type": "mamba2"}, 2, r"\(Mamba2\): ranks cannot compute it together"),
        ({"model_type": "gptj"}, 2, r"\(Parallel\): ranks cannot compute it together"),
        ({"model_type": "t5"}, 2, r"reads source too"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(config: dict[str, object], ranks: int, said: str) -> None:
    spec = read_config(config if len(config) == 1 else BASE | config, "config").spec
    with pytest.raises(InputError, match=rf"parallel\.tensor: .*{said}"):
        tensor_share(spec, ranks)


def test_a_run_that_cannot_be_divided_is_refused_before_it_starts(tmp_path: Path) -> None:
    made = recipe(tmp_path, "run", *WHOLE, "model.config.n_head=1", "parallel.tensor=2")
    with pytest.raises(InputError, match=r"parallel\.tensor: Attention\.n_heads = 1 must be a multiple of 2"):
        loop.prepare(made)
    with pytest.raises(InputError, match=r"parallel\.tensor: Attention\.n_heads = 1 must be a multiple of 2"):
        billed(made, 2)
    assert not (tmp_path / "run").exists()


def test_a_plan_may_leave_the_vocabulary_whole(tmp_path: Path) -> None:
    made = recipe(tmp_path, "run", *WHOLE, QWEN, "parallel.tensor=2")
    whole = recipe(tmp_path, "run", *WHOLE, QWEN, "parallel.tensor=2", "parallel.vocabulary=false")
    spec = spec_of(made)
    table = 4 * spec.n_vocab * spec.d_model
    one, other = planned(made, spec, MACHINE), planned(whole, spec, MACHINE)
    assert other.state.weights - one.state.weights == table // 2
    # the table's lookups and the gradient at the head, and three numbers a token in the loss
    rows = 4 * 8
    assert billed(made, 2)["tensor"] - billed(whole, 2)["tensor"] == rows * 4 * (2 * spec.d_model + 3)

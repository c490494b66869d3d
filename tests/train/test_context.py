"""Context parallelism: two and four processes have parts of each sequence, and train as one process with all of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from many_runs import Jobs, billed, checkpoint, require_close
from mixtures import DEEPSEEK, MIXTRAL
from small_runs import recipe, require_equal

from asbuilt import InputError, load
from asbuilt.nn.step import DividedStep
from asbuilt.train import loop
from asbuilt.train import recipe as recipes
from asbuilt.train.many.context import Sequences
from asbuilt.train.many.group import arranged

WHOLE = ("data.batch=2", "run.validate_every=4")
# A window within a run of tokens, sinks, heads that share keys and values, experts with biases.
OSS = (
    'model.config={model_type="gpt_oss", hidden_size=16, intermediate_size=12, num_hidden_layers=2, head_dim=8, '
    "num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=3, "
    'max_position_embeddings=16, layer_types=["sliding_attention", "full_attention"]}'
)
# Norms of heads, windows wider than a run of tokens, two RoPEs, a tied head.
GEMMA = (
    'model.config={model_type="gemma3_text", hidden_size=16, intermediate_size=24, num_hidden_layers=3, head_dim=8, '
    "num_attention_heads=4, num_key_value_heads=2, sliding_window=6, max_position_embeddings=16, "
    'layer_types=["sliding_attention", "full_attention", "sliding_attention"]}'
)
LLAMA = (
    'model.config={model_type="llama", hidden_size=16, intermediate_size=24, num_hidden_layers=2, '
    "num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16}"
)
BLOOM = 'model.config={model_type="bloom", hidden_size=16, n_layer=2, n_head=4}'
MODELS = {
    "gpt": (),  # learned positions
    "oss": (OSS, "experts.auxiliary=0.02", "experts.z_loss=0.01", "experts.sequence=0.1"),
    "gemma": (GEMMA, "step.z_loss=0.01"),
    "deepseek": (DEEPSEEK, "experts.bias_rate=0.01"),  # latent attention
    "bloom": (BLOOM,),  # ALiBi
    "llama": (LLAMA, "data.batch=4"),
}
# How four processes are arranged, with the model that they train.
ARRANGED = {
    "context": ("deepseek", ("parallel.context=4",)),
    "copies": ("oss", ("parallel.context=2", "parallel.shard=1")),
    "hsdp": ("gemma", ("parallel.context=2", "parallel.shard=2")),
    "tensor": ("llama", ("parallel.context=2", "parallel.tensor=2")),
    "expert": ("oss", ("parallel.context=2", "parallel.expert=4", "parallel.shard=1")),
    "pipeline": ("llama", ("parallel.context=2", "parallel.pipeline=2", "parallel.shard=1")),
}
BY_COLLECTIVE = {
    "all_gather_into_tensor": "context",
    "reduce_scatter_tensor": "context",
    "all_to_all_single": "expert",
    "send": "pipeline",
}


def drawn(*names: str) -> dict[str, tuple[str, ...]]:
    """Recipes of the models, each with one kind of activation checkpointing, all kinds among three of them."""
    kinds = ("none", "selective", "full")
    ways = random.sample(kinds, 3) + random.choices(kinds, k=len(names))
    return {
        name: (*WHOLE, *MODELS[name], f"step.checkpointing={way}", f"step.accumulate={random.choice((1, 2))}")
        for name, way in zip(names, ways, strict=False)
    }


def by_kind(file: Path, ranks: int) -> dict[str, int]:
    """Bytes that a rank sends by kind of parallelism: the mean of all to experts, else those of the busiest."""
    found: dict[str, list[int]] = {}
    for rank in range(ranks):
        for name, group, size in json.loads(file.with_suffix(f".{rank}.json").read_text()):
            kind = "tensor" if group == "mesh_tensor" else BY_COLLECTIVE.get(name, "data")
            found.setdefault(kind, [0] * ranks)[rank] += size
    return {
        kind: sum(sizes) // ranks if kind == "expert" else max(sizes) for kind, sizes in found.items() if any(sizes)
    }


def require_as_one(folder: Path, one: Path) -> None:
    """Requires losses, gradient norms, loads and balances of a run to be those of one process, and the weights."""
    require_close(folder, one)
    mine, theirs = load(folder / "model").state_dict(), load(one / "model").state_dict()
    assert mine.keys() == theirs.keys()
    for path, tensor in mine.items():
        assert tensor.sub(theirs[path]).abs().max() < 1e-4, path


def test_two_processes_have_half_of_each_sequence(tmp_path: Path) -> None:
    jobs, given, made = Jobs(tmp_path), drawn("oss", "gemma", *random.sample(("gpt", "bloom", "deepseek"), 2)), {}
    for name, some in given.items():
        loop.run(recipe(tmp_path, f"{name}-one", *some))
        made[name] = recipe(tmp_path, name, *some, "parallel.context=2", f"parallel.shard={random.choice((0, 1))}")
        jobs.add(made[name], sent=str(tmp_path / f"{name}.json"))
    again = random.choice(list(given))
    stopped = recipes.loads(recipes.dumps(made[again]), changes=[f"run.out={tmp_path / 'stopped'}"])
    jobs.add(stopped, dies=random.choice((4, 5, 8)))
    jobs.add(stopped, resume=True)
    # one process goes on with what two have begun
    jobs.add(recipe(tmp_path, "begun", *given["gemma"], "parallel.context=2"), dies=4)
    jobs.run(2)
    loop.run(recipe(tmp_path, "begun", *given["gemma"]), resume=True)
    for name in given:
        require_as_one(tmp_path / name, tmp_path / f"{name}-one")
        assert by_kind(tmp_path / f"{name}.json", 2) == billed(made[name], 2)
    require_close(tmp_path / "begun", tmp_path / "gemma-one")
    require_equal(checkpoint(tmp_path / "stopped", 9), checkpoint(tmp_path / again, 9))


def test_four_processes_divide_sequences_beside_all_else(tmp_path: Path) -> None:
    given, made = drawn(*{model for model, _ in ARRANGED.values()}), {}
    given["llama"] = (*given["llama"], "step.accumulate=2")  # one for each stage
    (tmp_path / "two").mkdir()
    two, jobs = Jobs(tmp_path / "two"), Jobs(tmp_path)
    two.add(recipe(tmp_path, "go-on", *given["gemma"], "parallel.context=2"), dies=random.choice((4, 5)))
    two.run(2)
    jobs.add(recipe(tmp_path, "go-on", *given["gemma"], "parallel.context=4"), resume=True)
    for model, some in given.items():
        loop.run(recipe(tmp_path, f"{model}-one", *some))
    for name, (model, ways) in ARRANGED.items():
        made[name] = recipe(tmp_path, name, *given[model], *ways)
        jobs.add(made[name], sent=str(tmp_path / f"{name}.json"))
    jobs.run(4)
    for name, (model, _) in ARRANGED.items():
        require_as_one(tmp_path / name, tmp_path / f"{model}-one")
        assert by_kind(tmp_path / f"{name}.json", 4) == billed(made[name], 4), name
    require_close(tmp_path / "go-on", tmp_path / "gemma-one")


def test_every_rank_computes_as_many_scores_and_all_tokens_are_some_ranks() -> None:
    ranks, run = random.randint(2, 9), random.randint(1, 9)
    found, scores = [], set()
    for rank in range(ranks):
        others = Sequences(dist.GroupMember.NON_GROUP_MEMBER, rank, ranks)  # type: ignore[arg-type]
        step = DividedStep((1, 2 * run), torch.device("cpu"), others=others, length=2 * ranks * run)
        positions = step.positions_BT[0].tolist()
        for tokens, keys in step.runs:
            assert max(positions[tokens]) + 1 == keys.stop
        found += positions
        scores.add(sum((tokens.stop - tokens.start) * keys.stop for tokens, keys in step.runs))
    assert sorted(found) == list(range(2 * ranks * run))
    assert scores == {(2 * ranks + 1) * run**2}  # rather than 4 ranks x run^2 of all keys


MAMBA = 'model.config={model_type="mamba", hidden_size=16, num_hidden_layers=2, state_size=4}'
BERT = (
    'model.config={model_type="bert", hidden_size=16, intermediate_size=24, num_hidden_layers=1, '
    "num_attention_heads=2, max_position_embeddings=8}"
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("data.context=6",), r"data\.context = 6 must be a multiple of 4: each rank has two runs of tokens"),
        (("data.packing=documents",), "without padding alone"),
        (("data.document_mask=true",), "without document_mask"),
        ((MAMBA,), r"blocks\.0.*\(Mamba\): its state, or window, passes from the tokens of one rank"),
        ((BERT, "data.objective=masked"), "of the objective next"),
        ((MIXTRAL, "experts.capacity=1.5"), r"experts\.capacity is of a whole sequence"),
    ],
)
def test_what_ranks_cannot_divide_is_refused_before_it_starts(
    tmp_path: Path, changes: tuple[str, ...], said: str
) -> None:
    made = recipe(tmp_path, "run", *WHOLE, "parallel.context=2", *changes)
    for refuse in (lambda: loop.prepare(made), lambda: billed(made, 2)):
        with pytest.raises(InputError, match=rf"parallel\.context: .*{said}"):
            refuse()


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        (("parallel.context=3",), 4, r"parallel\.context: must be a divisor of the 4 ranks that share batches"),
        (("parallel.context=4", "parallel.tensor=2"), 4, r"parallel\.context: must be a divisor of the 2 ranks"),
        (("parallel.context=2", "data.batch=3"), 4, r"data\.batch: 2 ranks share a batch"),
    ],
)
def test_ranks_that_do_not_divide_sequences_are_refused(
    tmp_path: Path, changes: tuple[str, ...], ranks: int, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        arranged(recipe(tmp_path, "run", *WHOLE, *changes), ranks)

"""Context parallelism: two and four processes have parts of each sequence, and train as one process with all of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from many_runs import Jobs, billed, checkpoint, require_close
from mixtures import DEEPSEEK, MIXTRAL, MIXTURES
from small_runs import recipe, require_equal

from asbuilt import InputError, load
from asbuilt.train import loop
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
MODELS = {
    "gpt": (),  # learned positions
    "oss": (OSS, "experts.auxiliary=0.02", "experts.z_loss=0.01"),
    "gemma": (GEMMA, "step.z_loss=0.01"),
    "deepseek": (DEEPSEEK, "experts.bias_rate=0.01"),  # latent attention
}
BY_COLLECTIVE = {
    "all_gather_into_tensor": "context",
    "reduce_scatter_tensor": "context",
    "all_to_all_single": "expert",
}


def drawn(*names: str) -> dict[str, tuple[str, ...]]:
    """Recipes of the models, each with one kind of activation checkpointing, all kinds among three of them."""
    ways = random.sample(("none", "selective", "full"), 3) + random.choices(("none", "selective", "full"), k=3)
    return {
        name: (*WHOLE, *MODELS[name], f"step.checkpointing={way}", f"step.accumulate={random.choice((1, 2))}")
        for name, way in zip(names, ways, strict=False)
    }


def by_kind(file: Path, ranks: int) -> dict[str, int]:
    """Bytes that a rank sends by kind of parallelism, the mean of all."""
    found: dict[str, int] = {}
    for rank in range(ranks):
        for name, group, size in json.loads(file.with_suffix(f".{rank}.json").read_text()):
            kind = "tensor" if group == "mesh_tensor" else BY_COLLECTIVE.get(name, "data")
            found[kind] = found.get(kind, 0) + size
    return {kind: round(size / ranks) for kind, size in found.items() if size}


def require_as_one(folder: Path, one: Path) -> None:
    """Requires losses, gradient norms, loads and balances of a run to be those of one process, and the weights."""
    require_close(folder, one)
    mine, theirs = load(folder / "model").state_dict(), load(one / "model").state_dict()
    assert mine.keys() == theirs.keys()
    for path, tensor in mine.items():
        assert tensor.sub(theirs[path]).abs().max() < 1e-4, path


def test_two_processes_have_half_of_each_sequence(tmp_path: Path) -> None:
    jobs, given, made = Jobs(tmp_path), drawn(*random.sample(list(MODELS), 4)), {}
    for name, some in given.items():
        loop.run(recipe(tmp_path, f"{name}-one", *some))
        made[name] = recipe(tmp_path, name, *some, "parallel.context=2", f"parallel.shard={random.choice((0, 1))}")
        jobs.add(made[name], sent=str(tmp_path / f"{name}.json"))
    jobs.run(2)
    for name in given:
        require_as_one(tmp_path / name, tmp_path / f"{name}-one")
        print(name, by_kind(tmp_path / f"{name}.json", 2), billed(made[name], 2))
        assert by_kind(tmp_path / f"{name}.json", 2) == billed(made[name], 2)

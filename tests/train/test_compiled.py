"""torch.compile: the same losses as without, all of each block in one graph, and refused where it cannot be."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from small_runs import log, recipe
from torch._dynamo.utils import counters

from asbuilt import InputError
from asbuilt.train import loop, start
from asbuilt.train.recipe import loads

LLAMA = """
[model.config]
model_type = "llama"
hidden_size = 16
num_hidden_layers = 2
num_attention_heads = 2
intermediate_size = 32
max_position_embeddings = 8
"""


def test_a_compiled_run_has_the_losses_of_one_that_is_not(tmp_path: Path) -> None:
    text = recipe(tmp_path, "text").data.text
    changes = [f"data.text={text}", "data.context=8", "data.batch=3", "run.steps=4", "run.log_every=1"]
    changes += ["data.validation=0", f"run.seed={random.randrange(99)}"]
    torch._dynamo.reset()
    counters.clear()
    for way in ("plain", "compiled"):
        told = [f"run.out={tmp_path / way}", f"step.compile={str(way == 'compiled').lower()}"]
        loop.run(loads(LLAMA + "[data]", changes=[*changes, *told]))
    assert counters["stats"]["unique_graphs"] >= 1
    assert not counters["graph_break"]
    one, other = log(tmp_path / "plain"), log(tmp_path / "compiled")
    assert len(one) == len(other) == 4
    for mine, theirs in zip(one, other, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_what_cannot_be_compiled_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"step\.checkpointing: blocks that are compiled"):
        recipe(tmp_path, "run", "step.compile=true", "step.checkpointing=full")
    made = recipe(tmp_path, "run", "step.compile=true")
    mixture = ["model_type=mixtral", "hidden_size=16", "num_attention_heads=2", "num_hidden_layers=1"]
    mixture += ["intermediate_size=16", "num_key_value_heads=1", "num_local_experts=2", "num_experts_per_tok=1"]
    experts = loads(
        "[data]",
        changes=[f"model.config.{one}" for one in mixture]
        + [f"data.text={made.data.text}", "data.context=8", "step.compile=true", f"run.out={tmp_path / 'moe'}"],
    )
    with pytest.raises(InputError, match=r"\(MixtureOfExperts\): its shapes depend on the tokens"):
        loop.run(experts)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError, match=r"step\.compile: there is no C\+\+ compiler"):
        loop.run(made)
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"step\.compile: needs a process alone"):
        start.run(made)

"""Norms by path and samples of a run that several processes divide: those of one process."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from many_runs import Jobs
from small_runs import recipe

from asbuilt import InputError, train

WATCHED = ("data.batch=4", "run.norms_every=3", "run.validate_every=4", "parallel.shard={shard}", "step.accumulate=2")
UNTIED = "model.config.tie_word_embeddings=false"
EXPERTS = (
    'model.config={model_type="mixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=2, '
    "num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, "
    "max_position_embeddings=8, head_dim=8}"
)
KEYS = "k.bias"
SAMPLED = ("run.sample_every=4", "run.prompt=a", "run.sample_tokens=6", "run.sample_temperature=1.5")


def told(folder: Path, key: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]


def test_norms_and_samples_are_those_of_one_process(tmp_path: Path) -> None:
    either = random.choice(("0", "1"))
    ways = {
        "data": ((*SAMPLED,), either),
        "tensor": (("parallel.tensor=2",), either),
        "pipeline": ((UNTIED, "parallel.pipeline=2"), "1"),
        "expert": ((EXPERTS, "parallel.expert=2"), either),
    }
    jobs = Jobs(tmp_path)
    for name, (changes, shard) in ways.items():
        some = [one.format(shard=shard) for one in WATCHED]
        jobs.add(recipe(tmp_path, name, *some, *changes))
        alone = [one for one in changes if not one.startswith("parallel.")]
        train(recipe(tmp_path, f"{name}-one", *some[:-2], some[-1], *alone))
    jobs.run(2)
    for name in ways:
        found, wanted = told(tmp_path / name, "gradients"), told(tmp_path / f"{name}-one", "gradients")
        assert [line["step"] for line in found] == [line["step"] for line in wanted] == [3, 6, 9]
        for mine, theirs in zip(found, wanted, strict=True):
            for key in ("gradients", "updates"):
                assert list(mine[key]) == list(theirs[key])
                # scores of equal shifts are one softmax: a key's bias has no gradient but rounding, which AdamW scales
                own, other = ({path: x for path, x in one[key].items() if KEYS not in path} for one in (mine, theirs))
                assert own == pytest.approx(other, rel=1e-3, abs=1e-5), (name, key)
    samples = [line["sample"] for line in told(tmp_path / "data-one", "sample")]
    assert samples == [line["sample"] for line in told(tmp_path / "data", "sample")]
    assert len(samples) == 2


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "expert"])
def test_samples_of_a_model_that_no_ranks_gather_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"run\.sample_every: samples need ranks that share batches alone"):
        train(recipe(tmp_path, "run", "run.sample_every=2", f"parallel.{kind}=2"))

"""Runs by two and four processes: as one process runs, whatever divides them, and after one is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from many_runs import (
    MACHINE,
    Jobs,
    billed,
    checkpoint,
    ended,
    environment,
    far,
    free_port,
    memories,
    require_close,
    sent,
    spec_of,
    stage_of,
    started,
)
from small_runs import killed_at, log, recipe, require_equal

from asbuilt import InputError, load
from asbuilt.cost import parameters
from asbuilt.train import loop
from asbuilt.train import recipe as recipes
from asbuilt.train.many.group import arranged
from asbuilt.train.planned import planned
from asbuilt.train.settings import CHECKPOINTING
from asbuilt.train.start import run

WHOLE = ("data.batch=4", "run.validate_every=4")
# With two micro-batches, so that a step's peak is in the second, when all gradients are there, as the plan assumes.
LARGER = ("data.batch=8", "data.context=32", "step.accumulate=2", "run.steps=2", "run.validate_every=0")
LARGER = (*LARGER, "model.config.n_embd=64", "model.config.n_head=4", "model.config.n_positions=32")
EXPERTS = (
    'model.config={model_type="mixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=2, '
    "num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, "
    "max_position_embeddings=8, head_dim=8}"
)


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    some = (*WHOLE, f"step.accumulate={random.choice((1, 2))}", f"step.loss_rows={random.choice((0, 5))}")
    some = (*some, f"step.checkpointing={random.choice(('none', 'selective', 'full'))}")
    given = {
        "divided": recipe(tmp_path, "divided", *some),
        "copied": recipe(tmp_path, "copied", *some, "parallel.shard=1"),
        "stopped": recipe(tmp_path, "stopped", *some),
    }
    loop.run(recipe(tmp_path, "one", *some))
    jobs = Jobs(tmp_path)
    for name in ("divided", "copied"):
        jobs.add(given[name], sent=str(tmp_path / f"{name}.json"))
    jobs.add(given["stopped"], dies=random.choice((2, 4, 5, 8)))
    jobs.add(given["stopped"], resume=True)
    # one process goes on with what two have begun, and two with what one has
    begun = recipe(tmp_path, "begun", *some, "optimizer.clip=0.1")
    jobs.add(begun, dies=random.choice((4, 5)))
    jobs.run(2)
    for name in ("divided", "copied"):
        require_close(tmp_path / name, tmp_path / "one")
    require_equal(checkpoint(tmp_path / "divided", 9), checkpoint(tmp_path / "stopped", 9))
    assert log(tmp_path / "divided") == log(tmp_path / "stopped")
    loop.run(begun, resume=True)
    loop.run(recipe(tmp_path, "one-clipped", *some, "optimizer.clip=0.1"))
    require_close(tmp_path / "begun", tmp_path / "one-clipped")
    for name in ("divided", "copied"):
        made = load(tmp_path / name / "model").state_dict()
        whole_model = load(tmp_path / "one" / "model").state_dict()
        assert made.keys() == whole_model.keys()
        for path, tensor in made.items():
            assert torch.allclose(tensor, whole_model[path], atol=1e-4), path
    gradients = 4 * sum(parameters(spec_of(given["copied"])).values())
    for name in ("divided", "copied"):
        plan = planned(
            recipes.loads(recipes.dumps(given[name]), changes=["parallel.ranks=2"]),
            spec_of(given[name]),
            MACHINE,
        )
        total = sent(tmp_path / f"{name}.json")
        assert sum(total.values()) == plan.trial.step.communication["data"].bytes
    assert sent(tmp_path / "copied.json")["allreduce"] == gradients  # 2 (n-1)/n of them


def test_four_processes_go_on_with_what_others_have_begun(tmp_path: Path) -> None:
    balanced = ("experts.z_loss=0.01",)
    loop.run(recipe(tmp_path, "one", *WHOLE))
    loop.run(recipe(tmp_path, "one-experts", *WHOLE, EXPERTS, *balanced))
    from_one = recipe(tmp_path, "from-one", *WHOLE)
    killed_at(from_one, 4)
    jobs = Jobs(tmp_path)
    jobs.add(from_one, resume=True)
    hybrid = recipe(tmp_path, "hybrid", *WHOLE, "parallel.shard=2")
    jobs.add(hybrid, sent=str(tmp_path / "hybrid.json"))
    jobs.add(recipe(tmp_path, "experts", *WHOLE, EXPERTS, *balanced))
    held = recipe(tmp_path, "held", *LARGER, "parallel.shard=2", f"step.checkpointing={random.choice(CHECKPOINTING)}")
    jobs.add(held, memory=str(tmp_path / "held.json"))
    jobs.run(4)
    for rank in memories(tmp_path / "held.json", 4):
        assert not far(stage_of(held, 4), rank), (held.step.checkpointing, rank)
    require_close(tmp_path / "from-one", tmp_path / "one")
    require_close(tmp_path / "hybrid", tmp_path / "one")
    assert sum(sent(tmp_path / "hybrid.json").values()) == billed(hybrid, 4)["data"]
    require_close(tmp_path / "experts", tmp_path / "one-experts")


def test_a_lost_process_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    made = recipe(tmp_path, "run", *WHOLE, "run.steps=2000", "run.save_every=5", "run.validate_every=0")
    file, folder = tmp_path / "recipe.toml", tmp_path / "run"
    file.write_text(recipes.dumps(made), encoding="utf-8")
    command = ["-m", "asbuilt", "train", str(file)]
    processes = started([sys.executable, *command], 2)
    reach(folder, 7, processes)
    processes[1].kill()
    (code, said), _ = ended(processes)
    assert code == 2
    assert "another process of the run was lost in step" in said
    assert "the last checkpoint is" in said
    assert "Traceback" not in said
    # torchrun starts both again, and they go on by themselves
    begun = log(folder)[-1]["step"]
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", *where]
    torchrun = subprocess.Popen([*agent, *command, "--resume"], env=environment(), text=True, stderr=subprocess.PIPE)
    try:
        reach(folder, begun + 6, [torchrun])
        os.kill(random.choice(children(torchrun.pid)), signal.SIGKILL)
        reach(folder, log(folder)[-1]["step"] + 6, [torchrun])
    finally:
        torchrun.terminate()
        ended([torchrun])
    steps = [line["step"] for line in lines(folder)]
    assert steps == list(range(1, len(steps) + 1))
    killed_at(recipe(tmp_path, "one", *WHOLE, "run.steps=2000", "run.validate_every=0"), len(steps))
    for mine, theirs in zip(lines(folder), lines(tmp_path / "one"), strict=False):
        assert mine == pytest.approx(theirs, abs=1e-4)


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of a log that tell losses of training."""
    return [line for line in log(folder) if "loss" in line]


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def reach(folder: Path, step: int, processes: list[subprocess.Popen[str]]) -> None:
    """Waits until a run has logged a step."""
    until = time.monotonic() + 120
    while not (folder / "log.jsonl").exists() or not (lines := whole_lines(folder)) or lines[-1]["step"] < step:
        assert time.monotonic() < until
        for one in processes:
            assert one.poll() is None, one.communicate()[1][-3000:]
        time.sleep(0.05)


def whole_lines(folder: Path) -> list[dict[str, int]]:
    text = (folder / "log.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        (("data.batch=6",), 4, r"data\.batch: 4 ranks share a batch equally .*multiple of 4"),
        (("parallel.shard=3",), 4, r"parallel\.shard: must be 0 or a divisor of the 4 ranks"),
        (("parallel.tensor=3",), 4, r"parallel\.tensor: must be a divisor of the 4 ranks"),
        (
            ("parallel.tensor=2", "parallel.shard=4"),
            4,
            r"parallel\.shard: must be 0 or a divisor of the 2 data-parallel",
        ),
        (("parallel.ranks=8",), 4, r"parallel\.ranks: torchrun has started 4"),
        (("optimizer.name=adafactor",), 4, r"optimizer\.name: not for many ranks .*adamw or sgd"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    tmp_path: Path, changes: tuple[str, ...], ranks: int, said: str
) -> None:
    whole = arranged(recipe(tmp_path, "run", "data.batch=4"), 4)
    assert (whole.replicate, whole.shard) == (1, 4)
    with pytest.raises(InputError, match=said):
        arranged(recipe(tmp_path, "run", "data.batch=4", *changes), ranks)


def test_a_process_alone_refuses_what_needs_others(tmp_path: Path) -> None:
    for name in ("ranks", "shard", "tensor", "pipeline", "expert"):
        with pytest.raises(InputError, match=rf"parallel\.{name}: this process is alone.*torchrun --nproc-per-node 2"):
            run(recipe(tmp_path, "run", f"parallel.{name}=2"))


def test_the_plan_of_many_ranks(tmp_path: Path) -> None:
    made = recipe(tmp_path, "run", "data.batch=4", "parallel.ranks=4")
    spec = spec_of(made)
    whole_plan, one = planned(made, spec, MACHINE), planned(recipe(tmp_path, "run", "data.batch=4"), spec, MACHINE)
    assert whole_plan.trial.layout.gpus == 4
    assert whole_plan.tokens == one.tokens
    assert whole_plan.state.total == pytest.approx(one.state.total / 4, rel=0.05)
    halves = planned(recipe(tmp_path, "run", "data.batch=4", "parallel.ranks=4", "parallel.shard=2"), spec, MACHINE)
    assert halves.trial.layout.hsdp == 2
    assert halves.state.total == pytest.approx(one.state.total / 2, rel=0.05)
    with pytest.raises(InputError, match=r"parallel\.shard: must be 0 or a divisor of 4"):
        planned(recipe(tmp_path, "run", "data.batch=4", "parallel.ranks=4", "parallel.shard=3"), spec, MACHINE)

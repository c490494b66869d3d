"""Optimizer state in host memory: the same run bit by bit, state where it should be; refused where nothing is saved."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from many_runs import checkpoint
from small_runs import Killed, killed_at, log, recipe, require_equal, state
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from asbuilt import InputError, decoder
from asbuilt.catalog import machines
from asbuilt.plan.train import train
from asbuilt.train import loop, start
from asbuilt.train.many import loop as many
from asbuilt.train.offload import Offloaded
from asbuilt.train.planned import planned

NAMES = ("adamw", "adamw-8bit", "adafactor", "sgd", "muon")


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the processor count as a device beside the host."""
    monkeypatch.setattr(loop, "require_apart", lambda device: None)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_equal_bit_by_bit_and_goes_on_so(tmp_path: Path, name: str) -> None:
    changes = (f"optimizer.name={name}", "optimizer.clip=0.1", f"run.seed={random.randrange(99)}")
    loop.run(recipe(tmp_path, "here", *changes))
    stopped = recipe(tmp_path, "there", *changes, "step.offload=true")
    killed_at(stopped, random.randrange(4, 8))
    loop.run(stopped, resume=True)
    require_equal(state(tmp_path / "here", 9), state(tmp_path / "there", 9))
    assert log(tmp_path / "here") == log(tmp_path / "there")


@pytest.mark.usefixtures("apart")
def test_a_run_of_dtensors_is_equal_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In FSDP2's own tensors, of one process; it goes on from a distributed checkpoint."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    stopped = recipe(tmp_path, "there", "step.offload=true")

    def report(at: loop.Progress) -> None:
        if at.step == 7:
            raise Killed

    try:
        many.run(recipe(tmp_path, "here"))
        with pytest.raises(Killed):
            many.run(stopped, report=report)
        many.run(stopped, resume=True)
    finally:
        torch.distributed.destroy_process_group()
    require_equal(checkpoint(tmp_path / "here", 9), checkpoint(tmp_path / "there", 9))
    assert log(tmp_path / "here") == log(tmp_path / "there")


def test_state_lies_on_the_host_and_weights_where_they_were() -> None:
    """On a device that this PyTorch has no kernels for, by a process that names one."""
    worker = Path(__file__).with_name("offload_worker.py")
    ran = subprocess.run([sys.executable, worker], capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    device = {"weights": ["npy"], "gradients": ["npy"], "owners": ["npy"]}
    assert found.pop("without") == {"state": ["npy"], **device}
    assert found == {name: {"state": ["cpu"], **device} for name in ("adamw", "sgd", "muon")}


def test_copies_follow_the_weights() -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    found = Offloaded([weight])
    (copy,) = found.originals
    assert torch.equal(copy, weight)
    assert copy.data_ptr() != weight.data_ptr()
    weight.grad = torch.randn(3)
    found.bring()
    assert copy.grad is not None
    assert torch.equal(copy.grad, weight.grad)
    weight.grad = None
    found.bring()
    assert copy.grad is None


def test_a_run_on_the_processor_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"step\.offload: .*whose memory is the host's"):
        start.run(recipe(tmp_path, "run", "step.offload=true"))
    with pytest.raises(InputError, match=r"step\.offload: .*whose memory is the host's"):
        planned(
            recipe(tmp_path, "run", "step.offload=true"),
            decoder(d_model=8, n_layers=1, n_heads=1),
            machines.find("epyc-9654"),
        )


def test_a_recipe_and_a_plan_offload_alike(tmp_path: Path) -> None:
    spec, gpu = decoder(d_model=64, n_layers=2, n_heads=2, n_vocab=97, max_positions=8), machines.find("h100-sxm")
    plain, kept = (planned(recipe(tmp_path, "run", f"step.offload={on}"), spec, gpu) for on in ("false", "true"))
    state = 2 * 4 * plain.parameters  # two float32 moments
    assert plain.per_device_bytes - kept.per_device_bytes == state
    assert kept.trial.step.communication["offload"].bytes == state  # float32 gradients there, weights back


def test_a_plan_offloads_where_there_is_other_memory() -> None:
    with pytest.raises(InputError, match=r"offload: .*no memory beside the host's"):
        train(decoder(d_model=64, n_layers=1, n_heads=2), machines.find("epyc-9654"), offload="optimizer")

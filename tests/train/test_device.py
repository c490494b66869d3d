"""The device of a run: the processor, and GPUs that a faked torch.cuda reports."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import killed_at, recipe, require_equal, state
from torch import Tensor

from asbuilt import InputError, build, decoder
from asbuilt.train import loop
from asbuilt.train import state as states
from asbuilt.train.batch import moved
from asbuilt.train.device import HOST, device_of
from asbuilt.train.optimizer import optimizers
from asbuilt.train.settings import Loop, Optimizer


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> int:
    """Has torch say that there are GPUs: how many; `set_device` takes them as it would."""
    count = random.randrange(2, 9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: monkeypatch.setenv("CURRENT", str(number)))
    return count


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without GPUs")
def test_without_gpus_a_run_is_on_the_processor() -> None:
    for alone in (True, False):
        assert device_of("auto", alone=alone) == device_of("cpu", alone=alone) == HOST
    for name in ("cuda", "cuda:1"):
        with pytest.raises(InputError, match=rf"run\.device: not on this machine .*'{name}'; must be auto or cpu"):
            device_of(name)


def test_a_process_alone_has_the_gpu_that_it_names(cards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")  # of a torchrun with one process
    number = random.randrange(cards)
    for name, found in (("auto", 0), ("cuda", 0), (f"cuda:{number}", number)):
        assert device_of(name) == torch.device("cuda", found)
        assert os.environ["CURRENT"] == str(found)
    assert device_of("cpu") == HOST
    with pytest.raises(InputError, match=rf"run\.device: not on .*'cuda:{cards}'; .* cuda:{cards - 1}\)"):
        device_of(f"cuda:{cards}")


def test_each_process_of_many_has_the_gpu_of_its_number(cards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    number = random.randrange(cards)
    monkeypatch.setenv("LOCAL_RANK", str(number))
    for name in ("auto", "cuda"):
        assert device_of(name, alone=False) == torch.device("cuda", number)
    assert device_of("cpu", alone=False) == HOST
    with pytest.raises(InputError, match=r"run\.device: each process .* auto, cpu or cuda under torchrun"):
        device_of("cuda:0", alone=False)
    monkeypatch.setenv("LOCAL_RANK", str(cards))
    with pytest.raises(InputError, match=rf"process {cards} .* there are {cards} .*run\.device=cpu"):
        device_of("auto", alone=False)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "mps", ""])
def test_what_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"run\.device: must be auto, cpu, cuda or cuda:N"):
        Loop(device=name)


def test_the_model_and_what_is_restored_go_to_the_device(tmp_path: Path) -> None:
    """On the meta device, which keeps names and no numbers."""
    run = loop.prepare(recipe(tmp_path, "run"), device=torch.device("meta"))
    assert {one.device.type for one in run.model.parameters()} == {run.model.device.type} == {"meta"}
    spec = decoder(d_model=8, n_layers=1, n_heads=1, n_vocab=11)
    names: tuple[tuple[Any, str], ...] = (("adamw", "meta"), ("adafactor", "cpu"))  # whose kernel counts steps
    for name, counts in names:
        here, there = build(spec), build(spec, device="meta")
        made, restored = (optimizers(one, Optimizer(name=name)) for one in (here, there))
        for one in here.parameters():
            one.grad = torch.randn_like(one)
        made.step()
        paths: dict[Tensor, str] = {one: path for path, one in here.named_parameters()}
        held, others = {paths[one]: state for one, state in made.states()}, dict(there.named_parameters())
        restored.restore({others[path]: state for path, state in held.items()})
        for _, found in restored.states():
            assert {key: value.device.type for key, value in found.items() if isinstance(value, Tensor)} == {
                key: counts if key == "step" else "meta" for key in found
            }


def test_batches_are_pinned_for_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    tensor = torch.zeros(3)
    assert moved(tensor, "meta").device.type == "meta"
    monkeypatch.setattr(Tensor, "pin_memory", lambda one: told.append("pinned") or one)
    monkeypatch.setattr(Tensor, "to", lambda one, *where, **how: told.append((*where, how)) or one)
    moved(tensor, torch.device("cuda", 1))
    assert told == ["pinned", (torch.device("cuda", 1), {"non_blocking": True})]


def test_the_random_state_of_the_gpu_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given, device = torch.arange(5, dtype=torch.uint8), torch.device("cuda", 3)
    restored: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda of: given if of == device else None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda said, of: restored.append((said, of)))
    found = dict(states._random_state(device))
    assert dict(states._random_state(HOST)).keys() == {"random state of cpu"} < found.keys()
    states._restore_random(found, HOST)
    assert not restored
    states._restore_random(found, device)
    assert restored == [(given, device)]


def test_a_run_may_go_on_elsewhere(tmp_path: Path) -> None:
    loop.run(recipe(tmp_path, "plain"))
    killed_at(recipe(tmp_path, "run", "run.device=auto"), 7)
    loop.run(recipe(tmp_path, "run", "run.device=cpu"), resume=True)
    require_equal(state(tmp_path / "plain", 9), state(tmp_path / "run", 9))

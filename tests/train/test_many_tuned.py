"""Adapters and preferences by two processes: as one trains them, from checkpoints that hold the adapters alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import small_chats
import torch
from many_runs import Jobs, checkpoint, require_close
from safetensors.torch import load_file
from small_runs import log, require_equal

from asbuilt import InputError
from asbuilt.train import loop
from asbuilt.train.recipe import Recipe
from asbuilt.train.start import run


def test_two_processes_tune_as_one(tmp_path: Path) -> None:
    """Adapters by chats and by preferences, all weights by preferences; two go on with what two have begun, and one."""
    files = {"chat": small_chats.chats(tmp_path, 9), "preferences": small_chats.preferences(tmp_path, 9)}
    usual = ("run.steps=8", "data.batch=2", f"step.accumulate={random.choice((1, 2))}")

    def made(out: str, data: str, *more: str, kind: str = "lora") -> Recipe:
        return small_chats.recipe(tmp_path, out, f"data.{data}={files[data]}", *usual, *more, kind=kind)

    kinds = {"chat": ("chat", "lora"), "pairs": ("preferences", "lora"), "whole": ("preferences", "full")}
    jobs = Jobs(tmp_path)
    for name, (data, kind) in kinds.items():
        loop.run(made(f"{name}-one", data, kind=kind))
        shard = random.choice((0, 1))
        jobs.add(made(f"{name}-two", data, f"parallel.shard={shard}", kind=kind))
    stopped, begun = made("stopped", "chat"), made("begun", "chat")
    jobs.add(made("unstopped", "chat"))
    jobs.add(stopped, dies=random.choice((3, 5)))
    jobs.add(stopped, resume=True)
    jobs.add(begun, dies=4)
    jobs.run(2)
    for name, (_, kind) in kinds.items():
        require_close(tmp_path / f"{name}-two", tmp_path / f"{name}-one")
        if kind == "lora":
            one, two = (load_file(tmp_path / f"{name}-{n}/adapter/adapter_model.safetensors") for n in ("one", "two"))
            assert one.keys() == two.keys()
            assert all(torch.allclose(tensor, two[path], atol=1e-4) for path, tensor in one.items())
    assert all("lora" in path for path in checkpoint(tmp_path / "chat-two", 8))
    require_equal(checkpoint(tmp_path / "stopped", 8), checkpoint(tmp_path / "unstopped", 8))
    assert log(tmp_path / "stopped") == log(tmp_path / "unstopped")
    loop.run(begun, resume=True)
    require_close(tmp_path / "begun", tmp_path / "chat-one")


REFUSED = {
    "qlora": ("qlora", [], r"tune\.kind: needs a process alone"),
    "layers": ("lora", ["parallel.tensor=2"], r"parallel\.tensor: adapters and preferences are divided by data alone"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_many_do_not_tune_is_refused(tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, changes, said = REFUSED[wrong]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=said):
        run(small_chats.recipe(tmp_path, "run", *changes, kind=kind))

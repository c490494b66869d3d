"""A small run: a drawn text, and the recipe of a model that takes a moment."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from asbuilt.train import loop
from asbuilt.train.recipe import Recipe, read

TINY = ("model.config.n_layer=2", "model.config.n_embd=16", "model.config.n_head=2", "model.config.n_positions=8")
QUICK = ("data.context=8", "data.batch=3", "run.steps=9", "run.save_every=3", "run.validate_every=4", "run.log_every=1")


def text(folder: Path, characters: int = 900) -> Path:
    file = folder / "text.txt"
    file.write_text("".join(random.choices("abcdefé€ \n", k=characters)), encoding="utf-8")
    return file


def recipe(folder: Path, out: str, *changes: str) -> Recipe:
    """The shipped character model, smaller; the text is drawn once for a folder."""
    file = folder / "text.txt"
    file = file if file.exists() else text(folder)
    return read("characters", [*TINY, *QUICK, f"data.text={file}", f"run.out={folder / out}", *changes])


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


def killed_at(made: Recipe, step: int, *, resume: bool = False) -> None:
    """Runs until a step is reported, and dies there."""

    def report(at: loop.Progress) -> None:
        if at.step == step:
            raise Killed

    try:
        loop.run(made, resume=resume, report=report)
    except Killed:
        return
    raise AssertionError("it ended before that step")


def state(folder: Path, step: int) -> dict[str, Tensor]:
    """Every tensor of a checkpoint."""
    at = folder / "checkpoints" / f"step-{step:08d}"
    return load_file(at / "weights.safetensors") | load_file(at / "optimizer.safetensors")


def require_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Requires the same tensors, bit by bit."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a log without times."""
    timed = ("tokens_per_second", "seconds_left", "mfu")
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]

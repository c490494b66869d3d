"""Which precision a run's products have: as asked, or the faster one, which is said, kept, and trains as well."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from small_runs import recipe as recipe_for

from asbuilt.catalog.machine import Machine
from asbuilt.errors import InputError
from asbuilt.train import loop, precision, start
from asbuilt.train.loop import Progress, run
from asbuilt.train.planned import likely, planned


def timed(monkeypatch: pytest.MonkeyPatch, wide: float, narrow: float) -> None:
    """Has passes take so many seconds."""
    took = {None: wide, torch.bfloat16: narrow}
    monkeypatch.setattr(precision, "narrow_products", lambda device: True)
    monkeypatch.setattr(precision, "_seconds", lambda model, batch, recipe, dtype: took[dtype])


@pytest.mark.parametrize("wanted", ["fp32", "bf16"])
def test_the_faster_one_is_chosen_said_and_kept(wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = 2.0 + random.random(), 1.0
    timed(monkeypatch, *((fast, slow) if wanted == "fp32" else (slow, fast)))
    recipe = recipe_for(tmp_path, "run", "step.precision=auto", "run.steps=4", "run.save_every=2")
    heard: list[Progress] = []
    run(recipe, report=heard.append)
    (said,) = [one.precision for one in heard if one.precision is not None]
    assert said.startswith(f"{wanted}: ")
    assert "in bf16" in said
    assert f'precision = "{wanted}"' in (tmp_path / "run" / "recipe.toml").read_text()
    asked = recipe_for(tmp_path, "asked", f"step.precision={wanted}", "run.steps=4")
    assert losses(run(asked).folder) == losses(tmp_path / "run")


def test_a_resumed_run_keeps_what_it_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, 2.0, 1.0)
    recipe = recipe_for(tmp_path, "run", "step.precision=auto", "run.steps=4", "run.save_every=2")
    run(recipe)
    for left in sorted((tmp_path / "run" / "checkpoints").iterdir())[1:]:
        for file in left.iterdir():
            file.unlink()
        left.rmdir()
    whole = losses(tmp_path / "run")
    timed(monkeypatch, 1.0, 2.0)  # now float32 would be
    run(recipe, resume=True)
    assert losses(tmp_path / "run") == whole


def test_without_instructions_nothing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "narrow_products", lambda device: False)
    monkeypatch.setattr(precision, "_seconds", lambda *_: pytest.fail("timed"))
    made = loop.prepare(recipe_for(tmp_path, "run", "step.precision=auto"))
    assert made.recipe.step.precision == "fp32"
    assert made.precision == "fp32: this processor has no instructions for bfloat16"


def test_timing_changes_nothing(tmp_path: Path) -> None:
    made = loop.prepare(recipe_for(tmp_path, "run"))
    before, drawn = [p.detach().clone() for p in made.model.parameters()], torch.get_rng_state()
    chosen, why = precision.faster(made.model, made.data.batch(0), made.recipe)
    assert chosen in ("fp32", "bf16")
    assert why
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))
    assert all(p.grad is None for p in made.model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_the_dry_run_names_the_likely_one(tmp_path: Path) -> None:
    recipe = recipe_for(tmp_path, "run", "step.precision=auto")
    for rates, wanted in (({"fp32": 1e11, "bf16": 6e11}, "bf16"), ({"fp32": 1e11}, "fp32")):
        machine = Machine(name="here", memory_gb=64, bandwidth=1e10, rates=rates)
        assert likely(recipe, machine) == wanted


def test_the_time_in_bf16_is_that_of_its_rate(tmp_path: Path) -> None:
    """Where products are all that takes time, a rate six times as high takes a sixth of it."""
    recipe = recipe_for(tmp_path, "run")
    spec = loop.described(recipe, 99).spec
    machine = Machine(name="here", memory_gb=64, bandwidth=1e18, rates={"fp32": 1e9, "bf16": 6e9})
    wide, narrow = (planned(recipe, spec, machine, narrow=one).trial.step.seconds for one in (False, True))
    assert 4.0 < wide / narrow < 7.0


def test_processes_that_share_a_run_are_told_to_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would time for itself."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError) as caught:
        start.run(recipe_for(tmp_path, "run", "step.precision=auto"))
    assert caught.value.field == "step.precision"


def losses(folder: Path) -> list[float]:
    lines = (json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]

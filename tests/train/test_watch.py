"""What looks at a run: bits per byte, MFU, norms by path, samples, the plot, and trackers that are only asked for."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import log, recipe, require_equal, state
from torch.utils.flop_counter import FlopCounterMode

from asbuilt import InputError, train
from asbuilt.train import loop, rate


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_the_rate_of_products_is_what_pytorch_counts_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which every product takes three seconds, one of them two."""
    n = random.randrange(20, 60)
    seconds = [3.0] * rate.TIMES
    seconds[random.randrange(rate.TIMES)] = 2.0
    readings = iter([reading for i, took in enumerate(seconds) for reading in (10.0 * i, 10.0 * i + took)])
    monkeypatch.setattr(rate, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    monkeypatch.setattr(rate, "SIZE", {"cpu": n})
    with FlopCounterMode(display=False) as counter:
        found = rate.matrix_rate.__wrapped__("cpu", torch.float32)
    assert found == counter.get_total_flops() / rate.TIMES / 2.0


def test_bits_per_byte_are_those_of_the_text(tmp_path: Path) -> None:
    """The loss of all validated characters in bits, over their bytes in UTF-8, which are counted in the text here."""
    train(recipe(tmp_path, "run"))
    (*_, last) = [line for line in lines(tmp_path / "run") if "validation" in line]
    text = (tmp_path / "text.txt").read_text(encoding="utf-8")
    held_out = text[len(text) - int(len(text) * 0.1) :]
    targets = held_out[1 : 1 + (len(held_out) - 1) // 8 * 8]
    nbytes = len(targets.encode())
    assert nbytes > len(targets)
    assert last["bits_per_byte"] == pytest.approx(last["validation"] * len(targets) / math.log(2) / nbytes, rel=1e-9)


def test_mfu_is_counted_flops_over_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPT-2: 6 FLOPs a weight of each product and 12 L d T for scores, per token (Chowdhery et al. 2022)."""
    monkeypatch.setattr(loop, "matrix_rate", lambda *_: 1e9)
    train(recipe(tmp_path, "run"))
    (*_, last) = [line for line in lines(tmp_path / "run") if "loss" in line]
    n_vocab = len(set((tmp_path / "text.txt").read_text(encoding="utf-8")))
    document = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert document["vocab_size"] >= n_vocab
    width, n_layers, context = 16, 2, 8
    weights = n_layers * 12 * width**2 + width * document["vocab_size"]
    per_token = 6 * weights + 12 * n_layers * width * context
    assert last["mfu"] == pytest.approx(per_token * last["tokens_per_second"] / 1e9, rel=1e-6)


def test_the_rate_of_products_is_a_rate() -> None:
    rate.matrix_rate.cache_clear()
    found = rate.matrix_rate("cpu", torch.float32)
    assert 1e7 < found < 1e16


def test_norms_by_path(tmp_path: Path) -> None:
    """SGD without momentum or decay moves each weight by lr times its gradient."""
    plain = ["optimizer.name=sgd", "optimizer.betas=[0.0, 0.0]", "optimizer.weight_decay=0.0", "optimizer.clip=0.0"]
    made = recipe(tmp_path, "run", "run.norms_every=4", "run.log_every=9", "schedule.warmup=0", *plain)
    before: dict[str, float] = {}

    def report(at: loop.Progress) -> None:
        if at.step == 3 or (at.step == 0 and not before):
            before.update({path: float(p.detach().norm()) for path, p in one.run.model.named_parameters()})

    one = loop.Loop(loop.prepare(made), report)
    one.finish()
    told = [line for line in lines(tmp_path / "run") if "gradients" in line]
    assert [line["step"] for line in told] == [4, 8]
    for line in told:
        assert line["gradients"].keys() == line["updates"].keys() == before.keys()
        assert math.sqrt(sum(g**2 for g in line["gradients"].values())) == pytest.approx(
            line["gradient_norm"], rel=1e-4
        )
    assert any(one["updates"][path] > 0 for one in told for path in before)
    path = random.choice([path for path in before if path.endswith("up.weight")])
    parameter = dict(one.run.model.named_parameters())[path]
    line = told[-1]  # the weight has hardly moved in a step since
    assert line["updates"][path] * float(parameter.detach().norm()) == pytest.approx(
        line["lr"] * line["gradients"][path], rel=1e-2
    )


def test_watching_changes_nothing_and_is_free_on_resume(tmp_path: Path) -> None:
    train(recipe(tmp_path, "plain"))
    watched = ["run.norms_every=2", "run.sample_every=3", "run.prompt=a", "run.sample_tokens=5", "run.plot=svg"]
    train(recipe(tmp_path, "watched", *watched))
    require_equal(state(tmp_path / "plain", 9), state(tmp_path / "watched", 9))
    samples = [line for line in lines(tmp_path / "watched") if "sample" in line]
    assert [line["step"] for line in samples] == [3, 6, 9]
    assert all(isinstance(line["sample"], str) for line in samples)
    picture = (tmp_path / "watched" / "training.svg").read_text()
    assert "learning rate" in picture
    assert "validation" in picture
    train(recipe(tmp_path, "plain", "run.norms_every=1"), resume=True)
    assert log(tmp_path / "plain")[-1]["step"] == 9


def test_trackers_get_the_numbers_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float, int]] = []
    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = lambda _: SimpleNamespace(add_scalar=lambda *one: told.append(one))  # type: ignore[attr-defined]
    started = SimpleNamespace(log=lambda said, step: told.extend((f"w/{k}", v, step) for k, v in said.items()))
    wandb = ModuleType("wandb")
    wandb.init = lambda **_: started  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train(recipe(tmp_path, "run", "run.tensorboard=true", "run.wandb=project"))
    wanted = [(line["step"], line["loss"]) for line in lines(tmp_path / "run") if "loss" in line]
    for prefix in ("", "w/"):
        assert [(step, value) for name, value, step in told if name == f"{prefix}loss"] == wanted
    assert {step for name, _, step in told if name == "validation"} == {0, 4, 8, 9}


@pytest.mark.parametrize(
    ("change", "module", "said"),
    [
        ("run.plot=png", "matplotlib", r"run\.plot: needs matplotlib.*asbuilt\[plots\]"),
        ("run.tensorboard=true", "torch.utils.tensorboard", r"run\.tensorboard: needs .*pip install tensorboard"),
        ("run.wandb=mine", "wandb", r"run\.wandb: needs wandb.*pip install wandb"),
    ],
)
def test_what_is_not_installed_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, module: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=said):
        train(recipe(tmp_path, "run", change))
    assert not (tmp_path / "run").exists()


def test_samples_of_what_writes_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.sample_every: .*trains no language model"):
        train(recipe(tmp_path, "run", "data.objective=masked", "run.sample_every=2"))
    with pytest.raises(InputError, match=r"run\.plot: must be"):
        recipe(tmp_path, "run", "run.plot=gif")
    with pytest.raises(InputError, match=r"run\.prompt: empty"):
        recipe(tmp_path, "run", "run.sample_every=1", "run.prompt=''")

"""A run: resuming is never having stopped, what is exported is loaded by others, and what stops it is said."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import small_runs
import torch
from small_runs import killed_at, log, recipe, require_equal, state

from asbuilt import InputError, load, train
from asbuilt.text.tokenizer import Tokenizer
from asbuilt.train import loop
from asbuilt.train import recipe as recipes
from asbuilt.train.draws import drawing
from asbuilt.train.state import checkpoints
from asbuilt.train.text import text_data


@pytest.mark.parametrize(
    "changes", [(), ("step.accumulate=2", "optimizer.name=muon"), ("optimizer.name=adafactor", "step.z_loss=1e-3")]
)
def test_resuming_is_bitwise_never_having_stopped(tmp_path: Path, changes: tuple[str, ...]) -> None:
    loop.run(recipe(tmp_path, "whole", *changes))
    made = recipe(tmp_path, "stopped", *changes)
    for step in sorted(random.sample(range(1, 9), 2)):
        killed_at(made, step, resume=(tmp_path / "stopped").exists())
    loop.run(made, resume=True)
    require_equal(state(tmp_path / "whole", 9), state(tmp_path / "stopped", 9))
    assert log(tmp_path / "whole") == log(tmp_path / "stopped")


def test_checkpoints_are_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails while a checkpoint is written, the one before it is there, and resuming works."""
    made = recipe(tmp_path, "run")
    written = 0

    def failing(*args: object, **more: object) -> None:
        nonlocal written
        written += 1
        if written == failing_at:
            raise OSError(28, "No space left on device")
        save_file(*args, **more)  # type: ignore[arg-type]

    save_file, failing_at = loop.save_state.__globals__["save_file"], random.choice((3, 4))
    monkeypatch.setitem(loop.save_state.__globals__, "save_file", failing)
    with pytest.raises(InputError, match="No space left"):
        loop.run(made)
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    outcome = loop.run(made, resume=True)
    assert outcome.steps == 9
    assert [path.name for path in checkpoints(folder)] == ["step-00000006", "step-00000009"]
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000006", "step-00000009"]


def test_the_exported_model_is_read_by_us_and_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    outcome = train(recipe(tmp_path, "run"))
    exported = tmp_path / "run" / "model"
    model, theirs = load(exported), AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager")
    text = (tmp_path / "text.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(exported).encode(text)
    assert PreTrainedTokenizerFast(tokenizer_file=str(exported / "tokenizer.json")).encode(text) == ids
    assert Tokenizer.from_file(exported).decode(ids) == text
    held_out = torch.tensor(ids[len(ids) - int(len(ids) * 0.1) :])
    rows = [held_out[i : i + 9] for i in range(0, len(held_out) - 8, 8)]
    for one in (model, theirs):
        with torch.no_grad():
            made = [one(row[None, :-1]) for row in rows]
        losses = [
            torch.nn.functional.cross_entropy((out if torch.is_tensor(out) else out.logits)[0], row[1:])
            for out, row in zip(made, rows, strict=True)
        ]
        assert outcome.validation == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)


def test_data_depends_on_seed_and_step_alone(tmp_path: Path) -> None:
    made = recipe(tmp_path, "run", "data.batch=4")
    data, vocabulary = text_data(made.data, 5)
    text = (tmp_path / "text.txt").read_text(encoding="utf-8")
    assert vocabulary.ids.tolist() == [sorted(set(text)).index(character) for character in text]
    for step in random.sample(range(1000), 3):
        whole = data.batch(step)
        assert torch.equal(whole.ids, data.batch(step).ids)
        for ranks in (2, 4):
            assert torch.equal(whole.ids, torch.cat([data.batch(step, rank, ranks).ids for rank in range(ranks)]))
        assert torch.equal(whole.ids[:, 1:], whole.targets[:, :-1])
        assert not torch.equal(whole.ids, data.batch(step + 1).ids)
    states = {tuple(drawing(seed, step).get_state().tolist()) for seed in range(4) for step in range(4)}
    assert len(states) == 16
    read = torch.cat([b.ids.flatten() for b in data.validation()])
    assert torch.equal(read, data.held_out[: len(read)])
    assert len(data.held_out) - len(read) <= 8 + 1


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    made = recipe(tmp_path, "run")

    def spoil(at: loop.Progress) -> None:
        if at.step == 5 and at.validation is None:
            with torch.no_grad():
                dict(one.run.model.named_parameters())["blocks.1.ffn.body.up.weight"][0, 0] = math.inf

    one = loop.Loop(loop.prepare(made), spoil)
    with pytest.raises(InputError, match=r"step 6: blocks\.1\.ffn\.body\.up\.weight is not finite.*step-00000003"):
        one.finish()
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000003"]


def test_what_a_run_refuses(tmp_path: Path) -> None:
    made = recipe(tmp_path, "run", "run.steps=3")
    loop.run(made)
    with pytest.raises(InputError, match="already exists"):
        loop.run(made)
    with pytest.raises(InputError, match=r"optimizer\.lr: the run has 0\.003"):
        loop.run(recipe(tmp_path, "run", "run.steps=3", "optimizer.lr=0.1"), resume=True)
    with pytest.raises(InputError, match="nothing to resume"):
        loop.run(recipe(tmp_path, "other"), resume=True)
    with pytest.raises(InputError, match=r"data\.context"):
        loop.run(recipe(tmp_path, "other", "data.context=9"))
    with pytest.raises(InputError, match="tokenizer has 256 tokens"):
        loop.run(recipe(tmp_path, "other", "data.tokenizer=bytes", "model.config.vocab_size=255"))
    for content, said in (
        (b"", "empty"),
        (b" \n", "empty"),
        (b"a\0b", "NUL at byte 1"),
        (b"\xff\xfe", "UTF-8"),
        (b"ab", "tokens"),
    ):
        (tmp_path / "odd.txt").write_bytes(content)
        with pytest.raises(InputError, match=said):
            loop.run(recipe(tmp_path, "other", f"data.text={tmp_path / 'odd.txt'}"))
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    made = recipe(tmp_path, "run", "run.steps=3")
    loop.run(made)
    file = tmp_path / "run" / "checkpoints" / "step-00000003" / "state.json"
    told = json.loads(file.read_text())
    told["recipe"]["model"]["config"]["n_embd"] = 24
    file.write_text(json.dumps(told))
    with pytest.raises(InputError, match="a checkpoint of another model: "):
        loop.run(recipes.loads(recipes.dumps(made), changes=["model.config.n_embd=24"]), resume=True)
    assert small_runs.log(tmp_path / "run")[-1]["step"] == 3

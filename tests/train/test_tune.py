"""Fine-tuning: adapters start at nothing and alone change, and others compute what was trained."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import small_chats
import torch
from click.testing import CliRunner
from peft import PeftModel
from safetensors.torch import load_file
from small_chats import recipe, theirs, words
from small_runs import killed_at, log, require_equal, state
from torch import Tensor
from transformers import AutoTokenizer

import asbuilt
from asbuilt import InputError, load
from asbuilt.catalog import machines
from asbuilt.cli.main import cli
from asbuilt.nn import stored_tensors
from asbuilt.nn.model import Model
from asbuilt.train import loop
from asbuilt.train.batch import Batch
from asbuilt.train.optimizer import optimizers
from asbuilt.train.planned import planned
from asbuilt.train.settings import Optimizer
from asbuilt.train.step import train_step
from asbuilt.train.tune import base_spec, tuned_model
from asbuilt.train.tune_settings import Tune

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"kind": "lora", "rank": 3},
    "names": {"kind": "lora", "rank": 2, "targets": ["q", "down"]},
    "a block": {"kind": "lora", "rank": 2, "targets": ["blocks.1.*", "o"]},
}


def is_adapter(path: str) -> bool:
    return path.endswith(("lora_a", "lora_b"))


def held(model: Model) -> dict[str, Tensor]:
    return {path: tensor.detach().clone() for path, tensor in stored_tensors(model).items()}


def quantised(folder: Path) -> Path:
    """The checkpoint as a GGUF file of blocks, without its tokenizer, which GGUF has no name for."""
    base = small_chats.checkpoint(folder / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).unlink()
    asbuilt.convert(base, folder / "m.gguf", "q8_0")
    return folder / "m.gguf"


def drawn(n_vocab: int) -> Batch:
    ids = torch.randint(n_vocab, (3, 12))
    return Batch(ids=ids[:, :-1], targets=ids[:, 1:])


def test_adapters_start_as_the_checkpoint_bit_by_bit(tmp_path: Path) -> None:
    base = small_chats.checkpoint(tmp_path / "base")
    plain = load(base, dtype="float32").train()
    ids = torch.randint(plain.spec.n_vocab, (2, 9))
    for targets in ((), ("q", "up")):
        model = tuned_model(base, Tune(kind="lora", rank=2, targets=targets), seed=int(torch.randint(99, ())))
        assert torch.equal(model(ids), plain(ids))
        found = [p.detach() for path, p in model.named_parameters() if path.endswith("lora_a")]
        assert all(float(p.abs().max()) <= p.shape[-1] ** -0.5 < 3 * float(p.abs().max()) for p in found)
        assert len({tuple(p.flatten()[:3].tolist()) for p in found}) == len(found)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_trained_changes_and_is_kept(kind: str, tmp_path: Path) -> None:
    """Checkpoints have the adapters alone, and so has the optimizer."""
    made = recipe(tmp_path, "run", **KINDS[kind])
    one = loop.prepare(made)
    before = held(one.model)
    loop.Loop(one, lambda _: None).finish()
    after = held(one.model)
    wanted = {path for path in before if is_adapter(path)} or set(before)
    assert {path for path in before if not torch.equal(before[path], after[path])} == wanted
    at = tmp_path / "run" / "checkpoints" / "step-00000006"
    require_equal(load_file(at / "weights.safetensors"), {path: after[path] for path in wanted})
    kept = load_file(at / "optimizer.safetensors")
    assert {name.rpartition("/")[0] for name in kept if "/" in name} == wanted
    assert json.loads((at / "state.json").read_text())["recipe"]["model"]["source"] == str(tmp_path / "base")


@pytest.mark.parametrize("kind", [*KINDS, "qlora"])
def test_the_plan_s_state_is_what_is_held(kind: str, tmp_path: Path) -> None:
    """Trained parameters, bytes of weights, of gradients and of the optimizer's state, counted on the built model."""
    source = quantised(tmp_path) if kind == "qlora" else small_chats.checkpoint(tmp_path / "base")
    tune = KINDS.get(kind, {"kind": "qlora", "rank": 4})
    made = recipe(tmp_path, "run", f"model.source={source}", **tune)
    model = tuned_model(source, made.tune, 1)
    optimizer = optimizers(model, made.optimizer)
    train_step(model, [drawn(model.spec.n_vocab)], optimizer)
    plan = planned(made, base_spec(made, asbuilt.open_model(source).reading), machines.find("h100-sxm"))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert plan.state.gradients == sum(p.grad.nbytes for p in trained if p.grad is not None)
    assert plan.state.gradients // 4 == sum(p.numel() for p in trained)
    assert plan.state.weights == sum(p.nbytes for p in model.parameters())
    states = [s for one, _ in optimizer.made for s in one.state.values()]
    assert sum(plan.state.optimizer.values()) == sum(t.nbytes for s in states for n, t in s.items() if n != "step")


def test_packed_blocks_with_adapters_train_as_the_expanded_weights_do(tmp_path: Path) -> None:
    file = quantised(tmp_path)
    batches = [drawn(small_chats.theirs(tmp_path / "base").config.vocab_size) for _ in range(3)]
    found = {}
    for kind in ("lora", "qlora"):
        model = tuned_model(file, Tune(kind=kind, rank=4), seed=7)
        optimizer, before = optimizers(model, Optimizer(lr=0.01)), held(model)
        losses = [train_step(model, [batch], optimizer).loss for batch in batches]
        after = held(model)
        assert {path for path in before if not torch.equal(before[path], after[path])} == set(filter(is_adapter, after))
        found[kind] = (losses, {path: tensor for path, tensor in after.items() if is_adapter(path)})
        packed = [p for p in model.parameters() if p.dtype == torch.uint8]
        assert bool(packed) == (kind == "qlora")
        assert all(p.grad is None for p in packed)
    assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(found["lora"][0], found["qlora"][0], strict=True))
    for path, tensor in found["lora"][1].items():
        torch.testing.assert_close(found["qlora"][1][path], tensor, rtol=1e-3, atol=1e-4)
    merged = asbuilt.merged(model)
    assert merged.spec == load(file).spec
    ids = batches[0].ids
    with torch.no_grad():
        torch.testing.assert_close(merged(ids), model(ids), rtol=1e-4, atol=1e-4)


def test_others_compute_what_was_trained(tmp_path: Path) -> None:
    """PEFT beside transformers, and transformers alone with the merged folder."""
    outcome = loop.run(recipe(tmp_path, "run", kind="lora", rank=3, alpha=5.0))
    base, folder = tmp_path / "base", outcome.exported
    assert folder == tmp_path / "run" / "adapter"
    assert not (tmp_path / "run" / "model").exists()
    model = load(base, adapter=folder)
    kept = load_file(tmp_path / "run" / "checkpoints" / "step-00000006" / "weights.safetensors")
    require_equal({path: tensor for path, tensor in held(model).items() if is_adapter(path)}, kept)
    ids = torch.randint(model.spec.n_vocab, (2, 11))
    with torch.no_grad():
        want, before = model(ids), load(base)(ids)
        beside = PeftModel.from_pretrained(theirs(base), str(folder)).eval()(ids).logits
    assert (before - want).abs().max() > 0.01 * want.abs().max()
    torch.testing.assert_close(beside, want, rtol=1e-4, atol=1e-4)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    ran = CliRunner().invoke(cli, ["convert", str(base), str(tmp_path / "merged"), "--adapter", str(folder), "--json"])
    assert ran.exit_code == 0, ran.stderr
    with torch.no_grad():
        for one in (theirs(tmp_path / "merged")(ids).logits, asbuilt.merged(model)(ids)):
            torch.testing.assert_close(one, want, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == small_chats.TEMPLATE
    refused = CliRunner().invoke(cli, ["convert", str(base), str(tmp_path / "m.gguf"), "--adapter", str(folder)])
    assert (refused.exit_code, "adapter: adapters are merged into folders alone" in refused.stderr) == (2, True)


def test_full_tuning_exports_the_model_with_its_template(tmp_path: Path) -> None:
    outcome = loop.run(recipe(tmp_path, "run"))
    assert outcome.exported == tmp_path / "run" / "model"
    read = AutoTokenizer.from_pretrained(outcome.exported)
    assert read.chat_template == small_chats.TEMPLATE
    ids = torch.randint(200, (1, 7))
    with torch.no_grad():
        want = theirs(outcome.exported)(ids).logits
        torch.testing.assert_close(load(outcome.exported)(ids), want, rtol=1e-4, atol=1e-4)
        assert (theirs(tmp_path / "base")(ids).logits - want).abs().max() > 1e-3


@pytest.mark.parametrize("data", ["chat", "preferences"])
def test_a_resumed_run_is_one_that_never_stopped(data: str, tmp_path: Path) -> None:
    file = small_chats.chats(tmp_path) if data == "chat" else small_chats.preferences(tmp_path)
    whole, broken = (recipe(tmp_path, out, f"data.{data}={file}", kind="lora") for out in ("whole", "broken"))
    loop.run(whole)
    killed_at(broken, 5)
    loop.run(broken, resume=True)
    require_equal(state(tmp_path / "whole", 6), state(tmp_path / "broken", 6))
    require_equal(*(load_file(tmp_path / out / "adapter" / "adapter_model.safetensors") for out in ("whole", "broken")))
    assert log(tmp_path / "whole") == log(tmp_path / "broken")


def test_what_is_taught_is_learned(tmp_path: Path) -> None:
    """Adapters alone teach one answer to all questions, and text works as chats do."""
    file = small_chats.lines(tmp_path / "one.jsonl", [{"prompt": words(), "response": "cab"} for _ in range(4)])
    changes = (f"data.chat={file}", "data.validation=0", "run.steps=40", "optimizer.lr=0.03", "data.batch=4")
    one = loop.prepare(recipe(tmp_path, "run", *changes, kind="lora", alpha=64))
    losses = [one.step().loss for _ in range(40)]
    assert losses[0] > 3.0
    assert losses[-1] < 0.3 * losses[0]
    text = tmp_path / "text.txt"
    text.write_text("abc " * 99)
    given = (f"data.text={text}", f"data.tokenizer={tmp_path / 'base'}", "data.context=8", "data.validation=0.1")
    outcome = loop.run(recipe(tmp_path, "text", *given, kind="lora"))
    assert outcome.exported == tmp_path / "text" / "adapter"


def test_the_command_line_trains_adapters_and_plans_them(tmp_path: Path) -> None:
    base, file = small_chats.checkpoint(tmp_path / "base"), small_chats.chats(tmp_path)
    (tmp_path / "r.toml").write_text(f'[model]\nsource = "{base}"\nweights = true\n[tune]\nkind = "lora"\nrank = 2\n')
    typed = ["train", str(tmp_path / "r.toml"), f"data.chat={file}", "data.context=100", f"run.out={tmp_path / 'run'}"]
    ran = CliRunner().invoke(cli, [*typed, "run.steps=2", "--json"])
    assert ran.exit_code == 0, ran.stderr
    assert json.loads(ran.stdout)["adapter"] == str(tmp_path / "run" / "adapter")
    ran = CliRunner().invoke(cli, [*typed, "run.steps=2", "--resume"])
    assert f"generate {base} --adapter {tmp_path / 'run' / 'adapter'}" in ran.stdout
    shown = CliRunner().invoke(cli, [*typed, "--show"])
    assert "rank = 2  # Width between the two matrices of an adapter." in shown.stdout


REFUSED = {
    "no weights": (["model.weights=false"], {"kind": "lora"}, "tune.kind: adapters are trained beside the weights"),
    "a kind": ([], {"kind": "dora"}, "tune.kind: must be full, lora or qlora"),
    "a rank": ([], {"kind": "lora", "rank": 0}, "tune.rank"),
    "a larger rank": ([], {"kind": "lora", "rank": 99}, "must be at most 32"),
    "no alpha": ([], {"kind": "lora", "alpha": 0}, "tune.alpha: must be a number above 0"),
    "a target": ([], {"kind": "lora", "targets": ["query"]}, "targets: no linear map of a block has this name"),
    "no such block": ([], {"kind": "lora", "targets": ["blocks.7.*"]}, "a pattern such as"),
    "rank of all": ([], {"rank": 4}, 'tune.rank: has no effect with tune.kind="full"'),
    "beta of chats": ([], {"beta": 0.2}, "tune.beta: has no effect without data.preferences"),
    "smoothing": ([], {"smoothing": 0.5}, "tune.smoothing: must be a number from 0 to below 0.5"),
    "blocks": ([], {"kind": "qlora"}, "packed: holds no blocks"),
    "two data": (["data.preferences=x"], {}, "data.chat and data.preferences: only one is read"),
    "a tokenizer": (["data.tokenizer=bytes"], {}, "data.tokenizer: chats are written with the model's own"),
    "packing": (["data.packing=documents"], {}, "data.packing: has no effect on chats"),
    "no file": (["data.chat=none.jsonl"], {}, "data.chat"),
    "balancing": (["experts.bias_rate=0.1"], {"kind": "lora"}, "experts.bias_rate: with adapters nothing else changes"),
    "z-loss": (["data.preferences=x", "data.chat=", "step.z_loss=0.1"], {}, "step.z_loss: not part of the loss"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_does_not_go_together_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    changes, tune, said = REFUSED[wrong]
    small_chats.checkpoint(tmp_path / "base")
    chats = f"data.chat={small_chats.chats(tmp_path)}"
    with pytest.raises(InputError) as refused:
        loop.run(recipe(tmp_path, "run", chats, *changes, **tune))
    assert said in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_chats_need_a_checkpoint_with_a_tokenizer(tmp_path: Path) -> None:
    base = small_chats.checkpoint(tmp_path / "base")
    (base / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"model\.source: has no tokenizer"):
        loop.run(recipe(tmp_path, "run"))
    made = recipe(tmp_path, "run", "model.source=", "model.weights=false", "model.config.model_type=llama")
    with pytest.raises(InputError, match="with the tokenizer of a checkpoint"):
        loop.run(made)


def test_a_checkpoint_of_other_adapters_is_refused(tmp_path: Path) -> None:
    loop.run(recipe(tmp_path, "run", kind="lora", targets=["q"]))
    with pytest.raises(InputError, match=r"tune\.targets: the run has \['q'\]"):
        loop.run(recipe(tmp_path, "run", kind="lora", targets=["k"]), resume=True)

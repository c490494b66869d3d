"""Adapter folders, against the PEFT library: what it writes computes the same here, and what we write there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

import asbuilt
from asbuilt.checkpoint.load import load
from asbuilt.errors import InputError
from asbuilt.nn import stored_tensors
from asbuilt.spec import Lora, adapted, walk

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
IDS = torch.randint(tiny.N_VOCAB, (2, 7))
LLAMA = {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"], "r": 3, "lora_alpha": 5}
GPT2 = {"target_modules": ["c_attn", "c_fc"], "r": 2, "lora_alpha": 7, "fan_in_fan_out": True}


def phi3(folder: Path) -> PreTrainedModel:
    """A model whose queries, keys and values are one matrix, gate and up another."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    made = Phi3ForCausalLM(Phi3Config(vocab_size=tiny.N_VOCAB, bos_token_id=0, eos_token_id=1, **sizes, **heads))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    made.save_pretrained(folder)
    return made


def base(family: str, folder: Path) -> None:
    """Writes a base model of the family."""
    if family == "phi3":
        phi3(folder)
    else:
        tiny.write(folder, family, 1)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "ranks by module": (
        "llama",
        {**LLAMA, "rank_pattern": {"q_proj": 2, "model.layers.1.mlp.down_proj": 4}, "alpha_pattern": {"v_proj": 11}},
    ),
    "rank-stabilised": ("llama", {**LLAMA, "use_rslora": True}),
    "one layer": ("llama", {**LLAMA, "layers_to_transform": [1]}),
    "gpt2, q, k and v as one, transposed": ("gpt2", GPT2),
    "phi3, q, k and v as one": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"], "r": 2}),
}


@pytest.fixture(params=CASES)
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Path, torch.Tensor]:
    """A base model, an adapter that PEFT has written, with random A and B, and the logits that it computes."""
    family, config = CASES[request.param]
    base(family, tmp_path / "base")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(**config))
    torch.manual_seed(5)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(str(tmp_path / "adapter"))
    with torch.no_grad():
        return family, tmp_path / "base", tmp_path / "adapter", theirs.eval()(IDS).logits


@torch.no_grad()
def test_what_peft_has_written_computes_the_same(folders: tuple[str, Path, Path, torch.Tensor]) -> None:
    _, folder, adapter, want = folders
    model = load(folder, adapter=adapter)
    torch.testing.assert_close(model(IDS), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    assert (load(folder)(IDS) - want).abs().max() > 0.01 * want.abs().max()
    frozen = {path for path, p in model.named_parameters() if "lora_" not in path and not p.requires_grad}
    beside = {path for path, part in walk(model.spec) if isinstance(part, Lora)}
    assert {path.rpartition(".")[0] for path in frozen} == beside


@torch.no_grad()
def test_what_we_write_computes_the_same_there(folders: tuple[str, Path, Path, torch.Tensor], tmp_path: Path) -> None:
    family, folder, adapter, want = folders
    model = load(folder, adapter=adapter)
    asbuilt.save_adapter(model, tmp_path / "again", family=family, base="somewhere/base")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(tmp_path / "again"))
    torch.testing.assert_close(theirs.eval()(IDS).logits, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    stored, back = load_file(adapter / WEIGHTS), load_file(tmp_path / "again" / WEIGHTS)
    assert stored.keys() == back.keys()
    assert all(torch.equal(stored[name], back[name]) for name in stored)
    assert json.loads((tmp_path / "again" / CONFIG).read_text())["base_model_name_or_path"] == "somewhere/base"


@torch.no_grad()
def test_every_expert_s_own(tmp_path: Path) -> None:
    """One module for each expert, as PEFT names modules; PEFT with transformers 5 knows experts as stacks alone."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {
        "model_type": "mixtral",
        "vocab_size": 31,
        **sizes,
        "num_key_value_heads": 1,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    }
    spec = asbuilt.families.read_config(config, "x").spec
    asbuilt.save(asbuilt.build(spec, seed=1), tmp_path / "base", family="mixtral")
    made = asbuilt.build(adapted(spec, 2, 3.0, ("up", "down")), seed=2)
    for path, tensor in stored_tensors(made).items():
        if "lora_" in path:
            tensor.normal_()
    asbuilt.save_adapter(made, tmp_path / "adapter", family="mixtral")
    stored = load_file(tmp_path / "adapter" / WEIGHTS)
    held = stored_tensors(made)
    for expert in range(3):
        name = f"base_model.model.model.layers.0.block_sparse_moe.experts.{expert}.w2"
        assert torch.equal(stored[f"{name}.lora_A.weight"], held["blocks.0.ffn.body.down_lora_a"][expert])
        assert torch.equal(stored[f"{name}.lora_B.weight"], held["blocks.0.ffn.body.down_lora_b"][expert])
    changed("revision", "main")(tmp_path / "adapter")  # about where the base came from
    again = stored_tensors(load(tmp_path / "base", adapter=tmp_path / "adapter"))
    assert all(torch.equal(tensor, again[path]) for path, tensor in held.items() if "lora_" in path)

    name = "block_sparse_moe.experts.1.w2"  # alone with another alpha, and then with another rank
    changed("alpha_pattern", {name: 5})(tmp_path / "adapter")
    with pytest.raises(InputError, match="several ranks or alphas"):
        load(tmp_path / "base", adapter=tmp_path / "adapter")
    changed("rank_pattern", {name: 3})(tmp_path / "adapter")
    changed("alpha_pattern", {})(tmp_path / "adapter")
    whole = f"base_model.model.model.layers.0.{name}"
    tensors(
        lambda s: s.update({f"{whole}.lora_A.weight": torch.ones(3, 24), f"{whole}.lora_B.weight": torch.ones(16, 3)})
    )(tmp_path / "adapter")
    with pytest.raises(InputError, match="several ranks or alphas"):
        load(tmp_path / "base", adapter=tmp_path / "adapter")


def changed(key: str, value: object) -> Callable[[Path], None]:
    """A change of the config."""

    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | {key: value}))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """A change of the tensors."""

    def changing(folder: Path) -> None:
        stored = load_file(folder / WEIGHTS)
        change(stored)
        save_file(stored, folder / WEIGHTS)

    return changing


NAME = "base_model.model.model.layers.0.self_attn.q_proj"
WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "another method": (changed("peft_type", "LOHA"), "peft_type"),
    "another computation": (changed("use_dora", True), "use_dora"),
    "whole modules": (changed("modules_to_save", ["lm_head"]), "modules_to_save"),
    "biases": (changed("bias", "all"), "bias"),
    "a key of a later version": (changed("twisted", 3), "twisted"),
    "another rank": (changed("r", 4), "r"),
    "no alpha": (changed("lora_alpha", "much"), "lora_alpha"),
    "an alpha that is no number": (changed("lora_alpha", float("inf")), "lora_alpha"),
    "an expression": (changed("alpha_pattern", {"(a+)+b": 3}), "alpha_pattern"),
    "no modules": (tensors(dict.clear), WEIGHTS),
    "half a pair": (tensors(lambda stored: stored.pop(f"{NAME}.lora_B.weight")), WEIGHTS),
    "an embedding": (
        tensors(lambda stored: stored.update({"base_model.model.lora_embedding_A": torch.ones(1)})),
        WEIGHTS,
    ),
    "a module there is not": (
        tensors(lambda s: s.update({f"{NAME}s.lora_{x}.weight": s[f"{NAME}.lora_{x}.weight"].clone() for x in "AB"})),
        "q_projs",
    ),
    "the head": (
        tensors(lambda s: s.update({f"base_model.model.lm_head.lora_{x}.weight": torch.ones(3, 12) for x in "AB"})),
        "lm_head",
    ),
    "a single number": (tensors(lambda s: s.update({f"{NAME}.lora_A.weight": torch.tensor(3.0)})), WEIGHTS),
    "another shape": (tensors(lambda s: s.update({f"{NAME}.lora_A.weight": torch.ones(3, 5)})), "does not fit"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), CONFIG),
    "no tensors": (lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    tiny.write(tmp_path / "base", "llama", 1)
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(**LLAMA))
    made.save_pretrained(str(tmp_path / "adapter"))
    change, named = WRONG[wrong]
    change(tmp_path / "adapter")
    with pytest.raises(InputError, match=named):
        load(tmp_path / "base", adapter=tmp_path / "adapter")


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "targets"), [("phi3", None), ("phi3", ("q", "v", "up")), ("gpt2", None), ("gpt2", ("k", "down"))]
)
def test_maps_that_are_stored_as_one_have_one_adapter(
    family: str, targets: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """Each map has an A of its own here: PEFT computes the same with all ranks in one."""
    base(family, tmp_path / "base")
    plain = load(tmp_path / "base")
    model = asbuilt.build(adapted(plain.spec, 2, 3.0, targets), seed=0).eval()
    own = stored_tensors(plain)
    for path, tensor in stored_tensors(model).items():
        tensor.copy_(own[path]) if path in own else tensor.normal_()
    asbuilt.save_adapter(model, tmp_path / "adapter", family=family)
    want = model(IDS)
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(tmp_path / "adapter")
    )
    torch.testing.assert_close(theirs.eval()(IDS).logits, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    again = load(tmp_path / "base", adapter=tmp_path / "adapter")(IDS)
    torch.testing.assert_close(again, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    phi3(tmp_path / "base")
    spec = load(tmp_path / "base").spec
    for change, said in (
        (lambda: spec, "no adapters"),
        (lambda: adapted(adapted(spec, 2, 3.0, ("q", "k")), 2, 4.0, ("v",)), "several ranks"),
    ):
        model = asbuilt.build(change(), seed=0)
        with pytest.raises(InputError, match=said):
            asbuilt.save_adapter(model, tmp_path / "adapter", family="phi3")
        assert not (tmp_path / "adapter").exists()


def test_a_model_of_no_family_is_refused(tmp_path: Path) -> None:
    spec = asbuilt.decoder(d_model=32, n_layers=2, n_heads=4, n_vocab=50, max_positions=64)
    asbuilt.save(asbuilt.build(spec.edit("blocks.0.attention.body", window=3, sinks=True), seed=0), tmp_path / "own")
    with pytest.raises(InputError, match="published family"):
        load(tmp_path / "own", adapter=tmp_path)

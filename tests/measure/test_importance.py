"""Mean squares of inputs: beside hooks on transformers' model, and by hand for experts."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import asbuilt
import asbuilt.families
from asbuilt.checkpoint.load import load
from asbuilt.errors import InputError
from asbuilt.measure.importance import importance
from asbuilt.measure.loss import WINDOW
from asbuilt.nn.experts import MixtureOfExperts
from asbuilt.spec import Model

NAMES = {"self_attn": "attention.body", "mlp": "ffn.body", "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
NAMES |= {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def test_as_hooks_on_transformers_model_find(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW,
    )
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "m")
    ids = torch.randint(50, (WINDOW + 30,)).tolist()
    sums: dict[str, Tensor] = {}

    def keep(name: str, module: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        sums[name] = sums.get(name, torch.zeros(())) + given[0].double().square().sum((0, 1))

    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(functools.partial(keep, name))
    with torch.no_grad():
        for part in (ids[:WINDOW], ids[WINDOW:]):
            theirs(torch.tensor([part]))
    found = importance(load(tmp_path / "m"), ids)
    assert len(found) == len(sums) == 14
    for name, total in sums.items():
        _, _, layer, part, of = name.split(".")
        ours = found[f"blocks.{layer}.{NAMES[part]}.{NAMES[of]}.weight"]
        torch.testing.assert_close(ours.double(), total / len(ids), rtol=1e-4, atol=1e-9)


def mixture() -> Model:
    config = {
        "model_type": "mixtral",
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    return asbuilt.families.read_config(config, "x").spec


@torch.inference_mode()
def test_experts_by_hand() -> None:
    model = asbuilt.build(mixture(), seed=3).eval()
    part = next(module for module in model.modules() if isinstance(module, MixtureOfExperts))
    with torch.no_grad():
        part.router.weight[2].zero_().sub_(100 * torch.ones(16))  # so that it is never chosen, or always
    seen: list[Tensor] = []
    handle = part.register_forward_pre_hook(lambda module, given: seen.append(given[0].flatten(0, 1)))
    ids = torch.randint(40, (33,)).tolist()
    found = importance(model, ids)
    handle.remove()
    assert part.watch is None
    (x,) = seen
    _, chosen = part.router(x)
    path = next(path for path, module in model.named_modules() if module is part)
    for e in range(4):
        rows = x[(chosen == e).any(-1)]
        gate, up = (model.get_parameter(f"{path}.{name}")[e] for name in ("gate", "up"))
        hidden = F.silu(rows @ gate.T) * (rows @ up.T)
        for name, of in (("gate", rows), ("up", rows), ("down", hidden)):
            wanted = of.square().mean(0) if len(rows) else torch.ones(of.shape[-1])
            torch.testing.assert_close(found[f"{path}.{name}"][e], wanted.detach(), rtol=1e-4, atol=1e-9)


def test_inputs_that_are_no_numbers_are_named() -> None:
    model = asbuilt.build(mixture(), seed=3).eval()
    with torch.no_grad():
        model.get_parameter("embedding.weight")[5] = torch.nan
    with pytest.raises(InputError, match=r"blocks\.0\.attention\.body\.q\.weight: has an input that is NaN"):
        importance(model, [1, 5, 2])
